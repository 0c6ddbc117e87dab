"""Set-up: which torch it installs where, decided by the facts that the doctor judges by."""

import ast
from pathlib import Path

import pytest
import setup

SCRIPT = Path(__file__).parents[1] / "tools" / "setup.py"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """What would be installed: (build, requirement)."""
    asked: list[tuple[str, str]] = []
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Python 3.12.8\n")
    python.chmod(0o700)
    monkeypatch.setattr(setup, "PYTHON", python)
    monkeypatch.setattr(setup, "install_with_uv", lambda build, requirement: asked.append((build, requirement)))
    monkeypatch.setattr(setup, "pip", lambda *arguments: asked.append(("pip", arguments[-1])))
    return asked


@pytest.mark.parametrize(
    ("architectures", "wanted"),
    [
        (["gfx906"], ("rocm6.3", "torch==2.7.0")),
        (["gfx1030"], ("rocm6.3", "torch==2.7.1")),
        (["gfx1201"], ("rocm7.2", "torch>=2.11")),
        (["gfx1151"], ("rocm7.2", "torch>=2.11")),
        (["gfx803"], ("auto", "torch>=2.7")),
    ],
)
def test_an_amd_card_gets_the_torch_that_works_on_it(
    installed: list[tuple[str, str]], architectures: list[str], wanted: tuple[str, str]
) -> None:
    setup.install_for_amd(architectures)
    assert installed == [wanted]


def test_a_python_without_wheels_is_refused_before_anything_is_installed(installed: list[tuple[str, str]]) -> None:
    setup.PYTHON.write_text("#!/bin/sh\necho Python 3.14.1\n")
    with pytest.raises(SystemExit, match=r"PYTHON=python3\.12"):
        setup.install_for_amd(["gfx906"])
    assert installed == []


@pytest.mark.parametrize(
    ("capability", "driver", "wanted"),
    [
        ("9.0", "580.95.05", ("pip", "torch==2.13.0")),
        ("9.0", "550.54", ("cu128", "torch>=2.8")),
        ("7.0", "580.95.05", ("cu126", "torch>=2.7")),
    ],
)
def test_an_nvidia_card_gets_one_that_it_and_its_driver_can_run(
    installed: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    driver: str,
    wanted: tuple[str, str],
) -> None:
    card = {"architecture": capability, "driver": driver}
    monkeypatch.setattr("hivetune.machine.drivers.read_nvidia", lambda: [card])
    setup.install_for_nvidia()
    assert installed == [wanted]


def test_an_old_python_reads_as_far_as_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syntax of 3.8, and no annotation that it would evaluate: `list[str]` is a TypeError there."""
    text = SCRIPT.read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 8))
    assert text.index("from __future__ import annotations") < text.index("import json")
    monkeypatch.setattr(setup.sys, "version_info", (3, 8, 10))
    monkeypatch.setattr(setup.sys, "version", "3.8.10 (default)")
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer, this is 3\.8\.10"):
        setup.main(["train"])

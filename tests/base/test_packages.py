"""The command that a hint names exists: Hivetune itself is in no package index."""

from pathlib import Path

import pytest

from hivetune.base import packages


def test_of_a_source_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(packages, "ROOT", folder)
    assert packages.install_command("serve") == f"pip install -e '{folder}[serve]'"


def test_elsewhere_the_packages_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    assert packages.install_command("redis") == "pip install 'redis>=5'"
    assert packages.install_command("lm-eval") == "pip install 'lm-eval[api]>=0.4.13'"
    assert "xllamacpp" in packages.install_command("serve")

"""The command that a hint names exists: Hivetune itself is in no package index."""

from pathlib import Path

import pytest

from hivetune.base import paths


@pytest.fixture(autouse=True)
def executable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/opt/its own/python")


def test_packages_come_into_the_environment_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    python = "'/opt/its own/python'"
    assert paths.pip_install() == f"{python} -m pip install"
    torch = f"{python} -m pip install uv && {python} -m uv pip install --python {python} torch"
    assert paths.uv_install("torch") == torch
    assert paths.pip_install("/other/python") == "/other/python -m pip install"
    assert paths.install_command("zst").startswith(f"{python} -m pip install -e ")
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    assert paths.pip_install() == f"uv pip install --python {python}"


def test_of_a_source_folder_and_elsewhere_the_packages_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert paths.install_command("redis").endswith("-m pip install 'redis>=5'")
    (tmp_path / "pyproject.toml").touch()
    assert paths.install_command("serve").endswith(f"-m pip install -e '{tmp_path}[serve]'")

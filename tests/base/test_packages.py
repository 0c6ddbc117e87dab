"""The command that a hint names exists: Hivetune itself is in no package index."""

from pathlib import Path

import pytest

from hivetune.base import paths


def test_packages_come_into_the_environment_of_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By pip or uv, whichever it has; of a source folder with its extra, elsewhere the packages themselves."""
    monkeypatch.setattr("sys.executable", "/opt/its own/python")
    python = "'/opt/its own/python'"
    assert paths.pip_install() == f"{python} -m pip install"
    torch = f"{python} -m pip install uv && {python} -m uv pip install --python {python} torch"
    assert paths.uv_install("torch") == torch
    assert paths.pip_install("/other/python") == "/other/python -m pip install"
    assert paths.install_command("zst").startswith(f"{python} -m pip install -e ")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert paths.install_command("redis").endswith("-m pip install 'redis>=5'")
    (tmp_path / "pyproject.toml").touch()
    assert paths.install_command("serve").endswith(f"-m pip install -e '{tmp_path}[serve]'")
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    assert paths.pip_install() == f"uv pip install --python {python}"

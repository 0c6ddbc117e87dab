"""The command that a hint names exists: Hivetune itself is in no package index."""

from pathlib import Path

import pytest

from hivetune.base import paths


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment with pip whose programs come first on PATH."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    return folder


def test_the_pip_of_another_environment_is_not_named(monkeypatch: pytest.MonkeyPatch, activated: Path) -> None:
    """As of `.venv/bin/hivetune`: the package came into an environment that Hivetune does not see."""
    assert paths.pip_install() == "pip install"
    assert paths.uv_install("torch") == "pip install uv && uv pip install torch"
    assert paths.pip_install("/opt/its own/python") == "'/opt/its own/python' -m pip install"
    monkeypatch.setattr("sys.executable", "/opt/hivetune/bin/python")
    assert paths.pip_install() == "/opt/hivetune/bin/python -m pip install"
    assert paths.uv_install("torch") == (
        "/opt/hivetune/bin/python -m pip install uv"
        " && /opt/hivetune/bin/python -m uv pip install --python /opt/hivetune/bin/python torch"
    )
    assert paths.install_command("zst").startswith("/opt/hivetune/bin/python -m pip install -e ")
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    assert paths.pip_install() == "uv pip install --python /opt/hivetune/bin/python"


def test_of_a_source_folder_and_elsewhere_the_packages_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert paths.install_command("redis") == "pip install 'redis>=5'"
    (tmp_path / "pyproject.toml").touch()
    assert paths.install_command("serve") == f"pip install -e '{tmp_path}[serve]'"

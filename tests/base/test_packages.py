"""The command that a hint names exists: Hivetune itself is in no package index."""

from pathlib import Path

import pytest

from hivetune.base import paths


def test_of_a_source_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(paths, "ROOT", folder)
    assert paths.install_command("serve") == f"pip install -e '{folder}[serve]'"


def test_elsewhere_the_packages_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert paths.install_command("redis") == "pip install 'redis>=5'"
    assert paths.install_command("lm-eval") == "pip install 'lm-eval[api]>=0.4.13'"
    assert "xllamacpp" in paths.install_command("serve")

"""Fixtures that every room shares: a home of its own, and programs that must be there."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's home."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HIVETUNE_HOME", str(home))
    return home


def require_program(name: str, package: str) -> str:
    """Path of a system program, else skip with its install line (or fail under HIVETUNE_REQUIRE_ALL=1)."""
    path = shutil.which(name)
    if path is None:
        reason = f"needs {name}: apt-get install {package}"
        if os.environ.get("HIVETUNE_REQUIRE_ALL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path

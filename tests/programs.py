"""Programs and packages that a test needs; a module of its own, since each folder may have a conftest."""

import importlib.util
import os
import shutil

import pytest


def require_program(name: str, package: str) -> str:
    """Path of a system program, else skip with its install line (or fail under HIVETUNE_REQUIRE_ALL=1)."""
    path = shutil.which(name)
    if path is None:
        _missing(f"needs {name}: apt-get install {package}")
    assert path is not None
    return path


def require_module(name: str, extra: str) -> None:
    """Skip (or fail under HIVETUNE_REQUIRE_ALL=1) without a package that most who run the tests need not have."""
    if importlib.util.find_spec(name) is None:
        _missing(f"needs {name}: python3 tools/setup.py {extra}")


def _missing(reason: str) -> None:
    if os.environ.get("HIVETUNE_REQUIRE_ALL") == "1":
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)

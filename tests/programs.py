"""Programs and packages that a test needs. Under HIVETUNE_REQUIRE_ALL=1 a skip is a failure (conftest.py)."""

import importlib.util
import shutil

import pytest


def require_program(name: str, package: str) -> str:
    """Path of a system program, else skip with its install line."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}: apt-get install {package}")
    return path


def require_module(name: str, extra: str) -> None:
    """Skip without a package that most who run the tests need not have."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: python3 tools/setup.py {extra}", allow_module_level=True)

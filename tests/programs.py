"""Programs and packages that a test needs. Under HIVETUNE_REQUIRE_ALL=1 a skip is a failure (conftest.py)."""

import importlib.util
import shutil
import sys
from pathlib import Path

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


def write_program(path: Path, source: str) -> Path:
    """Write a program in Python that is run by the tests' own interpreter; return its path."""
    # Linux takes no interpreter whose path has a space, and at most 127 bytes of it, so the shell starts it: what is a
    # command for the shell is a text for Python.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n{source}", encoding="utf-8")
    path.chmod(0o755)
    return path

"""Programs of the system that a test needs; a module of its own, since each folder may have a conftest."""

import os
import shutil

import pytest


def require_program(name: str, package: str) -> str:
    """Path of a system program, else skip with its install line (or fail under HIVETUNE_REQUIRE_ALL=1)."""
    path = shutil.which(name)
    if path is None:
        reason = f"needs {name}: apt-get install {package}"
        if os.environ.get("HIVETUNE_REQUIRE_ALL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path

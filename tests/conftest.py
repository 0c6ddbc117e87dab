"""Fixtures that every room shares: a home of its own, the demo model."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's home."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HIVETUNE_HOME", str(home))
    # The CPU kernels are compiled once for all of a session's processes.
    monkeypatch.setenv("HIVETUNE_KERNELS", str(tmp_path_factory.getbasetemp() / "kernels"))
    return home


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared demo model (25 s), made once per session, or once at all with HIVETUNE_TEST_CACHE=FOLDER."""
    from hivetune.store import manifest_problems
    from hivetune.supervise.task import run_task

    cache = os.environ.get("HIVETUNE_TEST_CACHE")
    parent = Path(cache) if cache else tmp_path_factory.mktemp("models")
    folder = parent / "smollm2-135m"
    if manifest_problems(folder):
        task = {"model": "smollm2-135m", "target": str(folder)}
        run_task("prepare_model", task, parent / "smollm2-135m.task").check("preparing the demo model")
    return folder

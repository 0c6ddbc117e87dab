"""A fetch that is stopped leaves nothing half-made beside the models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hivetune.models.prepared import fetch_model, folder_for


def test_what_a_stopped_task_had_made_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path))
    folder = folder_for("someone/small")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead, alive = (folder.with_name(f".{folder.name}.{pid}.tmp") for pid in (ended.pid, os.getpid()))

    def interrupted(*_arguments: object, **_options: object) -> None:
        for work in (dead, alive):
            work.mkdir(parents=True)
            (work / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("hivetune.process.parent.run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_model("someone/small")
    assert (dead.exists(), alive.exists()) == (False, True)

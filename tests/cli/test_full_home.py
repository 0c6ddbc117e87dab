"""Commands on a full disk: what looks and what frees space works; output that can't be written is one message."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from command import hivetune
from small_disk import fill

from hivetune.base.database import open_database
from hivetune.base.disk import path_to_store, write_json, write_manifest
from hivetune.base.journal import Journal

SIZE_BYTES = 300_000


def make_run(folder: Path, status: str) -> Path:
    """A run with a checkpoint, known to hive.db."""
    (folder / "checkpoints/000020").mkdir(parents=True)
    (folder / "checkpoints/000020/state.safetensors").write_bytes(bytes(SIZE_BYTES))
    write_json(folder / "run.json", {"schema": 1, "name": folder.name, "created": 5.0, "status": status})
    write_json(folder / "plan.json", {"schema": 1, "steps": 20})
    with Journal(folder / "metrics.jsonl") as metrics:
        metrics.append("step", step=20, loss=2.0, tokens=100, seconds=0.5)
        metrics.append("save_failed", step=10, seconds=1.0, error="[Errno 28] No space left on device")
    with Journal(folder / "events.jsonl") as events:
        events.append("supervisor_started")
        events.append("disk_wait", reclaimed_bytes=0, free_bytes=0)
        events.append("disk_ready", free_bytes=1 << 20)
        events.append("supervisor_ended", status=status, steps=20, restarts=0, why="")
    write_manifest(folder)
    with closing(open_database()) as database:
        database.execute("INSERT INTO runs VALUES (?, ?, 5.0, 'h')", (path_to_store(folder), folder.name))
    return folder


@pytest.fixture
def full_home(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the runs `finished` and `other`, and no byte left."""
    home = small_disk / "home"
    home.mkdir()
    monkeypatch.setenv("HIVETUNE_HOME", str(home))
    make_run(home / "runs/finished", "done")
    make_run(home / "runs/other", "stopped")
    fill(small_disk)
    return home


def test_on_a_full_disk_looking_works(full_home: Path) -> None:
    looks = [hivetune(*words) for words in (["runs"], ["status"], ["show", "finished"], ["rm", "--unused", "--json"])]
    assert [look.returncode for look in looks] == [0] * 4, looks
    assert "".join(look.stdout for look in looks).count("its disk was full once") == 5  # runs and status tell of both


def test_on_a_full_disk_space_is_freed_and_noted(full_home: Path) -> None:
    assert hivetune("rm", "--unused", "--yes").returncode == 0
    assert not (full_home / "runs/finished/checkpoints").exists()
    manifest = json.loads((full_home / "runs/finished/manifest.json").read_text())
    assert not [name for name in manifest["files"] if name.startswith("checkpoints")]
    fill(full_home.parent)
    assert hivetune("rm", "other", "--yes").returncode == 0
    assert not (full_home / "runs/other").exists()
    with closing(open_database()) as database:
        assert [name for (name,) in database.execute("SELECT name FROM runs")] == ["finished"]


def test_a_full_disk_in_the_middle_of_a_run_is_told(own_home: Path) -> None:
    make_run(own_home / "runs/mine", "done")
    told = "its disk was full once; 1 checkpoint could not be written: [Errno 28] No space left"
    for arguments in (["show", "mine"], ["status"], ["runs"]):
        done = hivetune(*arguments)
        assert done.returncode == 0 and told in done.stdout + done.stderr


def test_a_working_directory_that_was_deleted_is_said(tmp_path: Path) -> None:
    before = os.getcwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        refused = hivetune("train", "/nowhere.yaml")
    finally:
        os.chdir(before)
    assert refused.returncode == 2 and "the working directory was deleted" in refused.stderr

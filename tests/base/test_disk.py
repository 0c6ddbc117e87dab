"""Folders that are whole or not there, locks that die with their holder, and a database that migrates."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hivetune.base.database import open_database
from hivetune.base.disk import (
    Disk,
    boot_id,
    lock,
    lock_holder,
    manifest_problems,
    read_json,
    scratch_folder,
    write_atomic,
    write_json,
    write_manifest,
    write_whole,
)
from hivetune.base.journal import Journal, read_journal
from hivetune.base.private import open_plain
from hivetune.errors import Busy


class FullDisk(Disk):
    def write(self, path: Path, data: bytes | memoryview) -> None:
        path.write_bytes(bytes(data)[:3])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_atomic_write_leaves_the_old_file_when_the_disk_is_full(tmp_path: Path) -> None:
    target = tmp_path / "state"
    write_atomic(target, b"old")
    with pytest.raises(OSError, match="space"):
        write_atomic(target, b"new and longer", disk=FullDisk())
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_json_never_holds_a_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[1]", "5", "[" * 100_000, '{"a": "\\ud800'])
def test_what_is_no_json_object_is_one_kind_of_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "manifest"])
def test_a_manifest_finds_every_damage(tmp_path: Path, damage: str) -> None:
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.bin").write_bytes(b"abc")
    write_manifest(tmp_path)
    assert manifest_problems(tmp_path) == []
    target = tmp_path / "sub" / "b.bin"
    if damage == "missing":
        target.unlink()
    elif damage == "truncated":
        target.write_bytes(b"ab")
    elif damage == "flipped":
        target.write_bytes(b"abd")
    else:
        (tmp_path / "manifest.json").write_text("{")
    assert len(manifest_problems(tmp_path)) == 1


def hold(folder: Path, ready: "multiprocessing.synchronize.Event") -> None:
    with lock(folder):
        ready.set()
        multiprocessing.Event().wait()


def test_a_held_folder_is_busy_until_its_holder_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(30)
    with pytest.raises(Busy, match=str(holder.pid)), lock(tmp_path):
        pass
    found = lock_holder(tmp_path)
    assert found is not None
    assert found.pid == holder.pid
    holder.kill()
    holder.join()
    assert lock_holder(tmp_path) is None
    with lock(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root can make a namespace")
def test_a_process_in_a_container_is_not_the_one_that_has_its_number_here(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from hivetune.base.disk import lock\n"
        "with lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "held\n":
            pytest.skip("no namespaces here")
        holder = lock_holder(tmp_path)
        assert holder is not None and (holder.pid, holder.boot_id == boot_id()) == (1, False)
        process.communicate()


def test_a_torn_last_line_is_left_out_and_then_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:
        journal.append("start", step=1)
    with open(path, "a") as file:
        file.write('{"event": "torn')
    assert [entry["event"] for entry in read_journal(path)] == ["start"]
    with Journal(path) as journal:
        journal.append("again")
    assert [entry["event"] for entry in read_journal(path)] == ["start", "again"]


def test_a_second_connection_of_a_process_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """Another process must never take itself for the last one: it would delete the log under us."""
    path = tmp_path / "hive.db"
    first = open_database(path)
    first.execute("CREATE TABLE a (x)")
    open_database(path).close()
    script = "import sys, pathlib, hivetune.base.database as s; s.open_database(pathlib.Path(sys.argv[1])).close()"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    first.execute("INSERT INTO a VALUES (1)")
    with contextlib.closing(sqlite3.connect(path)) as reader:
        assert reader.execute("SELECT x FROM a").fetchall() == [(1,)]
    first.close()


@pytest.mark.parametrize("name", [None, "verify"])
def test_what_a_killed_process_left_goes_before_the_next_folder_is_made(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    below = tmp_path / name if name else None
    script = (
        "import sys; from pathlib import Path; from hivetune.base.disk import scratch_folder\n"
        "with scratch_folder(*map(Path, sys.argv[1:])) as folder: print(folder, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, *map(str, filter(None, [below]))]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "rows").write_text("a secret")
        with scratch_folder(below) as own:
            assert (theirs / "rows").exists(), "removed while its process lives"
            process.kill()
            process.wait()
            with scratch_folder(below) as second:
                assert not theirs.exists()
                assert {own, second} == {path for path in own.parent.iterdir() if path.is_dir()}
    assert not own.exists() and not second.exists()
    assert own.parent.stat().st_mode & 0o777 == 0o700


def test_a_look_at_a_free_lock_makes_nobody_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lock_holder` holds a free lock for some microseconds: who takes it in just these asks again."""
    with lock(tmp_path):
        pass
    with open(tmp_path / ".lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr("hivetune.base.disk.time.sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
        with lock(tmp_path):
            holder = lock_holder(tmp_path)
    assert holder is not None and holder.pid == os.getpid()


def test_a_folder_that_is_removed_while_it_is_looked_at_has_no_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes that share a place for temporary files, one removes its folder while the other looks at it."""
    with lock(tmp_path / "scratch"):
        pass

    def open_too_late(path: Path, *flags: int) -> int:
        shutil.rmtree(path.parent)
        return open_plain(path, *flags)

    monkeypatch.setattr("hivetune.base.disk.open_plain", open_too_late)
    assert lock_holder(tmp_path / "scratch") is None


def test_an_error_names_the_file_and_not_the_temporary_one() -> None:
    """/sys takes no new files, not even from root."""
    with pytest.raises(OSError) as refused:
        write_atomic(Path("/sys/config.yaml"), b"")
    assert refused.value.filename == "/sys/config.yaml"
    with pytest.raises(OSError) as refused, write_whole(Path("/sys/rows.jsonl")):
        pass
    assert refused.value.filename == "/sys/rows.jsonl"


def test_json_holds_names_that_are_not_utf_8(tmp_path: Path) -> None:
    named = {"file": os.fsdecode(b"rows\xff.jsonl")}
    write_json(tmp_path / "report.json", named)
    assert read_json(tmp_path / "report.json") == named


def test_two_threads_write_one_file_at_a_time(tmp_path: Path) -> None:
    """Each thread has a temporary name of its own, so neither renames or removes the other's file."""
    barrier = threading.Barrier(2)

    class SlowDisk(Disk):
        def sync(self, path: Path) -> None:
            barrier.wait(10)  # both have written their temporary file, and neither has renamed it
            super().sync(path)

    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(write_atomic, tmp_path / "file", bytes([i]) * 100, disk=SlowDisk()) for i in range(2)]
        for write in writes:
            write.result()
    assert (tmp_path / "file").read_bytes() in (b"\0" * 100, b"\1" * 100)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

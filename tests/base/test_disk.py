"""Files and folders that are whole or not there, manifests that find every damage, locks that die with their holder."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from small_disk import fill

from hivetune.base import disk
from hivetune.base.disk import (
    MANIFEST,
    atomic_file,
    boot_id,
    lock,
    lock_holder,
    manifest_problems,
    problems_of_files,
    problems_since_last_read,
    read_json,
    scratch_folder,
    sha256_file,
    write_atomic,
    write_json,
    write_manifest,
)
from hivetune.base.private import open_plain
from hivetune.errors import Busy


def test_an_atomic_write_leaves_the_old_file_when_the_disk_is_full(small_disk: Path) -> None:
    target = small_disk / "state"
    write_atomic(target, b"old")
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left") as refused:
        write_atomic(target, b"new" * 10_000)
    assert refused.value.filename == str(target)
    assert target.read_bytes() == b"old"
    assert {path.name for path in small_disk.iterdir()} == {"state", filler.name}


def test_an_error_names_the_file_and_not_the_temporary_one() -> None:
    """/sys takes no new files, not even from root."""
    with pytest.raises(OSError) as refused:
        write_atomic(Path("/sys/config.yaml"), b"")
    assert refused.value.filename == "/sys/config.yaml"
    with pytest.raises(OSError) as refused, atomic_file(Path("/sys/rows.jsonl")):
        pass
    assert refused.value.filename == "/sys/rows.jsonl"


def test_two_threads_write_one_file_at_a_time(tmp_path: Path) -> None:
    """Each thread has a temporary name of its own, so neither renames or removes the other's file."""
    barrier, replace = threading.Barrier(2), os.replace

    def wait(source: Path, target: Path) -> None:
        barrier.wait(10)  # both have written their temporary file, and neither has renamed it
        replace(source, target)

    with mock.patch("os.replace", wait), ThreadPoolExecutor(2) as pool:
        for write in [pool.submit(write_atomic, tmp_path / "file", bytes([i]) * 100) for i in range(2)]:
            write.result()
    assert (tmp_path / "file").read_bytes() in (b"\0" * 100, b"\1" * 100)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_json_holds_no_nan_and_names_that_are_not_utf_8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not (tmp_path / "x.json").exists()
    named = {"file": os.fsdecode(b"rows\xff.jsonl")}
    write_json(tmp_path / "x.json", named)
    assert read_json(tmp_path / "x.json") == named


@pytest.mark.parametrize("content", ["", "{", "[1]", "5", "[" * 100_000, '{"a": "\\ud800'])
def test_what_is_no_json_object_is_one_kind_of_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError):
        read_json(tmp_path / "x.json")


# ---- manifests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that were read long after they were written."""
    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b"):
        (tmp_path / name).write_bytes(name.encode() * 64)
    write_manifest(tmp_path)
    later_ns = (tmp_path / MANIFEST).stat().st_ctime_ns + 10_000_000_000
    os.utime(tmp_path / MANIFEST, ns=(later_ns, later_ns))
    return tmp_path


def flip(path: Path) -> None:
    """Flip a bit, with the time of the content as it was; the inode's time tells of it."""
    before = path.stat()
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "sub/b: missing": Path.unlink,
    "sub/b: 2 bytes instead of 320": lambda path: path.write_bytes(b"ab"),
    "sub/b: its hash is not the recorded one": flip,
    "manifest.json: ": lambda path: (path.parents[1] / MANIFEST).write_text("{"),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_a_manifest_finds_every_damage(folder: Path, problem: str) -> None:
    assert manifest_problems(folder) == []
    DAMAGE[problem](folder / "sub" / "b")
    if (folder / MANIFEST).stat().st_size > 1:
        os.utime(folder / MANIFEST, ns=(0, 0))  # a second reading looks at what was written after the first
    for found in (manifest_problems(folder), problems_since_last_read(folder), problems_of_files(folder, ["sub/b"])):
        assert len(found) == 1 and found[0].startswith(problem)
    if "manifest" not in problem:
        assert problems_of_files(folder, ["a"]) == []


def test_what_was_read_is_not_read_again_until_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(disk, "sha256_file", lambda path: read.append(path.name) or sha256_file(path))
    assert problems_since_last_read(folder) == problems_of_files(folder, ["a"]) == [] and read == []
    os.utime(folder / MANIFEST, ns=(0, 0))  # as in a copied home
    assert problems_since_last_read(folder) == [] and read == ["a", "b"]
    assert (folder / MANIFEST).stat().st_mtime_ns > 0
    assert manifest_problems(folder) == [] and read == ["a", "b", "a", "b"]
    (folder / MANIFEST).unlink()
    assert problems_of_files(folder, ["b"]) == [] and problems_since_last_read(folder) != []


# ---- locks

HOLD = "import sys; from pathlib import Path; from hivetune.base.disk import *\n"
LOCKED = HOLD + "with lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
SCRATCH = HOLD + "with scratch_folder(*map(Path, sys.argv[1:])) as f: print(f, flush=True); sys.stdin.read()"


@contextmanager
def another(script: str, *arguments: object, before: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[str]"]:
    """Another process, until the end of the block at most."""
    command = [*before, sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_held_folder_is_busy_until_its_holder_dies(tmp_path: Path) -> None:
    with another(LOCKED, tmp_path) as process:
        assert line_of(process) == "held"
        with pytest.raises(Busy, match=str(process.pid)), lock(tmp_path):
            pass
        found = lock_holder(tmp_path)
        assert found is not None and (found.pid, found.boot_id) == (process.pid, boot_id())
        process.kill()
        process.wait()
        assert lock_holder(tmp_path) is None
        with lock(tmp_path):
            pass


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root can make a namespace")
def test_a_process_in_a_container_is_not_the_one_that_has_its_number_here(tmp_path: Path) -> None:
    with another(LOCKED, tmp_path, before=("unshare", "--pid", "--fork", "--kill-child")) as process:
        if line_of(process) != "held":
            pytest.skip("no namespaces here")
        holder = lock_holder(tmp_path)
        assert holder is not None and (holder.pid, holder.boot_id == boot_id()) == (1, False)


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


@pytest.mark.parametrize("name", [None, "verify"])
def test_what_a_killed_process_left_goes_before_the_next_folder_is_made(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    below = tmp_path / name if name else None
    with another(SCRATCH, *filter(None, [below])) as process:
        theirs = Path(line_of(process))
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

"""What Hivetune writes is for its user alone, and nothing that somebody else planted leads it out of a folder."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hivetune.base.disk import lock, lock_holder, read_json, scratch_folder, write_json
from hivetune.base.journal import Journal, read_journal
from hivetune.base.private import check_owner, keep_private, make_folder, open_plain, read_bounded
from hivetune.errors import UsageError


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The most careless umask; what is private must be so in spite of it."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b" / "eval.json", {})
    with Journal(tmp_path / "c" / "scores.jsonl") as journal:
        journal.append("row")
    with lock(tmp_path / "d"):
        assert mode(tmp_path / "d" / ".lock") == 0o600
    make_folder(tmp_path / "e" / "f")
    for name in ("a", "a/b", "c", "d", "e", "e/f"):
        assert mode(tmp_path / name) == 0o700, name
    for name in ("a/b/eval.json", "c/scores.jsonl"):
        assert mode(tmp_path / name) == 0o600, name


def test_a_file_that_was_open_to_others_is_closed_when_it_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "child.log").write_text("what a customer said\n")
    assert mode(tmp_path / "child.log") == 0o666
    os.close(open_plain(tmp_path / "child.log", os.O_WRONLY | os.O_APPEND))
    assert mode(tmp_path / "child.log") == 0o600


def test_what_libraries_create_is_private_too(tmp_path: Path) -> None:
    keep_private()
    (tmp_path / "rows.sqlite").write_text("")
    (tmp_path / "folder").mkdir()
    assert (mode(tmp_path / "rows.sqlite"), mode(tmp_path / "folder")) == (0o600, 0o700)


@pytest.mark.parametrize("entry", ["hivetune", "hivetune.process", "hivetune.llama.child"])
def test_every_process_of_ours_keeps_private(entry: str, tmp_path: Path) -> None:
    """Each is started with what makes it end early, and tells its umask then."""
    script = (
        "import atexit, os, runpy, sys\n"
        "end = os._exit\n"
        "def tell(*code):\n    mask = os.umask(0)\n    print(oct(mask), flush=True)\n    end(0)\n"
        "os._exit = tell\natexit.register(tell)\n"
        f"sys.argv = [{entry!r}, 'no-such-module', '/no/task.json']\n"
        f"runpy.run_module({entry!r}, run_name='__main__', alter_sys=True)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert ended.stdout.splitlines()[-1:] == ["0o77"], ended.stderr


# What is planted, and who then writes or reads there.
WRITERS: dict[str, Callable[[Path], object]] = {
    f".run.json.{os.getpid()}.tmp": lambda folder: write_json(folder / "run.json", {"planted": False}),
    "events.jsonl": lambda folder: Journal(folder / "events.jsonl").append("row"),
    ".lock": lambda folder: lock(folder).__enter__(),
    "child.log": lambda folder: os.close(open_plain(folder / "child.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
}
READERS: dict[str, Callable[[Path], object]] = {
    ".lock": lock_holder,
    "events.jsonl": lambda folder: list(read_journal(folder / "events.jsonl")),
    "run.json": lambda folder: read_json(folder / "run.json"),
}


@pytest.mark.parametrize("name", WRITERS, ids=lambda name: name.replace(str(os.getpid()), "PID"))
def test_no_link_is_followed_by_a_write(name: str, tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious\n")
    run.mkdir(mode=0o700)
    (run / name).symlink_to(victim)
    with pytest.raises((OSError, UsageError), match="link"):
        WRITERS[name](run)
    assert victim.read_text() == "precious\n"


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_place_of_a_file_stops_nobody(name: str, tmp_path: Path) -> None:
    """Opening a pipe waits for its other end, for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="ordinary file"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/000001", "child.log", "export/gguf"])
def test_a_link_anywhere_in_a_folder_refuses_it(name: str, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_folder(run / name)
    (run / name).rmdir()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(UsageError, match=f"{name} is a symbolic link"), lock(run):
        pass
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "run")
    check_owner(tmp_path / "run")
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(UsageError, match="can be changed by every user") as refused:
        check_owner(tmp_path / "run")
    assert "chmod" in refused.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "run")
    os.chown(tmp_path / "run", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        check_owner(tmp_path / "run")


def test_the_folder_of_scratch_folders_is_not_taken_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        assert mode(folder) == mode(folder.parent) == 0o700
    folder.parent.chmod(0o770)
    with pytest.raises(UsageError, match="accessible to other users"), scratch_folder():
        pass
    shutil.rmtree(folder.parent)
    folder.parent.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="accessible to other users"), scratch_folder():
        pass


def test_reading_takes_the_memory_of_the_file_and_not_of_the_limit(tmp_path: Path) -> None:
    """Each JSON document took 1 GiB for a moment, which a child with less memory did not get."""
    path = tmp_path / "small.json"
    path.write_bytes(bytes(1000))
    tracemalloc.start()
    try:
        assert read_bounded(path, 1 << 30) == bytes(1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()

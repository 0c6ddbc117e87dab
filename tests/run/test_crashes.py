"""A save of a checkpoint that is killed or fails at any change of the file system: what can be loaded afterwards is the
one before it or the new one, never a third, and the next save works."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from crashes import each_crash
from small_disk import fill

from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS, commit_within, newest_good, reclaim

pytestmark = pytest.mark.slow

LAST, BEST = 7, 2


def content(step: int) -> dict[str, bytes]:
    return {TENSORS: bytes([step]) * 4096, STATE: b'{"step": %d, "best": {"step": 2}}' % step}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints that are kept at step LAST."""
    run = tmp_path_factory.mktemp("run")
    for step in range(1, LAST + 1):
        commit_within(run, step, content(step))
    assert checkpoints.steps(run) == [2, 5, 6, 7]
    return run


def save(run: Path) -> None:
    commit_within(run, LAST + 1, content(LAST + 1))


def replace_newest(run: Path) -> None:
    """The same step again with other content (after a change of arithmetic)."""
    commit_within(run, LAST, content(LAST + 1))


# What may be there afterwards: step -> contents.
WORK: dict[Callable[[Path], None], dict[int, set[int]]] = {
    save: {LAST: {LAST}, LAST + 1: {LAST + 1}},
    replace_newest: {LAST - 1: {LAST - 1}, LAST: {LAST, LAST + 1}},
}


@pytest.mark.parametrize(
    ("error", "lasting"), [(None, False), (errno.EIO, False), (errno.ENOSPC, True)], ids=["kill", "fault", "full"]
)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_a_crash_leaves_the_checkpoint_before_or_the_new_one(
    before: Path, tmp_path: Path, work: Callable[[Path], None], error: int | None, lasting: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(before, run)
    for number in each_crash(lambda: work(run), error, lasting=lasting):
        found = newest_good(run)
        assert found.folder is not None and found.step in WORK[work], f"change {number}: step {found.step}"
        read = {name: (found.folder / name).read_bytes() for name in (TENSORS, STATE)}
        assert read in [content(step) for step in WORK[work][found.step]], f"change {number}"
        assert checkpoints.problems_of(checkpoints.folder_of(run, BEST)) == []
        commit_within(run, LAST + 2, content(LAST + 2))
        again = newest_good(run)
        assert (again.step, again.damaged) == (LAST + 2, {}) and BEST in checkpoints.steps(run)
        assert not list((run / "checkpoints").glob(".*"))
        shutil.rmtree(run)
        shutil.copytree(before, run)
    assert number > 10


def test_everything_is_on_the_disk_before_it_has_its_name(before: Path, tmp_path: Path) -> None:
    """Else a power cut could leave the name without the bytes: each file, then the folder, its name, the parent."""
    run = tmp_path / "run"
    shutil.copytree(before, run)
    seen: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flush(handle: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def move(source: Path, target: Path) -> None:
        seen.append(f"{source.name} -> {target.name}")
        rename(source, target)

    with mock.patch("os.fsync", flush), mock.patch("os.rename", move):
        checkpoints.commit(run, 8, content(8))
    name = "000008"
    assert seen == [TENSORS, STATE, "manifest.json", f".{name}.tmp", f".{name}.tmp -> {name}", "checkpoints"]


def test_a_full_disk_is_reclaimed_from(small_disk: Path) -> None:
    """The older checkpoints go first; newest and best stay; then the save goes through."""
    run = small_disk / "run"
    run.mkdir()
    for step in range(1, LAST + 1):
        commit_within(run, step, content(step))
    checkpoints.folder_of(run, 5).rename(run / "checkpoints" / "000005.distrusted")
    fill(small_disk)
    save(run)
    assert checkpoints.steps(run) == [2, 7, 8]
    assert not list((run / "checkpoints").glob("*.*"))
    assert reclaim(run) > 0
    assert checkpoints.steps(run) == [2, 8]
    assert reclaim(run) == reclaim(small_disk / "no-run") == 0
    with pytest.raises(OSError, match="No space"):
        commit_within(run, 9, {**content(9), TENSORS: bytes(1 << 20)})
    assert newest_good(run).step == 8

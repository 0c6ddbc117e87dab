"""For every n: the n-th operation of a save fails. What can be loaded afterwards is checkpoint k or k - 1, never a
third state, and the next save works."""

import errno
import shutil
from pathlib import Path

import pytest
from train.supervise.disks import CountingDisk, FailingDisk, PowerCut, PowerCutDisk, ShortDisk, survivals

from hivetune.base.disk import Disk
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS, commit_within, newest_good, reclaim, retain

LAST = 7
BEST = 2


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


def save(run: Path, disk: Disk) -> None:
    commit_within(run, LAST + 1, content(LAST + 1), disk=disk)


def replace_newest(run: Path, disk: Disk) -> None:
    """The same step again with other content (after a change of arithmetic)."""
    commit_within(run, LAST, content(LAST + 1), disk=disk)


WORK = {"save": save, "replace": replace_newest}
STATES = {
    "save": {LAST: LAST, LAST + 1: LAST + 1},
    "replace": {LAST - 1: LAST - 1, LAST: (LAST, LAST + 1)},
}


def copy(before: Path, target: Path) -> Path:
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(before, target)
    return target


def check(run: Path, name: str) -> None:
    """One of the two states, byte for byte; the best is still there; the next save works and tidies up."""
    found = newest_good(run)
    assert found.step in STATES[name], f"step {found.step}"
    assert found.folder is not None
    wanted = STATES[name][found.step]
    candidates = wanted if isinstance(wanted, tuple) else (wanted,)
    assert {n: (found.folder / n).read_bytes() for n in (TENSORS, STATE)} in [content(step) for step in candidates]
    assert checkpoints.problems_of(checkpoints.folder_of(run, BEST)) == []
    commit_within(run, LAST + 2, content(LAST + 2), disk=CountingDisk())
    again = newest_good(run)
    assert (again.step, again.damaged) == (LAST + 2, ())
    assert BEST in checkpoints.steps(run)
    assert not list((run / "checkpoints").glob(".*"))


def operations(before: Path, target: Path, name: str) -> list[str]:
    disk = CountingDisk()
    WORK[name](copy(before, target), disk)
    return disk.operations


@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize(
    "error", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=lambda e: errno.errorcode[e]
)
def test_errors(before: Path, tmp_path: Path, name: str, error: int, lasting: bool) -> None:
    for n, operation in enumerate(operations(before, tmp_path / "run", name)):
        run = copy(before, tmp_path / "run")
        try:
            WORK[name](run, FailingDisk(n, error, lasting=lasting))
        except OSError as raised:
            assert raised.errno == error, f"operation {n}, {operation}"  # the first cause is the one reported
        check(run, name)


@pytest.mark.parametrize("name", ["save", "replace"])
def test_short_writes(before: Path, tmp_path: Path, name: str) -> None:
    for n, operation in enumerate(operations(before, tmp_path / "run", name)):
        if operation == "write":
            run = copy(before, tmp_path / "run")
            with pytest.raises(OSError, match="short write"):
                WORK[name](run, ShortDisk(n))
            check(run, name)


@pytest.mark.parametrize("name", WORK)
def test_power_cuts(before: Path, tmp_path: Path, name: str) -> None:
    total = len(operations(before, tmp_path / "run", name))
    cases = 0
    for n in range(total + 1):
        for i in range(len(survivals(0))):
            run = copy(before, tmp_path / "run")
            disk = PowerCutDisk(run, n)
            try:
                WORK[name](run, disk)
                assert n == total
            except PowerCut:
                pass
            disk.restart(*survivals(n)[i])
            check(run, name)
            cases += 1
    assert cases == (total + 1) * 7


def test_after_a_save_returned_the_power_may_go(before: Path, tmp_path: Path) -> None:
    """Nothing that `commit_within` reported as saved is lost, whatever the file system keeps."""
    for keep in survivals(0):
        run = copy(before, tmp_path / "run")
        disk = PowerCutDisk(run, 10**6)
        save(run, disk)
        disk.restart(*keep)
        assert newest_good(run).step == LAST + 1


def test_a_full_disk_is_reclaimed_from(before: Path, tmp_path: Path) -> None:
    """The older checkpoints go first; newest and best stay; then the save goes through."""
    run = copy(before, tmp_path / "run")
    checkpoints.folder_of(run, 5).rename(run / "checkpoints" / "000005.distrusted")
    save(run, FailingDisk(0, errno.ENOSPC))
    assert checkpoints.steps(run) == [2, 7, 8]
    assert not list((run / "checkpoints").glob("*.*"))
    assert reclaim(run) > 0
    assert checkpoints.steps(run) == [2, 8]
    assert reclaim(run) == 0
    assert reclaim(tmp_path / "no-run") == 0


def test_a_damaged_one_is_passed_over(before: Path, tmp_path: Path) -> None:
    run = copy(before, tmp_path / "run")
    (checkpoints.folder_of(run, LAST) / STATE).write_bytes(b"{}")
    found = newest_good(run)
    assert (found.step, [damage.step for damage in found.damaged]) == (LAST - 1, [LAST])


def test_a_half_removed_checkpoint_is_no_damaged_one(before: Path, tmp_path: Path) -> None:
    run = copy(before, tmp_path / "run")

    class Dies(CountingDisk):
        def remove(self, path: Path) -> None:
            (path / TENSORS).unlink()
            raise PowerCut

    with pytest.raises(PowerCut):
        retain(run, keep=1, disk=Dies())
    assert all(checkpoints.problems_of(checkpoints.folder_of(run, step)) == [] for step in checkpoints.steps(run))

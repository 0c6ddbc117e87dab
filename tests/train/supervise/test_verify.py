"""`verify-resume` says yes to a right resume and no to a wrong one, with real SIGKILLs."""

import os
import signal
from array import array
from pathlib import Path

import pytest
from tiny_run import make_run

from hivetune.data.snapshot import open_snapshot
from hivetune.errors import Stopped
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS
from hivetune.train.supervise import verify as verify_module
from hivetune.train.supervise.verify import ADAPTER, Verification, compare_runs, excerpt_of, verify_resume

FORGETFUL = str(Path(__file__).with_name("forgetful_worker.py"))


def verify(folder: Path, worker: str | None = None) -> Verification:
    config = make_run(folder, 64, batch_size=8, supervise={"hang_floor_s": 60})
    snapshot = open_snapshot(folder / "snapshot")
    return verify_resume(config, folder / "model", snapshot, folder / "verify", worker=worker)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many small steps as leave time for one kill; no second, longer run."""
    for name, value in (("STEPS", 150), ("MIN_TRAINING_S", 0.0), ("KILLS", 1)):
        monkeypatch.setattr(verify_module, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_right_resume_is_bit_for_bit(tmp_path: Path) -> None:
    found = verify(tmp_path)
    assert found.identical and found.passed
    assert [each.file for each in found.files] == [TENSORS, STATE, ADAPTER]
    assert found.kills == 1 and any(0 < step < found.steps for step in found.resumed_from)
    assert found.seconds < 60


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_resume_that_forgets_the_optimizer_is_found_out(tmp_path: Path) -> None:
    found = verify(tmp_path, FORGETFUL)
    assert not found.identical and not found.passed
    assert found.files[0].difference is not None and found.files[0].difference > 0


@pytest.mark.slow
def test_stopped_it_names_no_folder_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the proof says "to continue: hivetune resume ..." of itself, in a folder that its caller deletes."""
    monkeypatch.setattr(verify_module, "STEPS", 400)
    config = make_run(tmp_path, 64, batch_size=8, supervise={"hang_floor_s": 60})
    snapshot = open_snapshot(tmp_path / "snapshot")

    def interrupt(done: int, total: int | None) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped) as caught:
        verify_resume(config, tmp_path / "model", snapshot, tmp_path / "verify", interrupt)
    assert (caught.value.exit_code, caught.value.hint) == (130, "")
    assert "saved" not in caught.value.message


def tensors(*values: float) -> bytes:
    header = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (len(values), 4 * len(values))
    return len(header).to_bytes(8, "little") + header + array("f", values).tobytes()


def run_with(folder: Path, adapter: bytes) -> Path:
    checkpoints.commit(folder, 6, {TENSORS: tensors(1, 2), STATE: b"{}"})
    (folder / ADAPTER).write_bytes(adapter)
    return folder


def test_differences_are_relative_to_the_largest_value(tmp_path: Path) -> None:
    one, other = run_with(tmp_path / "a", tensors(1, -4)), run_with(tmp_path / "b", tensors(1.5, -4))
    found = {each.file: each for each in compare_runs(one, other)}
    assert found[TENSORS].identical and found[STATE].identical
    assert (found[ADAPTER].identical, found[ADAPTER].difference) == (False, 0.125)
    on_cpu = Verification(tuple(found.values()), 6, 2, (2, 4), "cpu", 1.0)
    on_card = Verification(tuple(found.values()), 6, 2, (2, 4), "cuda", 1.0)
    assert not on_cpu.passed and not on_card.passed
    close = compare_runs(one, run_with(tmp_path / "c", tensors(1, -4.00001)))
    assert not Verification(tuple(close), 6, 2, (), "cpu", 1.0).passed
    assert Verification(tuple(close), 6, 2, (), "cuda", 1.0).passed
    assert not compare_runs(one, run_with(tmp_path / "d", tensors(1)))[2].identical


def test_runs_of_different_length_are_not_compared(tmp_path: Path) -> None:
    one, other = run_with(tmp_path / "a", b""), run_with(tmp_path / "b", b"")
    checkpoints.commit(other, 7, {TENSORS: tensors(1), STATE: b"{}"})
    assert [each.identical for each in compare_runs(one, other)] == [False]


def test_an_excerpt_holds_the_same_rows(tmp_path: Path) -> None:
    make_run(tmp_path, 20)
    whole = open_snapshot(tmp_path / "snapshot")
    part = excerpt_of(whole, [3, 7, 19], tmp_path / "part")
    assert part.num_rows == 3
    for number, row in enumerate((3, 7, 19)):
        assert part.tokens(number).tolist() == whole.tokens(row).tolist()
        assert bytes(part.trained(number)) == bytes(whole.trained(row))
        assert part.info(number).source == whole.info(row).source
    assert part.rows("train") == [0, 1, 2]

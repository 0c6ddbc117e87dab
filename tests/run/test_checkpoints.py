"""What a checkpoint holds, every way to damage one, the state in memory that outlives a worker, and when to save."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.base.disk import MANIFEST
from hivetune.base.journal import Journal
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS
from hivetune.train.worker.checkpoint import (
    NotFinite,
    Saver,
    TrainState,
    load,
    load_newest_good,
    to_files,
)

NAMES = ("model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_B.weight")


def save(run: Path, state: TrainState) -> Path:
    return checkpoints.commit_within(run, state.step, to_files(state))


def state_at(step: int, best: int | None = 4) -> TrainState:
    """Views into flat buffers, as the loop has them."""
    flat = [torch.randn(48, generator=torch.Generator().manual_seed(10 * step + kind)) for kind in range(3)]
    kinds = [{NAMES[0]: f[:32].view(4, 8), NAMES[1]: f[32:].view(4, 4)} for f in flat]
    return TrainState(
        step=step,
        param=kinds[0],
        exp_avg=kinds[1],
        exp_avg_sq=kinds[2],
        best=None if best is None else {"step": best, "loss": 1.5},
        plan_sha256="p",
        settings_hash="s",
        loop={"updates": step},
    )


def same(a: TrainState, b: TrainState) -> bool:
    tensors = all(
        torch.equal(getattr(a, kind)[name], getattr(b, kind)[name])
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for name in NAMES
    )
    plain = ("step", "best", "plan_sha256", "settings_hash", "loop")
    return tensors and all(getattr(a, name) == getattr(b, name) for name in plain)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 4 (the best), 5, 6 and 7, and the metrics that tell of them."""
    with Journal(tmp_path / "metrics.jsonl") as metrics:
        for step in range(3, 8):
            save(tmp_path, state_at(step))
            metrics.append("saved", step=step)
    return tmp_path


def test_a_state_comes_back_whole(run: Path) -> None:
    found, problems = load_newest_good(run)
    assert problems == []
    assert found is not None and same(found, state_at(7))
    assert checkpoints.steps(run) == [4, 5, 6, 7]


def test_the_adapter_comes_back_alone(run: Path) -> None:
    """Without the optimizer's state, which took 24 bytes a parameter beside the model at a run's end."""
    folder = checkpoints.folder_of(run, 7)
    found, whole = load(folder, ("param",)), load(folder).param
    assert found.param.keys() == whole.keys() and all(torch.equal(found.param[name], whole[name]) for name in whole)
    assert not found.exp_avg and not found.exp_avg_sq
    flip(folder / TENSORS, 0.9)
    with pytest.raises(ValueError, match=TENSORS):
        load(folder, ("param",))


def test_the_tensors_are_plain_safetensors_by_peft_name(run: Path) -> None:
    tensors = safetensors.torch.load_file(checkpoints.folder_of(run, 7) / TENSORS)
    assert set(tensors) == {f"{kind}/{name}" for kind in ("param", "exp_avg", "exp_avg_sq") for name in NAMES}
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_equal_states_are_equal_bytes() -> None:
    assert to_files(state_at(7)) == to_files(state_at(7))


@pytest.mark.parametrize(("kind", "value"), [("param", math.nan), ("exp_avg", math.inf), ("exp_avg_sq", -math.inf)])
def test_nothing_that_is_not_finite_is_saved(run: Path, kind: str, value: float) -> None:
    state = state_at(8)
    state.exp_avg_sq[NAMES[0]].fill_(3e38)  # their sum is infinite, and each of them is finite
    save(run, state)
    state = state_at(9)
    getattr(state, kind)[NAMES[1]][2, 1] = value
    with pytest.raises(NotFinite, match=f"{kind}/{NAMES[1]}"):
        save(run, state)
    assert checkpoints.steps(run)[-1] == 8


def flip(path: Path, at: float, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1 << bit
    path.write_bytes(data)


def swap(run: Path, name: str) -> None:
    shutil.copyfile(checkpoints.folder_of(run, 6) / name, checkpoints.folder_of(run, 7) / name)


def damage(name: str) -> dict[str, Callable[[Path], object]]:
    """Ways to damage one file of the newest checkpoint."""

    def at(run: Path) -> Path:
        return checkpoints.folder_of(run, 7) / name

    return {
        f"{name} empty": lambda run: at(run).write_bytes(b""),
        f"{name} truncated": lambda run: at(run).write_bytes(at(run).read_bytes()[:-7]),
        f"{name} missing": lambda run: at(run).unlink(),
        f"{name} with a flipped bit": lambda run: flip(at(run), 0.4),
        f"{name} of zeros": lambda run: at(run).write_bytes(bytes(at(run).stat().st_size)),
        f"{name} of another step": lambda run: swap(run, name),
    }


def all_of_another_step(run: Path) -> None:
    for name in (TENSORS, STATE, MANIFEST):
        swap(run, name)


DAMAGE: dict[str, Callable[[Path], object]] = {
    **damage(TENSORS),
    **damage(STATE),
    **damage(MANIFEST),
    "a folder of another step": all_of_another_step,
    "a folder that is gone": lambda run: shutil.rmtree(checkpoints.folder_of(run, 7)),
    "a folder that is empty": lambda run: [path.unlink() for path in checkpoints.folder_of(run, 7).iterdir()],
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_the_checkpoint_before_is_used(run: Path, case: str) -> None:
    """HF Trainer 5.23 crashes on 13 of 20 such cases and silently goes on with another model on 5."""
    DAMAGE[case](run)
    found, problems = load_newest_good(run)
    assert found is not None and same(found, state_at(6))
    assert "checkpoint 7" in problems[0]
    assert problems[-1] == "1 steps are repeated: training continues from step 6 instead of 7"
    save(run, state_at(7))  # the run goes on
    found, _ = load_newest_good(run)
    assert found is not None and same(found, state_at(7))


def test_damage_of_all_but_the_best(run: Path) -> None:
    for step in (5, 6, 7):
        flip(checkpoints.folder_of(run, step) / TENSORS, 0.9)
    found, problems = load_newest_good(run)
    assert found is not None and same(found, state_at(4))
    assert len(problems) == 4 and "3 steps are repeated" in problems[-1]
    shutil.rmtree(checkpoints.folder_of(run, 4))
    assert load_newest_good(run)[0] is None


@pytest.mark.parametrize("lost", ["damaged", "distrusted"])
def test_the_best_of_the_one_before_outlives_a_new_best(run: Path, lost: str) -> None:
    """A new best that is damaged or taken back again leaves the best that was known before it."""
    save(run, state_at(8, best=8))
    if lost == "damaged":
        flip(checkpoints.folder_of(run, 8) / TENSORS, 0.5)
    else:
        checkpoints.distrust_after(run, 7)
    found, _ = load_newest_good(run)
    assert found is not None and found.step == 7 and found.best == {"step": 4, "loss": 1.5}
    assert same(load(checkpoints.folder_of(run, 4)), state_at(4))
    for step in (9, 10, 11):
        save(run, state_at(step, best=9))
    assert checkpoints.steps(run) == [9, 10, 11]  # nothing leads back to it any more


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([TENSORS, STATE, MANIFEST]), st.floats(0, 1), st.integers(0, 7))
def test_no_flipped_bit_makes_a_third_state(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: float, bit: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    save(run, state_at(6))
    save(run, state_at(7))
    flip(checkpoints.folder_of(run, 7) / name, at, bit)
    found, problems = load_newest_good(run)
    assert found is not None
    assert same(found, state_at(6)) if problems else same(found, state_at(7))


def test_whole_files_with_foreign_content_are_passed_over(run: Path) -> None:
    """The hashes are right, the content is not: a later format, tensors of something else, NaN written by another."""
    good = to_files(state_at(8))
    tensors, state = safetensors.torch.load(good[TENSORS]), json.loads(good[STATE])
    nan = safetensors.torch.save(
        {**safetensors.torch.load(good[TENSORS]), f"param/{NAMES[0]}": torch.full((4, 8), math.nan)}
    )
    for files in (
        {**good, STATE: good[STATE].replace(b'"schema": 1', b'"schema": 2')},
        {**good, STATE: b"{}"},
        {**good, STATE: b"[]"},
        {**good, STATE: json.dumps({k: v for k, v in state.items() if k != "loop"}).encode()},
        {**good, STATE: json.dumps(state | {"best": {"step": 4, "loss": math.nan}}).encode()},
        {**good, STATE: json.dumps(state | {"step": True, "loop": []}).encode()},
        {**good, TENSORS: safetensors.torch.save({name: t.to(torch.bfloat16) for name, t in tensors.items()})},
        {**good, STATE: b"\xff"},
        {**good, TENSORS: b"no tensors"},
        {**good, TENSORS: safetensors.torch.save({"weight": torch.zeros(1)})},
        {**good, TENSORS: nan},
        to_files(state_at(9)),
    ):
        checkpoints.commit(run, 8, files)
        found, problems = load_newest_good(run)
        assert found is not None and same(found, state_at(7))
        assert "checkpoint 8 is " in problems[0]


# ---- when


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step_with(saver: Saver, clock: Clock, step: int, seconds: float) -> bool:
    """As the loop does: save if it is due. Whether it was saved."""
    clock.now += seconds
    if saver.due:
        saver.save(state_at(step))
        return True
    return False


def test_the_first_checkpoint_is_of_the_first_step_and_then_every_ten_minutes(tmp_path: Path) -> None:
    clock = Clock()
    saver = Saver(tmp_path, clock=clock)
    assert [step for step in range(1, 9) if step_with(saver, clock, step, 100.0)] == [1, 7]
    assert checkpoints.steps(tmp_path) == [1, 7]


def test_a_disk_that_fails_is_tried_again_later(tmp_path: Path) -> None:
    clock = Clock()
    saver = Saver(tmp_path, clock=clock, every_s=1.0)
    (tmp_path / "checkpoints").touch()  # nothing can be written into a file
    with pytest.raises(OSError):
        step_with(saver, clock, 1, 1.0)
    assert not step_with(saver, clock, 2, 15.0)
    (tmp_path / "checkpoints").unlink()
    assert step_with(saver, clock, 3, 20.0)  # the disk is well again
    assert step_with(saver, clock, 4, 1.0)
    assert load_newest_good(tmp_path)[1] == []

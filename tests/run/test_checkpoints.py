"""What a checkpoint holds, and every way to damage one."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.base.disk import MANIFEST
from hivetune.errors import UsageError
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS
from hivetune.train.worker.checkpoint import KINDS, Checkpoint, NotFinite, checkpoint_files, load, load_newest_good
from hivetune.train.worker.session import LoopState

pytestmark = pytest.mark.slow

NAMES = ("model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_B.weight")


def save(run: Path, state: Checkpoint) -> Path:
    return checkpoints.commit_within(run, state.loop.step, checkpoint_files(state))


def state_at(step: int, best: int = 4) -> Checkpoint:
    """Views into flat buffers, as the loop has them."""
    flat = [torch.randn(48, generator=torch.Generator().manual_seed(10 * step + kind)) for kind in range(3)]
    named = [{NAMES[0]: f[:32].view(4, 8), NAMES[1]: f[32:].view(4, 4)} for f in flat]
    loop = LoopState(step=step, updates=step, best={"step": best, "loss": 1.5}, reference=((3, 0.1), (4, 0.2)))
    return Checkpoint(dict(zip(KINDS, named, strict=True)), "p", "s", loop)


def same(a: Checkpoint | None, b: Checkpoint) -> bool:
    return (
        a is not None
        and replace(a, tensors={}) == replace(b, tensors={})
        and all(torch.equal(a.tensors[kind][name], b.tensors[kind][name]) for kind in KINDS for name in NAMES)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 4 (the best), 5, 6 and 7."""
    for step in range(3, 8):
        save(tmp_path, state_at(step))
    return tmp_path


def test_a_state_comes_back_whole_as_plain_safetensors_and_equal_bytes(run: Path) -> None:
    found, problems = load_newest_good(run)
    assert problems == [] and same(found, state_at(7))
    assert checkpoints.steps(run) == [4, 5, 6, 7]
    tensors = safetensors.torch.load_file(checkpoints.folder_of(run, 7) / TENSORS)
    assert set(tensors) == {f"{kind}/{name}" for kind in KINDS for name in NAMES}
    assert checkpoint_files(state_at(7)) == checkpoint_files(state_at(7))


def test_the_adapter_comes_back_alone(run: Path) -> None:
    """Without the optimizer's state, which took 24 bytes a parameter beside the model at a run's end."""
    folder = checkpoints.folder_of(run, 7)
    found = load(folder, ("param",)).tensors
    assert found.keys() == {"param"} and found["param"].keys() == set(NAMES)
    flip(folder / TENSORS, 0.9)
    with pytest.raises(UsageError, match=TENSORS):
        load(folder, ("param",))


@pytest.mark.parametrize(("kind", "value"), [("param", math.nan), ("exp_avg", math.inf), ("exp_avg_sq", -math.inf)])
def test_nothing_that_is_not_finite_is_saved(run: Path, kind: str, value: float) -> None:
    state = state_at(8)
    state.tensors["exp_avg_sq"][NAMES[0]].fill_(3e38)  # their sum is infinite, and each of them is finite
    save(run, state)
    state = state_at(9)
    state.tensors[kind][NAMES[1]][2, 1] = value
    with pytest.raises(NotFinite, match=f"{kind}/{NAMES[1]}"):
        save(run, state)
    assert checkpoints.steps(run)[-1] == 8


def test_whole_files_of_another_version_are_refused(run: Path) -> None:
    """Their hashes are right, so nothing is damaged: to go on from an older one would lose work in silence."""
    good = checkpoint_files(state_at(8))
    for state in (good[STATE].replace(b'"schema": 1', b'"schema": 2'), good[STATE].replace(b'"updates"', b'"later"')):
        checkpoints.commit(run, 8, {**good, STATE: state})
        with pytest.raises(UsageError, match="000008"):
            load_newest_good(run)


def flip(path: Path, at: float, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1 << bit
    path.write_bytes(data)


def swap(run: Path, *names: str) -> None:
    for name in names:
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


DAMAGE: dict[str, Callable[[Path], object]] = {
    **damage(TENSORS),
    **damage(STATE),
    **damage(MANIFEST),
    "a folder of another step": lambda run: swap(run, TENSORS, STATE, MANIFEST),
    "a folder that is empty": lambda run: [path.unlink() for path in checkpoints.folder_of(run, 7).iterdir()],
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_the_checkpoint_before_is_used(run: Path, case: str) -> None:
    """HF Trainer 5.23 crashes on 13 of 20 such cases and silently goes on with another model on 5."""
    DAMAGE[case](run)
    found, problems = load_newest_good(run)
    assert same(found, state_at(6))
    assert "checkpoint 7" in problems[0]
    assert problems[-1] == "1 steps are repeated: training continues from step 6 instead of 7"
    save(run, state_at(7))  # the run goes on
    assert same(load_newest_good(run)[0], state_at(7))


def test_damage_of_all_but_the_best(run: Path) -> None:
    for step in (5, 6, 7):
        flip(checkpoints.folder_of(run, step) / TENSORS, 0.9)
    found, problems = load_newest_good(run)
    assert same(found, state_at(4))
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
    assert same(load_newest_good(run)[0], state_at(7))
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
    assert same(found, state_at(6)) if problems else same(found, state_at(7))

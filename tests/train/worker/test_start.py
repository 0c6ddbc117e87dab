"""Training that goes on from an adapter: it begins where that ended, resumes as any other, refuses a wrong one."""

from pathlib import Path

import pytest
from train.worker.runs import learnable_rows, losses, make_run, run_bytes, run_training, stop_after

from hivetune.errors import UsageError

pytestmark = pytest.mark.slow  # models are trained

ROWS = learnable_rows(60)


@pytest.fixture
def first(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """A finished run: the folder of its adapter."""
    make_run(tmp_path / "first", ROWS)
    run_training(tmp_path / "first", tiny_model_folder)
    return tmp_path / "first" / "run"


def go_on(folder: Path, start: Path, **settings: object) -> None:
    make_run(folder, ROWS, lora={"r": 4, "alpha": 8, "start": str(start)}, **settings)


def test_it_begins_where_the_other_ended(first: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    go_on(tmp_path / "second", first, learning_rate=1e-3)
    run_training(tmp_path / "second", tiny_model_folder)
    before, after = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert after[0] < 0.9 * before[0]
    assert min(after) < min(before)


def test_a_stopped_run_that_went_on_resumes_to_the_same_bytes(
    first: Path, tmp_path: Path, tiny_model_folder: Path
) -> None:
    go_on(tmp_path / "whole", first)
    go_on(tmp_path / "cut", first)
    run_training(tmp_path / "whole", tiny_model_folder)
    run_training(tmp_path / "cut", tiny_model_folder, on_beat=stop_after(3))
    run_training(tmp_path / "cut", tiny_model_folder)
    adapters = [run_bytes(tmp_path / name)["adapter_model.safetensors"] for name in ("whole", "cut")]
    assert adapters[0] == adapters[1]


def test_an_adapter_of_another_scale_or_rank_is_refused(first: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    for number, (lora, words) in enumerate(
        [({"r": 4, "alpha": 32}, "is scaled by 2"), ({"r": 8, "alpha": 16}, "has the shape"), ({}, "no adapter in")]
    ):
        start = str(first) if lora else str(tmp_path / "missing")
        make_run(tmp_path / str(number), ROWS, lora={**lora, "start": start})
        with pytest.raises(UsageError, match=words):
            run_training(tmp_path / str(number), tiny_model_folder)

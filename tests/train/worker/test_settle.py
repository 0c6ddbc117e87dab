"""A run's choices where the fast path was wrong: what streamed there has to fit without streaming, or is refused."""

from pathlib import Path

import pytest
from train.worker.models import write_model
from train.worker.runs import learnable_rows, make_run, run_training

from hivetune.data.snapshot import open_snapshot
from hivetune.errors import DoesNotFit
from hivetune.run.choices import Choices
from hivetune.run.folder import read_resolved
from hivetune.train.plan.steps import read_plan
from hivetune.train.worker import settle
from hivetune.train.worker.settle import unstreamed

GENERAL = Choices(device="cpu", dtype="float32", path="general", path_why="its gradient was off", streamed=2)


def form_of(folder: Path, memory_share: float) -> Choices:
    model = write_model(folder / "model", "llama")
    make_run(folder, learnable_rows(40), memory_share=memory_share)
    run = folder / "run"
    config, _ = read_resolved(run)
    return unstreamed(config, GENERAL, model, read_plan(run), open_snapshot(folder / "snapshot"))


def test_a_model_that_fits_without_streaming_is_trained(tmp_path: Path) -> None:
    form = form_of(tmp_path, 0.9)
    assert form.path == "general" and form.streamed is None and form.budget_tokens


def test_a_model_that_fits_only_streamed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"only the fast path streams layers, and its gradient was off: at least"):
        form_of(tmp_path, 1e-4)


def test_free_memory_refuses_a_start_and_ends_no_run_that_began(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, learnable_rows(40))
    with monkeypatch.context() as full:
        full.setattr(settle, "free_memory_bytes", lambda device: 0)
        with pytest.raises(DoesNotFit, match="are free now"):
            run_training(tmp_path, tiny_model_folder)
    before = run_training(tmp_path, tiny_model_folder)
    monkeypatch.setattr(settle, "free_memory_bytes", lambda device: 0)
    assert run_training(tmp_path, tiny_model_folder)["loss_last"] == before["loss_last"]

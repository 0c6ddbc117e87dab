"""Packs summed as integers in one process: the losses of one sum, and law 4. Several: supervise/test_workers.py."""

from pathlib import Path

import pytest
from train.worker.runs import learnable_rows, losses, make_run, run_bytes, run_training, stop_after


def test_packs_train_like_one_sum_and_resume_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    """`workers` with dropout, in one process: another rounding than without it, and law 4 as ever."""
    rows = learnable_rows(60)
    for name, workers in (("one", None), ("packs", 1), ("resumed", 1)):
        settings = {"workers": workers, "choices": {"pack_tokens": 32} if workers else {}}
        make_run(tmp_path / name, rows, **settings)
    for name in ("one", "packs"):
        run_training(tmp_path / name, tiny_model_folder)
    assert losses(tmp_path / "packs") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    run_training(tmp_path / "resumed", tiny_model_folder, on_beat=stop_after(5))
    run_training(tmp_path / "resumed", tiny_model_folder)
    assert run_bytes(tmp_path / "resumed") == run_bytes(tmp_path / "packs")

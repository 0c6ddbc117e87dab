"""Validation on a sample that is spread over the kinds of rows; what is not finite is left out and named."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.runs import learnable_rows, make_run, metrics, run_training

from hivetune.train.plan.steps import spread_sample
from hivetune.train.worker import session
from hivetune.train.worker.watch import score_rows


def test_a_sample_has_its_share_of_each_kind() -> None:
    kinds = ["a"] * 600 + ["b"] * 300 + ["c"] * 100
    rows = random.Random(1).sample(range(1000), 1000)
    found = spread_sample(rows, 50, lambda row: kinds[row])
    assert len(set(found)) == 50
    assert {kind: sum(kinds[row] == kind for row in found) for kind in "abc"} == {"a": 30, "b": 15, "c": 5}
    assert found == spread_sample(sorted(rows), 50, lambda row: kinds[row])
    assert spread_sample(rows[:50], 50, lambda row: kinds[row]) == rows[:50]


class Rows:
    """A snapshot of rows of row + 1 trained tokens."""

    def tokens(self, row: int) -> memoryview:
        return memoryview(torch.full((row + 2,), row, dtype=torch.int32).numpy())

    def trained(self, row: int) -> memoryview:
        return memoryview((torch.arange(row + 2) > 0).to(torch.uint8).numpy())


def test_the_loss_is_that_of_all_tokens_and_a_row_that_is_not_finite_is_left_out() -> None:
    def score(documents: list[Any]) -> list[float]:
        return [math.nan if document.row == 7 else 2.0 * document.row for document in documents]

    rows = [row for row in range(100) if row != 7]
    found = score_rows(score, Rows(), range(100), lambda: None)  # type: ignore[arg-type]
    assert found is not None and (found.not_finite, found.rows) == ((7,), 99)
    assert found.loss == pytest.approx(2 * sum(rows) / sum(row + 1 for row in rows))
    assert score_rows(score, Rows(), [7], lambda: None) is None  # type: ignore[arg-type]


def test_a_run_scores_its_sample(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "VALIDATION_ROWS", 4)
    make_run(tmp_path, learnable_rows(120), epochs=1, batch_size=16)
    result = run_training(tmp_path, tiny_model_folder)
    validations = [entry for entry in metrics(tmp_path) if entry["event"] == "validation"]
    assert {entry["rows"] for entry in validations} == {4}
    assert result["best"]["loss"] == min(entry["loss"] for entry in validations)

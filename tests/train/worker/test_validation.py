"""Validation on a sample that is spread over the kinds of rows; what is not finite is left out and named."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.runs import learnable_rows, make_run, metrics, run_training

from hivetune.config import parse_config
from hivetune.train.plan.steps import stratified_sample
from hivetune.train.worker import session
from hivetune.train.worker.session import learning_rate, warmup_steps
from hivetune.train.worker.watch import score_rows


def test_a_sample_has_its_share_of_each_kind() -> None:
    kinds = ["a"] * 600 + ["b"] * 300 + ["c"] * 100
    rows = random.Random(1).sample(range(1000), 1000)
    found = stratified_sample(rows, 50, lambda row: kinds[row])
    assert len(set(found)) == 50
    assert {kind: sum(kinds[row] == kind for row in found) for kind in "abc"} == {"a": 30, "b": 15, "c": 5}
    assert found == stratified_sample(sorted(rows), 50, lambda row: kinds[row])
    assert stratified_sample(rows[:50], 50, lambda row: kinds[row]) == rows[:50]


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


# The learning rate of each step is the one that users know.


def test_schedules_begin_with_warm_up_and_end_at_zero() -> None:
    rates = {}
    for kind in ("cosine", "linear", "constant"):
        config = parse_config({"model": "m", "data": {"path": "x"}, "lr_schedule": kind, "warmup": 0.1})
        rates[kind] = [learning_rate(config, step, 100) / config.learning_rate for step in range(101)]
    for kind, found in rates.items():
        assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
        assert found[10] == pytest.approx(1) and (found[100] == pytest.approx(0, abs=1e-12)) == (kind != "constant")
        assert all(a >= b for a, b in itertools.pairwise(found[10:]))
    assert rates["cosine"][55] == pytest.approx(0.5) == rates["linear"][55]
    assert rates["cosine"][32] > rates["linear"][32]


@pytest.mark.parametrize(("warmup", "expected"), [(0, 0), (0.05, 5), (0.001, 1), (1, 1), (7, 7), (1000, 100)])
def test_warm_up_is_a_share_or_a_number(warmup: float, expected: int) -> None:
    assert warmup_steps(warmup, 100) == expected

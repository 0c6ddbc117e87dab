"""Validation on a sample: spread over the kinds of rows, with an error that holds, and all rows for what is kept."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.runs import learnable_rows, make_run, metrics, run_training

from hivetune.base.journal import read_journal
from hivetune.train.plan.steps import spread_sample
from hivetune.train.worker import session
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import read_documents
from hivetune.train.worker.watch import Scored, score_rows


def test_a_sample_has_its_share_of_each_kind() -> None:
    kinds = ["a"] * 600 + ["b"] * 300 + ["c"] * 100
    rows = random.Random(1).sample(range(1000), 1000)
    found = spread_sample(rows, 50, lambda row: kinds[row])
    assert len(set(found)) == 50
    counts = {kind: sum(kinds[row] == kind for row in found) for kind in "abc"}
    assert counts == {"a": 30, "b": 15, "c": 5}
    assert found == spread_sample(sorted(rows), 50, lambda row: kinds[row])
    assert spread_sample(rows[:50], 50, lambda row: kinds[row]) == rows[:50]


class Rows:
    """A snapshot of rows whose nll is known, and a model that knows it."""

    def __init__(self, count: int):
        generator = random.Random(3)
        self.size = [generator.randint(2, 60) for _ in range(count)]
        self.nll_of = [sum(generator.expovariate(0.5) for _ in range(size)) for size in self.size]

    def tokens(self, row: int) -> memoryview:
        return memoryview(torch.full((self.size[row] + 1,), row, dtype=torch.int32).numpy())

    def trained(self, row: int) -> memoryview:
        return memoryview((torch.arange(self.size[row] + 1) > 0).to(torch.uint8).numpy())

    def nll(self, documents: list[Any]) -> list[float]:
        return [self.nll_of[document.row] for document in documents]

    def score(self, rows: list[int]) -> Scored:
        found, nll = score_rows(self.nll, self, rows, len(self.size), lambda: None)  # type: ignore[arg-type]
        assert found is not None and len(nll) == found.rows
        return found


def test_the_error_that_is_told_is_that_of_samples() -> None:
    """Of 400 samples, the share whose loss is within two errors of that of all rows."""
    rows = Rows(600)
    whole = rows.score(list(range(600)))
    assert whole.error == 0 and whole.loss == pytest.approx(sum(rows.nll_of) / sum(rows.size), rel=1e-6)
    generator = random.Random(4)
    samples = [rows.score(generator.sample(range(600), 48)) for _ in range(400)]
    within = sum(abs(sample.loss - whole.loss) <= 2 * sample.error for sample in samples) / 400
    assert 0.9 <= within <= 0.985
    spread = math.sqrt(sum((sample.loss - whole.loss) ** 2 for sample in samples) / 400)
    assert sum(sample.error for sample in samples) / 400 == pytest.approx(spread, rel=0.15)


def test_a_row_that_is_not_finite_is_left_out_and_named() -> None:
    rows = Rows(20)
    rows.nll_of[7] = math.nan
    found = rows.score(list(range(20)))
    assert found.not_finite == (7,) and found.rows == 19 and math.isfinite(found.loss)


def test_a_run_scores_its_sample_and_at_its_end_all_rows(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "VALIDATION_ROWS", 4)
    make_run(tmp_path, learnable_rows(120), epochs=1, batch_size=16)
    result = run_training(tmp_path, tiny_model_folder)
    entries = list(read_journal(tmp_path / "run/metrics.jsonl"))
    during = [entry for entry in entries if entry["event"] == "validation"]
    (last,) = (entry for entry in entries if entry["event"] == "held_out")
    assert {(entry["event"], entry["rows"], entry["of"]) for entry in during} == {("validation", 4, 12)}
    assert all(0 < entry["error"] < entry["loss"] for entry in during)
    assert result["best"]["loss"] == min(entry["loss"] for entry in during)
    assert (last["event"], last["rows"], last["step"], last["error"]) == ("held_out", 12, result["adapter_step"], 0)
    assert result["held_out"] == {"loss": last["loss"], "rows": 12}
    assert last["loss"] == pytest.approx(loss_of_kept(tmp_path, tiny_model_folder), rel=1e-5)


def loss_of_kept(folder: Path, model_folder: Path) -> float:
    from hivetune.data.snapshot import open_snapshot

    snapshot = open_snapshot(folder / "snapshot")
    lora, tensors = read_adapter(folder / "run")
    model = load_model(model_folder, lora, method="lora", dtype=torch.float32, device=torch.device("cpu"))
    fill(model.adapter, tensors, "run")
    documents = read_documents(snapshot, snapshot.rows("validation"))
    return float(model.nll(documents).sum()) / sum(int(document.trained_L.sum()) for document in documents)


def test_few_rows_are_scored_whole_and_once(tiny_model_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path, learnable_rows(40), epochs=1)
    result = run_training(tmp_path, tiny_model_folder)
    assert result["held_out"] is None
    assert {entry["error"] for entry in metrics(tmp_path) if entry["event"] == "validation"} == {0}

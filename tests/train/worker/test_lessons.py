"""Learning from bad answers: weights of documents in the ordinary backward pass, in the last steps of a run."""

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from train.planned import write_snapshot
from train.worker.models import documents, load_any, random_adapter, write_model
from train.worker.runs import SPLITS, learnable_rows, make_run, run_bytes, run_training, stop_after

from hivetune.base.disk import write_manifest
from hivetune.base.journal import read_journal
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.run.choices import Choices
from hivetune.run.folder import read_resolved
from hivetune.train.plan.steps import LESSON_STEPS, PlanRow, make_plan, read_plan, write_plan
from hivetune.train.worker.lessons import MOST_WEIGHT, weigh
from hivetune.train.worker.model.protocol import Document


@pytest.mark.parametrize("path", ["fast", "general"])
def test_a_weight_multiplies_the_gradient_of_its_document(path: str, tmp_path: Path) -> None:
    choices = Choices(path=path, kernels="torch")  # type: ignore[arg-type]
    model = load_any(write_model(tmp_path), torch.float64, choices=choices)
    random_adapter(model)
    docs = [document for document in documents() if document.trained_L[1:].any()]
    weights = [(1.0, -0.4, 0.5)[number % 3] for number in range(len(docs))]

    def gradient(some: list[Document]) -> tuple[float, torch.Tensor]:
        model.grad_N.zero_()
        return float(model.backward(some, 1.0)), model.grad_N.clone()

    apart = [gradient([document]) for document in docs]
    loss, together = gradient([doc._replace(weight=weight) for doc, weight in zip(docs, weights, strict=True)])
    expected = sum(weight * grad for weight, (_, grad) in zip(weights, apart, strict=True))
    assert loss == pytest.approx(sum(weight * nll for weight, (nll, _) in zip(weights, apart, strict=True)), rel=1e-10)
    same = 1e-10 if path == "fast" else 1e-6  # transformers forms norms in fp32
    assert float((together - expected).norm() / together.norm()) < same  # type: ignore[union-attr]


def rows_of(*numbers: int) -> list[Document]:
    return [Document(number, torch.arange(11), torch.arange(11) > 0) for number in numbers]


def test_a_bad_answer_pushes_less_the_less_likely_it_is() -> None:
    weights = []
    for nll in (20.0, 24.0, 28.0):
        told = weigh(rows_of(0, 1, 2), {2: None}, {2: 20.0}, lambda docs, nll=nll: [nll for _ in docs])  # type: ignore[misc]
        assert [document.weight for document in told.documents[:2]] == [1.0, 1.0]
        weights.append(told.documents[2].weight)
        assert told.added == pytest.approx(weights[-1] * nll)
    assert weights[0] == -MOST_WEIGHT < weights[1] < weights[2] < 0


def test_of_a_pair_the_good_answer_is_pulled() -> None:
    told = weigh(rows_of(0, 1, 2), {2: 1}, {1: 20.0, 2: 20.0}, lambda docs: [20.0 for _ in docs])
    assert [document.weight for document in told.documents] == [1.0, 1 + MOST_WEIGHT, -MOST_WEIGHT]


@pytest.mark.parametrize("reference", [{}, {2: math.inf}])
def test_a_row_whose_reference_is_not_finite_is_left_out(reference: dict[int, float]) -> None:
    """It made every step with it not finite, and no search could name it."""
    told = weigh(rows_of(0, 1, 2), {2: None}, reference, lambda docs: [20.0 for _ in docs])
    assert [document.row for document in told.documents] == [0, 1] and told.added == 0


def make_lessons(folder: Path, **settings: Any) -> Snapshot:
    """A run of learnable rows and of 20 bad answers: every second one has a better row."""
    good = learnable_rows(60)
    bad = [([*tokens[:-3], 90, 91, 92], trained) for tokens, trained in good[:20]]
    make_run(folder, good, **settings)
    for file in (folder / "snapshot").iterdir():
        file.unlink()
    (folder / "snapshot").rmdir()
    splits = [SPLITS[row % len(SPLITS)] for row in range(60)] + ["bad"] * 20
    digest = write_snapshot(folder / "snapshot", good + bad, splits)
    with sqlite3.connect(folder / "snapshot/rows.sqlite") as database:
        for number in range(20):
            better = number if number % 2 and splits[number] == "train" else None
            kind = "pair" if better is not None else "failure"
            database.execute("UPDATE rows SET lesson = ?, better = ? WHERE row = ?", (kind, better, 60 + number))
    write_manifest(folder / "snapshot", {"kind": "snapshot", "hash": digest, "num_rows": 80, "num_bad": 20})
    snapshot, config = open_snapshot(folder / "snapshot"), read_resolved(folder / "run")[0]
    plan = make_plan(
        [PlanRow(*row) for row in snapshot.plan_rows("train")],
        snapshot_hash=digest,
        settings_hash="settings",
        seed=0,
        batch_size=config.batch_size,
        epochs=config.epochs,
        good=snapshot.rows("train"),
        bad=snapshot.bad_rows(),
    )
    write_plan(folder / "run", plan)
    return snapshot


def test_bad_answers_become_less_likely_and_good_ones_stay(tiny_model_folder: Path, tmp_path: Path) -> None:
    snapshot = make_lessons(tmp_path, epochs=4)
    plan = read_plan(tmp_path / "run")
    assert plan.lessons_from == len(plan.steps) - LESSON_STEPS
    result = run_training(tmp_path, tiny_model_folder)
    events = list(read_journal(tmp_path / "run/metrics.jsonl"))
    validations = [e for e in events if e["event"] == "validation" and e["step"] >= plan.lessons_from]
    assert result["status"] == "done" and result["adapter_step"] > plan.lessons_from
    best = next(e for e in validations if e["step"] == result["adapter_step"])
    assert best["loss"] <= validations[0]["loss"] + 0.02
    reached = plan.rows_reached(result["steps"])[0]
    assert reached >= {answer.row for answer in snapshot.bad_rows()}
    assert all(math.isfinite(e["loss"]) and e["loss"] > 0 for e in events if e["event"] == "step")


def test_lessons_that_are_stopped_are_the_same_run_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        make_lessons(tmp_path / name)
    run_training(tmp_path / "whole", tiny_model_folder)
    first = read_plan(tmp_path / "parts/run").lessons_from
    assert first is not None
    for steps in (first, 3):
        assert run_training(tmp_path / "parts", tiny_model_folder, on_beat=stop_after(steps))["status"] == "stopped"
    run_training(tmp_path / "parts", tiny_model_folder)
    assert run_bytes(tmp_path / "parts") == run_bytes(tmp_path / "whole")


def test_a_run_that_stops_improving_goes_on_with_its_lessons(tiny_model_folder: Path, tmp_path: Path) -> None:
    make_lessons(tmp_path, learning_rate=0.3, epochs=20, validate_every=2, patience=2)
    run_training(tmp_path, tiny_model_folder)
    plan = read_plan(tmp_path / "run")
    assert plan.lessons_from is not None and len(plan.amendments) == 1
    steps = [e["step"] for e in read_journal(tmp_path / "run/metrics.jsonl") if e["event"] == "step"]
    early = plan.amendments[0].from_step
    assert plan.amendments[0].until_step == plan.lessons_from and early < plan.lessons_from
    assert max(step for step in steps if step <= plan.lessons_from) == early and max(steps) > plan.lessons_from

"""Real workers on poisoned rows: exactly the bad rows are quarantined, with file:line, and the run goes to its end."""

import json
import math
import random
from pathlib import Path

import pytest
import safetensors.torch
from tiny_run import KILL, NAN, make_run, supervise

from hivetune.errors import DataRefused, RecoveryExhausted
from hivetune.train.plan.steps import read_plan

pytestmark = pytest.mark.slow


def poison(num_rows: int, num_nan: int, num_kill: int, seed: int = 3) -> dict[int, int]:
    rows = random.Random(seed).sample(range(num_rows), num_nan + num_kill)
    return {row: NAN if i < num_nan else KILL for i, row in enumerate(rows)}


def check_run(folder: Path, num_rows: int, poisoned: dict[int, int], most_restarts: int) -> None:
    config = make_run(folder, num_rows, poisoned, supervise={"hang_floor_s": 60})
    outcome = supervise(folder, config).check()
    assert outcome.restarts <= most_restarts
    plan = read_plan(folder / "run")
    assert sorted(row for a in plan.amendments for row in a.rows) == sorted(poisoned)
    assert [*map(len, plan.rows_reached())] == [num_rows - len(poisoned), len(poisoned)]
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    by_death = {e["row"]: e["source"] for e in events if e["event"] == "quarantined"}
    assert (
        by_death.items() >= {row: f"rows.jsonl:{row + 1}" for row, token in poisoned.items() if token == KILL}.items()
    )
    steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in steps if entry["event"] == "step"]
    assert len(losses) == len(plan.steps) and all(math.isfinite(loss) for loss in losses)
    trained = [row for step in plan.steps for row in step.rows]
    assert sorted(trained) == [row for row in range(num_rows) if row not in poisoned]  # each once
    adapter = safetensors.torch.load_file(folder / "run/adapter_model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in adapter.values())


def test_nan_rows_and_a_killing_row_in_one_run(tmp_path: Path) -> None:
    check_run(tmp_path, 240, poison(240, 6, 1), most_restarts=2)


@pytest.mark.proof
def test_two_hundred_nan_rows_and_three_that_kill_in_ten_thousand(tmp_path: Path) -> None:
    check_run(tmp_path, 10_000, poison(10_000, 200, 3), most_restarts=6)


def test_a_run_in_chunks_saves_after_each(tmp_path: Path) -> None:
    """A row that kills costs its chunk nothing else; every chunk ends with a checkpoint."""
    config = make_run(tmp_path, 96, {40: KILL}, epochs=2, supervise={"hang_floor_s": 60}, chunk_rows=32)
    supervise(tmp_path, config).check()
    plan = read_plan(tmp_path / "run")
    assert plan.chunk_ends == (4, 8, 12)
    assert [row for a in plan.amendments for row in a.rows] == [40]
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    saved = {entry["step"] for entry in metrics if entry["event"] == "saved"}
    assert saved >= set(plan.chunk_ends)


def test_a_run_of_bad_rows_alone_is_no_success(tmp_path: Path) -> None:
    """One row a step: each is quarantined, and a run that trained nothing says so."""
    config = make_run(tmp_path, 3, dict.fromkeys(range(3), NAN), batch_size=1)
    with pytest.raises(DataRefused, match="no row was trained"):
        supervise(tmp_path, config).check()
    assert not (tmp_path / "run/adapter_model.safetensors").exists()


def test_too_many_bad_rows_are_the_arithmetic_and_not_the_data(tmp_path: Path) -> None:
    """Half of the rows are not finite: the run does not shrink in silence to the other half."""
    config = make_run(tmp_path, 64, dict.fromkeys(range(32), NAN), batch_size=8, supervise={"attempts": 1})
    with pytest.raises(RecoveryExhausted, match="the arithmetic is wrong, not the rows"):
        supervise(tmp_path, config).check()
    assert len(read_plan(tmp_path / "run").rows_reached()[1]) <= 17

"""Spikes are seen, noise is not; the rows of a batch that are not finite are found, and told from bad arithmetic."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hivetune.base.typed import from_plain, to_plain
from hivetune.train.plan.steps import Amendment, PlanRow, make_plan
from hivetune.train.worker import recover
from hivetune.train.worker.lessons import EARLY
from hivetune.train.worker.model.protocol import Document
from hivetune.train.worker.recover import BadRows, LossDiverged, find_bad_rows, padded, roll_back
from hivetune.train.worker.watch import LossHistory, Spike, robust_z, step_problem


def test_a_step_is_fit_only_with_two_finite_numbers() -> None:
    assert step_problem(1.0, 0.5) is None
    assert step_problem(0.0, 0.0) is None
    assert step_problem(math.nan, 1.0) == "the loss is nan"
    assert step_problem(1.0, math.inf) == "the gradient norm is inf"


def spikes(losses: Sequence[float]) -> list[Spike]:
    history, found = LossHistory(), []
    for step, loss in enumerate(losses):
        history, spike = history.after(step, loss)
        found += [spike] if spike else []
    return found


def falling(rng: random.Random, steps: int) -> Iterator[float]:
    """A loss curve: from 3 to 1 nats, 10 % noise."""
    for step in range(steps):
        yield (1 + 2 * math.exp(-step / 200)) * rng.gauss(1, 0.1)


def bursty(rng: random.Random) -> float:
    """Batches of another kind now and then: in one of 50, three times the usual loss."""
    return rng.gauss(1, 0.1) * (3 if rng.random() < 0.02 else 1)


NOISE = {
    "falling": lambda rng: falling(rng, 10_000),
    "normal": lambda rng: (abs(rng.gauss(1, 0.3)) for _ in range(10_000)),
    "lognormal": lambda rng: (rng.lognormvariate(0, 0.5) for _ in range(10_000)),
    "bursty": lambda rng: (bursty(rng) for _ in range(10_000)),
    "sinking to nothing": lambda rng: (math.exp(-step / 500) * rng.lognormvariate(0, 0.3) for step in range(10_000)),
    "in sorted epochs": lambda rng: (1 + (step % 500) / 250 + rng.gauss(0, 0.05) for step in range(10_000)),
    "constant": lambda rng: (1.0 for _ in range(10_000)),
    "zero": lambda rng: (0.0 for _ in range(10_000)),
}


@pytest.mark.parametrize("kind", NOISE)
def test_no_false_alarm_in_ten_thousand_steps(kind: str) -> None:
    assert spikes(list(NOISE[kind](random.Random(5)))) == []


def test_a_spike_is_seen_at_once_and_a_loss_that_rose_for_good_at_the_third_step() -> None:
    for seed in range(20):
        once = list(falling(random.Random(seed), 300))
        risen = [*once[:200], *(3 * loss for loss in once[200:])]
        once[200] *= 20
        (spike,) = spikes(once)
        assert (spike.first, spike.last) == (199, 200)
        assert (spikes(risen)[0].first, spikes(risen)[0].last) == (199, 202)


def test_two_high_losses_are_no_alarm_and_become_usual() -> None:
    losses = list(falling(random.Random(1), 300))
    losses[200] *= 2.5
    losses[201] *= 2.5
    assert spikes(losses) == []


@given(st.lists(st.floats(0, 20), max_size=100))
def test_the_history_travels_as_json(losses: list[float]) -> None:
    history = LossHistory()
    for step, loss in enumerate(losses):
        history, _ = history.after(step, loss)
        assert from_plain(LossHistory, json.loads(json.dumps(to_plain(history)))) == history


def test_robust_z_is_not_moved_by_one_outlier() -> None:
    window = [1 + 0.01 * i for i in range(20)]
    assert robust_z(2, [*window[1:], 1000.0]) == pytest.approx(robust_z(2, window), rel=0.1)
    assert robust_z(1.0, [1.0] * 10) == 0


@pytest.mark.parametrize("windows", [1, 2])
def test_the_third_spike_ends_a_run(windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other data did not help twice. Steps that were left out for the lessons are no rollback."""
    rows = [PlanRow(row, str(row), 10, 5) for row in range(24)]
    plan = make_plan(rows, snapshot_hash="", settings_hash="", seed=0, batch_size=2, epochs=1)
    before = [Amendment(2 * number, (1,), "spike", 2 * number + 1) for number in range(windows)]
    session: Any = SimpleNamespace(folder=tmp_path, state=SimpleNamespace(step=6))
    session.plan = plan.amended(*before, Amendment(9, (2,), EARLY, 10))
    monkeypatch.setattr(recover, "restore", lambda session: None)
    monkeypatch.setattr(recover, "journal", lambda *given, **named: None)
    spike = Spike(6, 7, "loss 99")
    if windows == 2:
        with pytest.raises(LossDiverged, match="loss 99; 2 rollbacks with other data did not help"):
            roll_back(session, spike)
        return
    roll_back(session, spike)
    window = session.plan.amendments[-1]
    assert (window.from_step, window.until_step) == (6, 8) and len(window.rows) == 4


class Fake:
    """A model whose rows in `nan` are not finite; `only_at` limits that to one length, `times` to so many looks."""

    device = torch.device("cpu")

    def __init__(self, nan: set[int], *, only_at: int | None = None, times: int = 1 << 30, in_gradient: bool = False):
        self.nan, self.only_at, self.times, self.in_gradient = nan, only_at, times, in_gradient
        self.grad_N = torch.zeros(3)

    def backward(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        torch.rand(1)  # dropout
        hit = any(d.row in self.nan and self.only_at in (None, len(d.tokens_L)) for d in documents)
        self.times -= hit
        value = math.nan if hit and self.times >= 0 else 1.0
        self.grad_N += value
        return torch.tensor(1.0 if self.in_gradient else value)


def batch(size: int = 16) -> list[Document]:
    trained = torch.tensor([False] + [True] * 4)
    return [Document(row, torch.arange(5), trained) for row in range(100, 100 + size)]


@pytest.mark.parametrize("in_gradient", [False, True])
def test_rows_that_are_not_finite_are_found_without_a_trace(in_gradient: bool) -> None:
    model = Fake({103, 111}, in_gradient=in_gradient)
    state = torch.get_rng_state()
    assert find_bad_rows(model, batch()) == BadRows(rows=(103, 111))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.grad_N.any()


def test_a_bad_shape_and_a_passing_fault_are_no_bad_rows() -> None:
    for passing in (Fake({103}, only_at=5), Fake({103}, times=1)):
        assert find_bad_rows(passing, batch()) == BadRows(unreliable=(103,))  # type: ignore[arg-type]
    assert find_bad_rows(Fake({103}, times=0), batch()) == BadRows()  # type: ignore[arg-type]


def test_padding_changes_the_length_and_nothing_that_counts() -> None:
    document = batch(1)[0]
    longer = padded(document)
    assert len(longer.tokens_L) == 128 and longer.tokens_L[:5].tolist() == document.tokens_L.tolist()
    assert int(longer.trained_L.sum()) == int(document.trained_L.sum())

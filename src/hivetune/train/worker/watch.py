"""The watch over a run's numbers: a step's loss and gradient norm before its update, and the loss on held-out rows.

Functions on plain numbers, which the loop journals. A missing number is a failure, never 0. Held-out rows are scored on
a sample during a run, and all of them for the adapter that is kept.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hivetune.data.snapshot import Snapshot
from hivetune.train.plan.steps import spread_sample
from hivetune.train.worker.model.protocol import Document, read_documents

WINDOW = 64
# Fewer losses than this do not show what is usual.
SETTLED = 16
# Factor from median absolute deviation to standard deviation, for a normal distribution.
MAD_TO_SIGMA = 1.4826
# A spike is one loss that no data explains, or three high losses in a row, which a bad update explains. Tested: no
# alarm in 10,000 steps of normal, lognormal or bursty noise (tests/train/worker/test_watch.py).
SINGLE_Z, SINGLE_TIMES = 20.0, 5.0
LASTING_Z, LASTING_STEPS = 6.0, 3
MAX_ROLLBACKS = 2
# Steps before the first high loss that are suspected too: the update that did the damage came earlier.
STEPS_BEFORE = 1
# The reason of the amendment that skips steps before the lessons (lessons.py); no rollback.
EARLY = "validation stopped improving"
# So many documents are scored together: their prefixes are shared. Then the supervisor gets a heartbeat.
VALIDATION_DOCUMENTS = 64
# The first tokens of a row stand for its kind: rows of one agent have its system prompt in common.
KIND_TOKENS = 32


class LossDiverged(ArithmeticError):
    """Raised when the loss rose for the third time: rolling back and skipping data did not help."""


def step_problem(loss: float | None, grad_norm: float | None) -> str | None:
    """Return in words why this step must not reach the optimizer; None: it may."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if value is None:
            return f"no {name} was measured"
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return None


def robust_z(value: float, window: Sequence[float]) -> float:
    """Return the distance from the median in robust standard deviations, taken as at least 1 % of the median."""
    middle = statistics.median(window)
    sigma = MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in window)
    return (value - middle) / max(sigma, 0.01 * abs(middle), 1e-6)


@dataclass(frozen=True)
class Spike:
    """A spike of the loss: go back to a checkpoint of at most `first` steps and leave out the rows of first..last."""

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class LossHistory:
    """The usual losses of a run. It is part of every checkpoint."""

    losses: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    start: float | None = None

    def after(self, step: int, loss: float) -> "tuple[LossHistory, Spike | None]":
        """Return the history with the loss of `step`, and the spike that this loss completes, if any."""
        start = self.start
        if start is None and len(self.losses) + 1 >= SETTLED:
            start = statistics.median((*self.losses, loss))
        calm = LossHistory((*self.losses, loss)[-WINDOW:], (), start)
        if len(self.losses) < SETTLED or self.start is None:
            return calm, None
        z, usual_most = robust_z(loss, self.losses), max(self.losses)
        if z > SINGLE_Z and loss > SINGLE_TIMES * max(usual_most, self.start):
            return calm, _spike(step, 1, f"loss {loss:.4g} at step {step} is {z:.0f} deviations above the median")
        if z <= LASTING_Z or loss <= usual_most:
            return LossHistory((*self.losses, *self.high, loss)[-WINDOW:], (), start), None
        high = (*self.high, loss)
        if len(high) < LASTING_STEPS:  # high losses do not count as usual until the next one is low
            return LossHistory(self.losses, high, start), None
        reason = f"losses of {len(high)} steps up to step {step} are {z:.0f} deviations above the median"
        return calm, _spike(step, len(high), reason)


def check_rollbacks(spike: Spike, rollbacks_before: int) -> None:
    """Raise LossDiverged when this spike comes after the last rollback that is allowed."""
    if rollbacks_before >= MAX_ROLLBACKS:
        raise LossDiverged(
            f"{spike.reason}; {rollbacks_before} rollbacks with other data did not help: lower learning_rate"
        )


def _spike(step: int, num_high: int, reason: str) -> Spike:
    return Spike(max(0, step + 1 - num_high - STEPS_BEFORE), step, reason)


@dataclass(frozen=True)
class Scored:
    """The loss of scored rows. loss: nats per trained token.

    error: one standard error of the loss, as an estimate of the loss of `of` rows; 0 where all of them were scored.
    not_finite: rows that are left out of it.
    """

    loss: float
    error: float
    tokens: int
    rows: int
    of: int
    not_finite: tuple[int, ...]


def choose_sample(snapshot: Snapshot, rows: Sequence[int], most: int) -> list[int]:
    """Return a sample of `rows`, sorted by their beginnings, then by their number of trained tokens."""
    return spread_sample(
        rows, most, lambda row: (snapshot.tokens(row)[:KIND_TOKENS].tobytes(), snapshot.num_trained(row))
    )


def score_rows(
    score: Callable[[list[Document]], list[float]],
    snapshot: Snapshot,
    rows: Sequence[int],
    of: int,
    beat: Callable[[], None],
) -> tuple[Scored | None, dict[int, float]]:
    """Score `rows`. Return the result, None where no loss is finite, and the nll of each row that has one.

    `score` returns the nll of each document. `of`: how many rows these stand for. `beat` is called before each part.
    The error is that of a ratio of two sums over a simple sample (Cochran, chapter 6), without replacement. The sample
    is spread over kinds, which makes the true error smaller.
    """
    sums = torch.zeros(6, dtype=torch.float64)
    left_out: list[int] = []
    losses: dict[int, float] = {}
    ordered = sorted(
        rows, key=lambda row: snapshot.tokens(row).tobytes()
    )  # rows that share a prefix are scored together
    for start in range(0, len(ordered), VALIDATION_DOCUMENTS):
        beat()
        documents = read_documents(snapshot, ordered[start:][:VALIDATION_DOCUMENTS])
        for document, nll in zip(documents, score(documents), strict=True):
            tokens = float(document.trained_L.sum())
            if math.isfinite(nll):
                losses[document.row] = nll
                sums += torch.tensor([1, nll, tokens, nll * nll, nll * tokens, tokens * tokens], dtype=torch.float64)
            else:
                left_out.append(document.row)
    count, nll_sum, tokens_sum, squares, crossed, tokens_squares = sums.tolist()
    if tokens_sum == 0:
        return None, losses
    loss = nll_sum / tokens_sum
    spread = max(0.0, squares - 2 * loss * crossed + loss * loss * tokens_squares) / max(1.0, count - 1)
    error = math.sqrt(max(0.0, 1 - count / max(of, 1)) * spread / count) * count / tokens_sum
    return Scored(loss, error, int(tokens_sum), int(count), of, tuple(left_out)), losses

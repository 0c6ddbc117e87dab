"""The watch over a run's numbers: a step's loss and gradient norm before its update, and the loss on held-out rows.

Functions on plain numbers, which the loop journals. A missing number is a failure, never 0.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hivetune.data.snapshot import Snapshot
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
# Steps before the first high loss that are suspected too: the update that did the damage came earlier.
STEPS_BEFORE = 1
# So many documents are scored together, because their prefixes are shared. Then the supervisor gets a heartbeat.
SCORED_TOGETHER = 64


def step_problem(loss: float, grad_norm: float) -> str | None:
    """Return the reason why this step must not update the weights, or None."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return None


def robust_z(value: float, window: Sequence[float]) -> float:
    """Return the distance of `value` from the window's median, in robust standard deviations (at least 1 % of the
    median)."""
    middle = statistics.median(window)
    sigma = MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in window)
    return (value - middle) / max(sigma, 0.01 * abs(middle), 1e-6)


@dataclass(frozen=True)
class Spike:
    """A spike of the loss: return to a checkpoint of at most `first` steps, and leave out the rows of first..last."""

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class LossHistory:
    """The recent losses of a run, for the detection of spikes. It is part of every checkpoint.

    high: the newest losses, if they are high; they count as usual only if the next one is low. start: the usual loss of
    the first steps, None until there are SETTLED of them.
    """

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
        if len(high) < LASTING_STEPS:
            return LossHistory(self.losses, high, start), None
        reason = f"losses of {len(high)} steps up to step {step} are {z:.0f} deviations above the median"
        return calm, _spike(step, len(high), reason)


def _spike(step: int, num_high: int, reason: str) -> Spike:
    return Spike(max(0, step + 1 - num_high - STEPS_BEFORE), step, reason)


@dataclass(frozen=True)
class Scored:
    """The mean loss of scored rows, in nats per trained token.

    rows, tokens: their numbers. not_finite: rows that are left out of the mean.
    """

    loss: float
    rows: int
    tokens: int
    not_finite: tuple[int, ...]


def score_rows(
    score: Callable[[list[Document]], list[float]], snapshot: Snapshot, rows: Sequence[int], beat: Callable[[], None]
) -> Scored | None:
    """Return the mean loss of `rows`; None if no loss is finite.

    `score` returns the nll of each document in nats. `beat` is called before each part.
    """
    # Rows that begin alike stand together, so that a prefix is computed once.
    ordered = sorted(rows, key=lambda row: snapshot.tokens(row).tobytes())
    nlls: list[float] = []
    tokens = 0
    left_out: list[int] = []
    for start in range(0, len(ordered), SCORED_TOGETHER):
        beat()
        documents = read_documents(snapshot, ordered[start:][:SCORED_TOGETHER])
        for document, nll in zip(documents, score(documents), strict=True):
            if math.isfinite(nll):
                nlls.append(nll)
                tokens += int(document.trained_L.sum())
            else:
                left_out.append(document.row)
    return Scored(math.fsum(nlls) / tokens, len(nlls), tokens, tuple(left_out)) if tokens else None

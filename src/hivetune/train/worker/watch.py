"""The watch over a step's numbers: what makes its loss and gradient norm unfit for an update, and which rows caused it.

First pure functions on plain numbers, which the loop journals; then the search for the rows of a batch that are not
finite, by replay inside the worker. A missing number is a failure, never 0.

Shapes: L positions of a document.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from hivetune.train.worker.model.protocol import Document, LoraModel

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
PADDING = 64

T = TypeVar("T")


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
class BadRows:
    """The rows that a replay found.

    `rows`: not finite each time and at any length, so it is the row. `kernel`: finite at another length, so it is the
    arithmetic of this shape. `flaky`: finite when computed again, so it is the machine.
    """

    rows: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    flaky: tuple[int, ...] = ()


def split_out(items: Sequence[T], is_bad: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return the items that are bad alone, in order, by halving the bad parts: about k * log2(n) calls for k of n.

    What is bad only together is not found: the list is empty then.
    """
    if not items or not is_bad(items):
        return []
    if len(items) == 1:
        return [items[0]]
    half = len(items) // 2
    return split_out(items[:half], is_bad) + split_out(items[half:], is_bad)


def find_bad_rows(model: LoraModel, documents: Sequence[Document]) -> BadRows:
    """Return which documents of a step are not finite, and whether the rows or the arithmetic cause it.

    Leaves `grad_N` zero and torch's generators as they were; the weights are only read.
    """
    rows: list[int] = []
    kernel: list[int] = []
    flaky: list[int] = []
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        for document in split_out(documents, lambda some: not is_finite_step(model, some)):
            if is_finite_step(model, [document]):
                flaky.append(document.row)
            elif is_finite_step(model, [padded(document)]):
                kernel.append(document.row)
            else:
                rows.append(document.row)
    return BadRows(tuple(rows), tuple(kernel), tuple(flaky))


def is_finite_step(model: LoraModel, documents: Sequence[Document]) -> bool:
    """Return whether loss and gradient of these documents alone are finite. `grad_N` is zero afterwards."""
    model.grad_N.zero_()
    finite = bool(torch.isfinite(model.backward(documents, 1.0))) and bool(torch.isfinite(model.grad_N).all())
    model.grad_N.zero_()
    return finite


def padded(document: Document) -> Document:
    """Return the document with untrained tokens behind it, up to the next but one multiple of 64.

    Its shapes differ; in a causal model its loss and gradient do not.
    """
    extra = 2 * PADDING - document.tokens_L.numel() % PADDING
    tokens_L = torch.cat([document.tokens_L, document.tokens_L[-1:].expand(extra)])
    trained_L = torch.cat([document.trained_L, torch.zeros(extra, dtype=torch.bool, device=tokens_L.device)])
    return document._replace(tokens_L=tokens_L, trained_L=trained_L)

"""What to change before the next run, and why: read from the run's own curves, adapter and held-out rows. Pure.

Nothing here is said without the measurement that says it; a run that shows none of it gets no advice.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hivetune.base.journal import read_journal
from hivetune.data.prepare.keys import question
from hivetune.data.snapshot import Snapshot
from hivetune.judge.verdict import titled
from hivetune.models.sides import SIDES
from hivetune.records import Advice, Metric
from hivetune.run.folder import METRICS
from hivetune.train.open import Run

MIN_VALIDATIONS = 3
ROSE = 0.01  # of the validation loss: repeated validations of one run differ by less
ROSE_EARLY = 0.05  # within the first epoch, in which no row is seen twice
STILL_FALLING = 0.02  # of the loss, in the last third of the steps
GAP = 0.25  # of the held-out loss: what the trained rows are better by
WORSE_SHARE = 0.1
SHOWN_ROWS = 5


@dataclass(frozen=True)
class Curve:
    """The curve of a run: (step, loss, gradient norm) of its steps, (step, loss) of its validations, and its settings.

    `rollbacks`: how often training went back. `per_epoch`: steps of one epoch.
    """

    steps: Sequence[tuple[int, float, float]]
    validations: Sequence[tuple[int, float]]
    rollbacks: int
    per_epoch: float
    learning_rate: float
    clip: float
    trained_rows: int


def advise(
    curve: Curve,
    evaluation: Mapping[str, Any],
    contradictory: Sequence[str],
    metrics: Sequence[Metric],
) -> tuple[Advice, ...]:
    """Return advice, what helps most first.

    `contradictory`: places of trained rows that answer one question differently.
    """
    other_answer = None
    if contradictory:
        other_answer = Advice(
            "rows",
            f"contradictory: {len(contradictory)} trained rows answer a question otherwise than another row does; keep"
            " one answer to each, or say in the question what makes the difference",
            tuple(contradictory),
        )
    candidates = [_rate(curve), _trained_enough(curve), _rows(curve), other_answer, _worse(evaluation)]
    return tuple(advice for advice in (*candidates, *map(_evidence, metrics)) if advice is not None)


def _rate(curve: Curve) -> Advice | None:
    reason = ""
    early = [loss for step, loss in curve.validations if step <= curve.per_epoch]
    first, last = _quarter(curve, 0), _quarter(curve, 3)
    if curve.rollbacks:
        reason = f"the loss jumped and training went back {curve.rollbacks} times"
    elif len(early) >= 2 and early[-1] > (1 + ROSE_EARLY) * min(early):
        reason = f"validation rose from {min(early):.3f} to {early[-1]:.3f} within the first epoch, on rows seen once"
    elif first is not None and last is not None and last > (1 + ROSE_EARLY) * first:
        reason = f"the training loss rose from {first:.3f} in the first quarter to {last:.3f} in the last"
    if not reason:
        return None
    clipped = sum(norm > curve.clip for _, _, norm in curve.steps) if curve.clip else 0
    if curve.steps and clipped > len(curve.steps) / 2:
        reason += f"; {clipped / len(curve.steps):.0%} of the gradients were clipped"
    return Advice("learning_rate", f"learning_rate {curve.learning_rate:g} is too high: {reason}; try a third of it")


def _trained_enough(curve: Curve) -> Advice | None:
    """Train against validation: too long, or not long enough."""
    if len(curve.validations) < MIN_VALIDATIONS:
        return None
    best_step, best = min(curve.validations, key=lambda validation: validation[1])
    last_step, last = curve.validations[-1]
    if last > (1 + ROSE) * best and best_step >= curve.per_epoch:
        before = [loss for step, loss, _ in curve.steps if best_step - curve.per_epoch <= step <= best_step]
        after = [loss for step, loss, _ in curve.steps if step > best_step]
        if before and after and median(after) < median(before):
            return Advice(
                "epochs",
                f"over-trained: validation was lowest at step {best_step} of {last_step} ({best:.3f}) and rose to "
                f"{last:.3f} while the training loss fell from {median(before):.3f} to {median(after):.3f}; epochs: "
                f"{max(1.0, best_step / curve.per_epoch):.2g} is enough, more rows would be better",
            )
    earlier = _still_falling(curve)
    if earlier is not None:
        return Advice(
            "epochs",
            f"under-trained: validation still fell from {earlier:.3f} to {last:.3f} in the last third of the steps"
            f"; train about twice as long (now {last_step / curve.per_epoch:.2g} epochs)",
        )
    return None


def _still_falling(curve: Curve) -> float | None:
    """Return the validation loss at two thirds of the steps, where the last is the lowest, by STILL_FALLING."""
    last_step, last = curve.validations[-1]
    earlier = [loss for step, loss in curve.validations if step <= last_step * 2 / 3]
    lowest = last == min(loss for _, loss in curve.validations)
    return earlier[-1] if lowest and earlier and earlier[-1] - last > STILL_FALLING * last else None


def _rows(curve: Curve) -> Advice | None:
    last = _quarter(curve, 3)
    if last is None or not curve.validations or _still_falling(curve) is not None:
        return None
    best = min(loss for _, loss in curve.validations)
    epochs = curve.steps[-1][0] / curve.per_epoch
    if epochs <= 1 or best - last <= GAP * best:
        return None
    return Advice(
        "rows",
        f"too few rows: the loss is {last:.3f} on the {curve.trained_rows:,} trained rows and {best:.3f} on held-out "
        "ones; more rows of the same kind help more than more steps",
    )


def _worse(evaluation: Mapping[str, Any]) -> Advice | None:
    """Name the held-out rows whose loss got worse, the largest rise first, and their most frequent agent."""
    rows = [
        row
        for row in evaluation["rows"]
        if row["tokens"] and all(isinstance(row[side], float) and math.isfinite(row[side]) for side in SIDES)
    ]
    worse = sorted(
        (row for row in rows if row["tuned"] > row["base"]),
        key=lambda row: (row["base"] - row["tuned"]) / row["tokens"],
    )
    if not rows or len(worse) < WORSE_SHARE * len(rows):
        return None
    fact = f"{len(worse)} of {len(rows)} held-out rows got worse"
    agent, count = Counter(row["agent"] for row in worse).most_common(1)[0]
    of_agent = sum(row["agent"] == agent for row in rows)
    if agent and count > len(worse) / 2 and of_agent < len(rows) / 2:
        fact += f", {count} of them of agent {agent!r}: it has few rows, or rows that say otherwise"
    shown = tuple(f"{row['source']}: +{(row['tuned'] - row['base']) / row['tokens']:.3f} nats a token" for row in worse)
    return Advice("rows", f"{fact}; look at those that lost most", shown[:SHOWN_ROWS])


def _evidence(metric: Metric) -> Advice | None:
    """Return how to reach the number of rows that decides."""
    if metric.needed is None or metric.passed is not False or metric.needed <= metric.n:
        return None
    needs = f"{titled(metric.name)}: about {metric.needed} rows decide it, {metric.n} are there"
    return Advice("evidence", f"{needs}: {more_evidence(metric.name)}")


def more_evidence(name: str) -> str:
    """Return what gives a metric more rows: its settings differ."""
    if name == "loss":
        return "hold out more rows (data.test)"
    return "answer more held-out rows (eval.prompts, data.test)"


def _quarter(curve: Curve, number: int) -> float | None:
    """Return the median training loss of the first (0) to the last (3) quarter of the steps; None below 16 steps."""
    if len(curve.steps) < 16:
        return None
    size = len(curve.steps) // 4
    return median(loss for _, loss, _ in curve.steps[number * size : (number + 1) * size])


# What advice reads: the curve of the run, and contradictory rows.

MAX_ROWS_READ = 20_000  # about 2 s
_MAX_SOURCES = 10
MAX_POINTS = 200  # of a plot


def read_curve(run: Run) -> Curve:
    """Return the steps and validations of `metrics.jsonl` and the settings that advice reads them against."""
    steps, validations, rollbacks = [], [], 0
    for entry in read_journal(run.folder / METRICS):
        if entry["event"] == "step" and None not in (entry["loss"], entry.get("grad_norm")):
            steps.append((int(entry["step"]), float(entry["loss"]), float(entry["grad_norm"])))
        elif entry["event"] == "validation" and entry["loss"] is not None:
            validations.append((int(entry["step"]), float(entry["loss"])))
        elif entry["event"] == "rolled_back":
            rollbacks += 1
    rows = len(run.snapshot.rows("train"))
    config = run.config
    per_epoch = max(1.0, rows / config.batch_size)
    return Curve(steps, validations, rollbacks, per_epoch, config.learning_rate, config.clip, rows)


def curve_document(curve: Curve) -> dict[str, Any]:
    """Return the curve for a plot: `steps`, or means of stretches of them, and `validations` as [step, loss]."""
    size = -(-len(curve.steps) // MAX_POINTS) or 1
    parts = [curve.steps[start : start + size] for start in range(0, len(curve.steps), size)]
    steps = [[part[-1][0], sum(loss for _, loss, _ in part) / len(part)] for part in parts]
    return {"steps": steps, "validations": [list(validation) for validation in curve.validations]}


def contradictory_rows(snapshot: Snapshot) -> tuple[str, ...]:
    """Return places of trained rows that answer a question differently from an earlier row; reads MAX_ROWS_READ rows.

    The same question is the same words before the first answer, for one agent.
    """
    answers: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in snapshot.rows("train")[:MAX_ROWS_READ]:
        info = snapshot.info(row)
        turns = [message for message in info.messages if message.role != "system"]
        if len(turns) == 2 and turns[1].role == "assistant":
            text = " ".join(turns[1].content.split()).casefold()
            answers[info.agent or "", question(info.messages)].setdefault(text, info.source)
    others = [list(sources.values())[1:] for sources in answers.values() if len(sources) > 1]
    return tuple(source for others_of in others for source in others_of)[:_MAX_SOURCES]

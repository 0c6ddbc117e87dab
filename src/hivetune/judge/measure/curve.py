"""What advice is read from: a run's losses step by step, and trained rows that contradict each other."""

from collections import defaultdict
from typing import Any

from hivetune.base.journal import read_journal
from hivetune.data.prepare.split import question
from hivetune.data.snapshot import Snapshot
from hivetune.judge.advice import Curve
from hivetune.run.folder import METRICS
from hivetune.train.open import Run

MOST_ROWS_READ = 20_000  # about 2 s
_MOST_PLACES = 10
MOST_POINTS = 200  # of a plot


def read_curve(run: Run) -> Curve:
    """The steps and validations of `metrics.jsonl` and the settings that they are read against."""
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
    """For a plot: `steps` and `validations` as [step, loss]; of many steps the mean of each stretch."""
    size = -(-len(curve.steps) // MOST_POINTS) or 1
    parts = [curve.steps[start : start + size] for start in range(0, len(curve.steps), size)]
    steps = [[part[-1][0], sum(loss for _, loss, _ in part) / len(part)] for part in parts]
    return {"steps": steps, "validations": [list(each) for each in curve.validations]}


def contradictory_rows(snapshot: Snapshot) -> tuple[str, ...]:
    """Places of trained rows that answer a question otherwise than an earlier row does; of the first MOST_ROWS_READ.

    The same question is the same words before the first answer, for one agent.
    """
    answers: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in snapshot.rows("train")[:MOST_ROWS_READ]:
        info = snapshot.info(row)
        turns = [message for message in info.messages if message.role != "system"]
        if len(turns) == 2 and turns[1].role == "assistant":
            said = " ".join(turns[1].content.split()).casefold()
            answers[info.agent or "", question(info.messages)].setdefault(said, info.source)
    others = [list(known.values())[1:] for known in answers.values() if len(known) > 1]
    return tuple(place for places in others for place in places)[:_MOST_PLACES]

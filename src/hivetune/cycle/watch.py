"""Whether a new champion serves worse than the one before it: asked at every look, with few false alarms.

Five rates are held against that champion's own past by the gateway's alarm (serve/swap/watch.py). The gateway counts
answers that failed, that were slow and that were complained about. The captured answers show those that refuse and
those that are unusually long or short. Each alarm may be asked after every answer and is false in at most 1 % of all
lives of an equally good release, so one of the five is in at most 5 %. Fewer than 20 answers say nothing.
"""

import json
import math
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hivetune.judge.findings import is_refusal
from hivetune.serve.gateway.capture import SOURCE
from hivetune.serve.swap.watch import FAULTS, FLOORS, Alarm, ReleaseCounts, usual_rate

REFUSAL_FLOOR = 0.02
# Lengths outside these quantiles of the earlier champion's answers are unusual, as 10 % of its own are.
LOW_QUANTILE, HIGH_QUANTILE = 0.05, 0.95
MIN_BEFORE = 50  # fewer captured answers of the earlier champion do not say what is usual
MAX_BEFORE, MAX_AFTER = 500, 5000  # answers that are read: the newest of the one before, the first of the new one


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    """A captured answer. `length`: its characters. `asked`: those of its question, as a power of two: answers are
    compared with answers to questions of about that length."""

    length: int
    refused: bool
    asked: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Service:
    """The service of a release. `counts`: the gateway's. `answers`: captured ones, oldest first."""

    label: str
    counts: ReleaseCounts
    answers: Sequence[SeenAnswer] = ()


def read_service(database: sqlite3.Connection, label: str, *, newest: bool) -> Service:
    """Read what hive.db has of a release's answers: the newest (of the release before) or the first ones."""
    row = database.execute(
        "SELECT answers, errors, slow, complaints FROM served WHERE release = ?", (label,)
    ).fetchone()
    order, most = ("DESC", MAX_BEFORE) if newest else ("ASC", MAX_AFTER)
    rows = database.execute(
        f"SELECT row FROM interactions WHERE source = ? ORDER BY time {order}, rowid {order} LIMIT ?",
        (f"{SOURCE}:{label}", most),
    )
    answers = [answer for (text,) in rows if (answer := _read_answer(text)) is not None]
    return Service(label, ReleaseCounts(*row) if row else ReleaseCounts(), answers[::-1] if newest else answers)


def regression_reason(before: Service, now: Service) -> str:
    """Return why the new champion is worse than the one before, or "" while nothing shows it."""
    for kind, floor in FLOORS.items():
        usual = usual_rate(getattr(before.counts, kind), before.counts.answers, floor)
        alarm = Alarm(usual, answers=now.counts.answers, bad=getattr(now.counts, kind))
        if alarm.raised:
            return alarm.reason(FAULTS[kind], before.label)
    groups: dict[int, list[SeenAnswer]] = {}  # by the length of their question, where there are enough
    for answer in before.answers:
        groups.setdefault(answer.asked, []).append(answer)
    by_question = {size: group for size, group in groups.items() if len(group) >= MIN_BEFORE}
    now_answers = [answer for answer in now.answers if answer.asked in by_question]
    if not now_answers:
        return ""
    # The rate of those questions that were refused most: that others are asked now is not the release's doing.
    usual = max(usual_rate(sum(a.refused for a in group), len(group), REFUSAL_FLOOR) for group in by_question.values())
    raised = _first_raised(usual, (answer.refused for answer in now_answers))
    if raised is not None:
        return raised.reason("refused", before.label)
    bounds = {}
    for size, group in by_question.items():
        ordered = sorted(answer.length for answer in group)
        highest = math.ceil(HIGH_QUANTILE * len(ordered)) - 1
        bounds[size] = ordered[math.floor(LOW_QUANTILE * len(ordered))], ordered[highest]

    def is_unusual(answer: SeenAnswer) -> bool:
        shortest, longest = bounds[answer.asked]
        return not shortest <= answer.length <= longest

    floor = 1 - HIGH_QUANTILE + LOW_QUANTILE
    usual = max(usual_rate(sum(map(is_unusual, group)), len(group), floor) for group in by_question.values())
    raised = _first_raised(usual, map(is_unusual, now_answers))
    if raised is not None:
        shortest, longest = min(low for low, _ in bounds.values()), max(high for _, high in bounds.values())
        return raised.reason(f"were shorter than {shortest} or longer than {longest} characters", before.label)
    return ""


def _first_raised(usual: float, bad: Iterable[bool]) -> Alarm | None:
    """Return the first alarm, or None."""
    alarm = Alarm(usual)
    for value in bad:
        alarm.add(value)
        if value and alarm.raised:
            return alarm
    return None


def _read_answer(stored: str) -> SeenAnswer | None:
    """Read a stored answer. None for a tool call, which has no text, and for a damaged row. A corrected answer counts
    as it was given."""
    try:
        row = json.loads(stored)
    except ValueError:
        return None
    messages = row.get("messages") or [{}]
    answer = row.get("rejected_answer") or messages[-1]
    text = answer.get("content") if isinstance(answer, dict) else None
    if not isinstance(text, str) or not text:
        return None
    num_chars = sum(len(str(turn.get("content") or "")) for turn in messages[:-1] if isinstance(turn, dict))
    return SeenAnswer(len(text), is_refusal(text), num_chars.bit_length())

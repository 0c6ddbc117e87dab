"""What only all rows together say of judged answers: contradictions, copies, retries, and how many one user may give.

Pure but for its counts: rows are numbers of the input, answers 64 bits of a conversation with the answer at its end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hivetune.config import LearnConfig

NO_NAME = 0


class Candidate(NamedTuple):
    """A row with a bad answer. `worse`: that answer. `better`: the answer that the row itself calls better, None where
    the bad one is the row's own. `stays`: the row that holds the better one: itself, or the row that it equals."""

    row: int
    worse: int
    better: int | None
    stays: int
    user: int
    session: int
    read: int
    time: float
    order: int


@dataclass
class Lessons:
    """`bad`: bad rows of the input on the train side, each with the row of the retry that worked. `worse`: rows whose
    worse answer is learned, each with the row of the better one. `set_aside`: why a row is not learned from.
    `left_out`: worse answers that are not used, by reason; their rows are trained all the same."""

    bad: dict[int, int | None] = field(default_factory=dict)
    worse: dict[int, int] = field(default_factory=dict)
    set_aside: dict[int, str] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


class Good(NamedTuple):
    """A good row, and when it was: one that may be a retry."""

    row: int
    time: float


def find_lessons(
    candidates: Sequence[Candidate],
    answers: Iterable[tuple[int, int]],
    tried: Callable[[int, int], Good | None],
    on_train: Callable[[int], bool],
    learn: "LearnConfig",
) -> Lessons:
    """Return which bad answers are learned from. `answers`: (row, answer) of every good row that is used;
    `tried(session, read)`: a good answer of this session to the same words; `on_train`: whether a row is on the train
    side.
    """
    found = Lessons()
    found.set_aside |= dict.fromkeys(_contradictory(candidates, answers), "contradictory")
    left = [one for one in candidates if one.row not in found.set_aside]
    for one in left:
        found.left_out["contradictory"] += one.stays in found.set_aside
    left = [one for one in left if one.stays not in found.set_aside]
    left = list(_without_copies(left, found))
    left = list(_within_quota(left, learn.quota_per_user, found))
    for one in left:
        if not on_train(one.stays):
            if one.better is None:
                found.set_aside[one.row] = "bad-held-out"
            else:
                found.left_out["bad-held-out"] += 1
        elif one.better is not None:
            found.worse[one.row] = one.stays
        else:
            retry = tried(one.session, one.read) if "pairs" in learn.use and one.session != NO_NAME else None
            kept = retry is not None and on_train(retry.row) and retry.row not in found.set_aside
            if retry is not None and kept and not retry.time < one.time:
                found.bad[one.row] = retry.row
            elif "failures" in learn.use:
                found.bad[one.row] = None
            else:
                found.set_aside[one.row] = "not-learned"
    return found


def _contradictory(candidates: Sequence[Candidate], answers: Iterable[tuple[int, int]]) -> set[int]:
    """Return rows that call one answer good and bad: both of them. Pairs contradict each other only when they are
    reversed.
    """
    alone: dict[int, list[int]] = {}
    pairs: dict[tuple[int, int], list[int]] = {}
    for one in candidates:
        if one.better is None:
            alone.setdefault(one.worse, []).append(one.row)
        else:
            pairs.setdefault((one.better, one.worse), []).append(one.row)
    found = {row for both, rows in pairs.items() if both[::-1] in pairs for row in rows}
    if alone:
        for row, answer in answers:
            if answer in alone:
                found |= {row, *alone[answer]}
    return found


def _without_copies(candidates: Sequence[Candidate], found: Lessons) -> Iterator[Candidate]:
    """Yield each pair once; copies of bad rows are duplicates like any others, and are gone before this."""
    seen: set[tuple[int | None, int]] = set()
    for one in candidates:
        if one.better is not None and (one.better, one.worse) in seen:
            found.left_out["copy"] += 1
            continue
        seen.add((one.better, one.worse))
        yield one


def _within_quota(candidates: Sequence[Candidate], quota: int, found: Lessons) -> Iterator[Candidate]:
    """Yield at most `quota` bad answers of each user that is named; which ones is drawn by content."""
    taken: Counter[int] = Counter()
    for one in sorted(candidates, key=lambda one: (one.order, one.row)):
        taken[one.user] += one.user != NO_NAME
        if taken[one.user] <= quota:
            yield one
        elif one.better is None:
            found.set_aside[one.row] = "quota-user"
        else:
            found.left_out["quota-user"] += 1


def learnable(
    lessons: Lessons, reasons: Mapping[str, int], corrections: int, learn: "LearnConfig"
) -> dict[str, object]:
    """Return the report's `learn`: what is learned from, and what could be, in rows."""
    used = set(learn.use)
    document: dict[str, object] = {
        "use": list(learn.use),
        "corrections": corrections,
        "pairs": len(lessons.worse),
        "retries": sum(better is not None for better in lessons.bad.values()),
        "failures": sum(better is None for better in lessons.bad.values()),
        "worse_left_out": {reason: count for reason, count in sorted(lessons.left_out.items()) if count},
        "no_lesson": reasons.get("failed-outside", 0),
    }
    unused = {
        "pairs": reasons.get("preference-row", 0) if "pairs" not in used else 0,
        "failures": reasons.get("failed", 0) + reasons.get("disliked", 0),
    }
    document["not_used"] = {name: count for name, count in unused.items() if count}
    return document

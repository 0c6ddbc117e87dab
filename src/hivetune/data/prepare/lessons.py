"""The choice of bad answers that lessons learn from: contradictions, copies, retries, and a quota a client.

It needs all rows of a preparation (prepare/work.py). Answers are 64 bits of a conversation with the answer at its end.
Each answer that is not chosen gets its reason.
"""

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hivetune.data.prepare.work import USABLE
from hivetune.data.snapshot import SPLITS

if TYPE_CHECKING:
    from hivetune.config import LearnConfig

QUOTA_PER_CLIENT = 100  # bad rows of one client or user: with more, one person would decide what is unlearned


@dataclass(frozen=True)
class Lessons:
    """How many answers are learned of each kind besides good rows. `left_out`: worse answers that are not used, by
    reason; their rows are trained all the same.
    """

    corrections: int = 0
    pairs: int = 0
    retries: int = 0
    failures: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


class Candidate(NamedTuple):
    """A row with a bad answer, `worse`. `better`: the answer that the row itself calls better; None if the bad one is
    the row's own. `holder`: the row with the better answer, itself or an equal row; `trained`: it is on the train side.
    """

    row: int
    worse: int
    better: int | None
    holder: int
    trained: bool
    owner: int | None
    session: int | None
    read: int
    time: float
    order: int


def judge_rows(database: sqlite3.Connection, learn: "LearnConfig") -> Lessons:
    """Take bad answers out of the splits: bad answers of the train side wait for the lessons, each other one gets its
    reason. Return what the report says of them.
    """
    corrections = database.execute(f"SELECT count(*) FROM rows WHERE lesson = 'correction' AND {USABLE}").fetchone()[0]
    candidates = _candidates(database)
    if not candidates:
        return Lessons(corrections=corrections)
    set_aside: dict[int, str] = {}
    left_out: Counter[str] = Counter()

    def leave_out(candidate: Candidate, reason: str) -> None:
        if candidate.better is None:
            set_aside[candidate.row] = reason
        else:
            left_out[reason] += 1

    good = database.execute(f"SELECT n, judged64 FROM rows WHERE {USABLE} AND lesson != 'failure'")
    contradictory = _contradictory(candidates, good)
    set_aside |= dict.fromkeys(contradictory, "contradictory")
    unique: dict[object, Candidate] = {}
    for candidate in candidates:
        if candidate.row in contradictory:
            continue
        # Copies of bad rows are duplicates like any others, and are gone before this.
        pair = candidate.row if candidate.better is None else (candidate.better, candidate.worse)
        if candidate.holder in contradictory:
            left_out["contradictory"] += 1
        elif pair in unique:
            left_out["copy"] += 1
        else:
            unique[pair] = candidate
    retries = _retries(database, candidates) if "pairs" in learn.use else {}
    answers_of_owner: Counter[int | None] = Counter()
    bad: dict[int, int | None] = {}
    worse: dict[int, int] = {}
    for candidate in sorted(unique.values(), key=lambda drawn: (drawn.order, drawn.row)):  # drawn by content
        answers_of_owner[candidate.owner] += candidate.owner is not None
        retry, retry_time = retries.get((candidate.session, candidate.read), (None, math.inf))
        if answers_of_owner[candidate.owner] > QUOTA_PER_CLIENT:
            leave_out(candidate, "quota")
        elif not candidate.trained:
            leave_out(candidate, "not-learned")
        elif candidate.better is not None:
            worse[candidate.row] = candidate.holder
        elif retry is not None and retry not in set_aside and not retry_time < candidate.time:
            bad[candidate.row] = retry
        elif "failures" in learn.use:
            bad[candidate.row] = None
        else:
            leave_out(candidate, "not-learned")
    with_reasons = [(reason, row) for row, reason in set_aside.items()]
    database.executemany("UPDATE rows SET fate = ? WHERE n = ?", with_reasons)
    of_bad = [(better, row) for row, better in bad.items()]
    database.executemany("UPDATE rows SET fate = 'for-lessons', better = ? WHERE n = ?", of_bad)
    database.executemany("UPDATE rows SET pair = ? WHERE n = ?", [(holder, row) for row, holder in worse.items()])
    num_retries = sum(better is not None for better in bad.values())
    return Lessons(corrections, len(worse), num_retries, len(bad) - num_retries, left_out)


def _candidates(database: sqlite3.Connection) -> list[Candidate]:
    """Return rows with a bad answer that got this far."""
    candidates = []
    query = (
        "SELECT n, lesson, judged64, worse64, owner64, session64, read64, time, hash64, fate FROM rows"
        " WHERE lesson != 'sft' ORDER BY n"
    )
    for row, lesson, answer, worse, owner, session, read, time, order, own_fate in database.execute(query).fetchall():
        holder, fate = row, own_fate
        while fate in ("duplicate", "near-duplicate"):  # of an equal row that is kept
            holder = database.execute("SELECT stays FROM rows WHERE n = ?", (holder,)).fetchone()[0]
            fate = database.execute("SELECT fate FROM rows WHERE n = ?", (holder,)).fetchone()[0]
        is_bad = lesson == "failure"
        if fate not in SPLITS or (is_bad and holder != row) or (worse is None and not is_bad):
            continue
        origin = owner, session, read, math.inf if time is None else time, order
        if is_bad:
            candidates.append(Candidate(row, answer, None, row, fate == "train", *origin))
        else:
            candidates.append(Candidate(row, worse, answer, holder, fate == "train", *origin))
    return candidates


def _retries(
    database: sqlite3.Connection, candidates: Sequence[Candidate]
) -> dict[tuple[int | None, int], tuple[int, float]]:
    """Return (session, what was read) -> the last good answer to it that is trained, with its time; tries come in
    order.
    """
    failed = {(c.session, c.read) for c in candidates if c.better is None and c.session is not None}
    query = (
        "SELECT n, session64, read64, time FROM rows"
        " WHERE fate = 'train' AND lesson != 'failure' AND session64 NOT NULL"
    )
    return {
        (session, read): (row, math.inf if time is None else time)
        for row, session, read, time in (database.execute(f"{query} ORDER BY n") if failed else ())
        if (session, read) in failed
    }


def _contradictory(candidates: Sequence[Candidate], answers: Iterable[tuple[int, int]]) -> set[int]:
    """Return rows that call one answer good and bad: both of them. Pairs contradict each other only when they are
    reversed.
    """
    judged_bad: dict[int, list[int]] = {}
    pairs: dict[tuple[int, int], list[int]] = {}
    for candidate in candidates:
        if candidate.better is None:
            judged_bad.setdefault(candidate.worse, []).append(candidate.row)
        else:
            pairs.setdefault((candidate.better, candidate.worse), []).append(candidate.row)
    rows = {row for pair, members in pairs.items() if pair[::-1] in pairs for row in members}
    if judged_bad:
        for row, answer in answers:
            if answer in judged_bad:
                rows |= {row, *judged_bad[answer]}
    return rows


def learnable(lessons: Lessons, reasons: Mapping[str, int], learn: "LearnConfig") -> dict[str, object]:
    """Return the report's `learn`: the number of rows that are learned, and that could be."""
    unused = {
        "pairs": reasons.get("preference-row", 0) if "pairs" not in learn.use else 0,
        "failures": reasons.get("failed", 0),
    }
    return {
        "use": list(learn.use),
        "corrections": lessons.corrections,
        "pairs": lessons.pairs,
        "retries": lessons.retries,
        "failures": lessons.failures,
        "worse_left_out": dict(sorted(lessons.left_out.items())),
        "not_used": {name: count for name, count in unused.items() if count},
    }

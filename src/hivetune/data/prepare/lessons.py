"""The choice of bad answers that lessons learn from: contradictions, copies, and a quota a client.

It needs all rows of a preparation (prepare/work.py). Answers are 64 bits of a conversation with the answer at its end.
Each answer that is not chosen gets its reason.
"""

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
    order: int


def judge_rows(database: sqlite3.Connection, learn: "LearnConfig") -> Lessons:
    """Take bad answers out of the splits: bad answers of the train side wait for the lessons, each other one gets its
    reason. Return what the report says of them.
    """
    corrections = database.execute(f"SELECT count(*) FROM rows WHERE lesson = 'correction' AND {USABLE}").fetchone()[0]
    candidates = _candidates(database)
    if not candidates:
        return Lessons(corrections=corrections)
    good = database.execute(f"SELECT n, judged64 FROM rows WHERE {USABLE} AND lesson != 'failure'")
    contradictory = _contradictory(candidates, good)
    fates = dict.fromkeys(contradictory, "contradictory")  # of bad rows; a pair's row is trained whatever comes of it
    left_out: Counter[str] = Counter()
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
    answers_of_owner: Counter[int | None] = Counter()
    holders: list[tuple[int, int]] = []
    for candidate in sorted(unique.values(), key=lambda drawn: (drawn.order, drawn.row)):  # drawn by content
        answers_of_owner[candidate.owner] += candidate.owner is not None
        reason = "" if candidate.trained else "not-learned"
        if answers_of_owner[candidate.owner] > QUOTA_PER_CLIENT:
            reason = "quota"
        if candidate.better is None:
            fates[candidate.row] = reason or ("for-lessons" if "failures" in learn.use else "not-learned")
        elif reason:
            left_out[reason] += 1
        else:
            holders.append((candidate.holder, candidate.row))
    database.executemany("UPDATE rows SET fate = ? WHERE n = ?", [(fate, row) for row, fate in fates.items()])
    database.executemany("UPDATE rows SET pair = ? WHERE n = ?", holders)
    return Lessons(corrections, len(holders), [*fates.values()].count("for-lessons"), left_out)


def _candidates(database: sqlite3.Connection) -> list[Candidate]:
    """Return rows with a bad answer that got this far."""
    candidates = []
    query = "SELECT n, lesson, judged64, worse64, owner64, hash64, fate FROM rows WHERE lesson != 'sft' ORDER BY n"
    for row, lesson, answer, worse, owner, order, own_fate in database.execute(query).fetchall():
        holder, fate = row, own_fate
        while fate in ("duplicate", "near-duplicate"):  # of an equal row that is kept
            holder = database.execute("SELECT stays FROM rows WHERE n = ?", (holder,)).fetchone()[0]
            fate = database.execute("SELECT fate FROM rows WHERE n = ?", (holder,)).fetchone()[0]
        if fate not in SPLITS:
            continue
        if lesson != "failure" and worse is not None:
            candidates.append(Candidate(row, worse, answer, holder, fate == "train", owner, order))
        elif lesson == "failure" and holder == row:
            candidates.append(Candidate(row, answer, None, row, fate == "train", owner, order))
    return candidates


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
    for row, answer in answers if judged_bad else ():
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
        "failures": lessons.failures,
        "worse_left_out": dict(sorted(lessons.left_out.items())),
        "not_used": {name: count for name, count in unused.items() if count},
    }

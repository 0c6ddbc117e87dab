"""The choice of the bad answers that a run learns from: without contradictions and copies, and at most a quota per
user.

It needs all rows of a preparation (prepare/work.py). An answer is identified by a 64-bit hash of the conversation that
ends with it. Each answer that is not chosen gets its reason.
"""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from hivetune.data.prepare.work import USABLE
from hivetune.data.snapshot import SPLITS

QUOTA_PER_CLIENT = 100  # bad rows of one client or user: with more, one person would decide what is unlearned


class Candidate(NamedTuple):
    """A row with a bad answer, `worse`. `better`: the answer that the row itself marks as better; None if the bad one
    is the row's own. `holder`: the row with the better answer, itself or an equal row. `trained`: whether the row is in
    the train split.
    """

    row: int
    worse: int
    better: int | None
    holder: int
    trained: bool
    owner: int | None
    order: int


def judge_rows(database: sqlite3.Connection, use: Sequence[str]) -> dict[str, Any]:
    """Remove bad answers from the splits: those that will be used get the split "bad", each other one gets its reason.
    Return for the report how many answers of each kind in `use` are used, and how many could be used.
    `worse_left_out` counts, by reason, worse answers that are not used; the better answers of their rows are trained
    all the same."""

    def count(condition: str) -> int:
        return int(database.execute(f"SELECT count(*) FROM rows WHERE {condition}").fetchone()[0])

    corrections = count(f"lesson = 'correction' AND {USABLE}")
    candidates = _candidates(database)
    contradictory = _contradictory(database, candidates)
    fates = dict.fromkeys(contradictory, "contradictory")  # of bad rows; a pair's row is trained whatever comes of it
    left_out, of_owner = Counter[str](), Counter[int | None]()
    holders: dict[tuple[int | None, int], tuple[int, int] | None] = {}  # by pair, None if it is not learned
    # Drawn by content. Copies of bad rows are duplicates like any others, and are gone before this.
    for one in sorted(candidates, key=lambda candidate: (candidate.order, candidate.row)):
        pair = one.better, one.worse
        if one.row in contradictory:
            continue
        if one.holder in contradictory or (one.better is not None and pair in holders):
            left_out["contradictory" if one.holder in contradictory else "copy"] += 1
            continue
        of_owner[one.owner] += one.owner is not None
        reason = "" if one.trained else "not-learned"
        if of_owner[one.owner] > QUOTA_PER_CLIENT:
            reason = "quota"
        if one.better is None:
            fates[one.row] = reason or ("for-lessons" if "failures" in use else "not-learned")
            continue
        holders[pair] = None if reason else (one.holder, one.row)
        left_out[reason] += bool(reason)
    learned = [pair for pair in holders.values() if pair is not None]
    database.executemany("UPDATE rows SET fate = ? WHERE n = ?", [(fate, row) for row, fate in fates.items()])
    database.executemany("UPDATE rows SET pair = ? WHERE n = ?", learned)
    unused = {"pairs": 0 if "pairs" in use else count("fate = 'preference-row'"), "failures": count("fate = 'failed'")}
    return {
        "use": list(use),
        "corrections": corrections,
        "pairs": len(learned),
        "failures": [*fates.values()].count("for-lessons"),
        "worse_left_out": {reason: rows for reason, rows in sorted(left_out.items()) if rows},
        "not_used": {name: rows for name, rows in unused.items() if rows},
    }


def _candidates(database: sqlite3.Connection) -> list[Candidate]:
    candidates = []
    query = "SELECT n, lesson, judged64, worse64, owner64, hash64, fate FROM rows WHERE lesson != 'sft' ORDER BY n"
    for row, lesson, answer, worse, owner, order, own_fate in database.execute(query).fetchall():
        holder, fate = row, own_fate
        while fate in ("duplicate", "near-duplicate"):  # of an equal row that is kept
            [holder] = database.execute("SELECT stays FROM rows WHERE n = ?", (holder,)).fetchone()
            [fate] = database.execute("SELECT fate FROM rows WHERE n = ?", (holder,)).fetchone()
        if fate not in SPLITS:
            continue
        if lesson != "failure" and worse is not None:
            candidates.append(Candidate(row, worse, answer, holder, fate == "train", owner, order))
        elif lesson == "failure" and holder == row:
            candidates.append(Candidate(row, answer, None, row, fate == "train", owner, order))
    return candidates


def _contradictory(database: sqlite3.Connection, candidates: Sequence[Candidate]) -> set[int]:
    """Return the rows whose answer is rated good in one row and bad in another: both of them. Pairs contradict each
    other only if they are reversed.
    """
    pairs = {(one.better, one.worse) for one in candidates}
    rows = {one.row for one in candidates if (one.worse, one.better) in pairs}
    judged_bad: dict[int, list[int]] = {}
    for one in candidates:
        if one.better is None:
            judged_bad.setdefault(one.worse, []).append(one.row)
    good = (
        database.execute(f"SELECT n, judged64 FROM rows WHERE {USABLE} AND lesson != 'failure'") if judged_bad else ()
    )
    for row, answer in good:
        if answer in judged_bad:
            rows |= {row, *judged_bad[answer]}
    return rows

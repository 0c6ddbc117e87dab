"""The decisions that need all rows: duplicates, quotas, splits, balance."""

import os
from array import array
from collections.abc import Collection, Iterator, Mapping
from itertools import starmap
from typing import Any

from hivetune.config import DataConfig, LearnConfig
from hivetune.data.checks.lessons import Lesson, unpacked_lesson
from hivetune.data.prepare.lessons import judge_rows
from hivetune.data.prepare.near import Pair, dropped, near_pairs
from hivetune.data.prepare.split import split_rows
from hivetune.data.prepare.work import USABLE, Work
from hivetune.data.reasons import LEAVE_OUT

SYNTHETIC_SHARE = 0.5  # the most that synthetic rows may be of the usable ones
# The most that one of several clients of the gateway may teach, in trained tokens. A client is who holds a token: user
# names are chosen by it, and 300 of them taught three quarters of a model.
CLIENT_SHARE = 1 / 3


def decide_rows(
    work: Work,
    data: DataConfig,
    frozen: Collection[int],
    learn: LearnConfig,
    set_aside: Collection[str],
    leave_out: Mapping[str, str],
) -> dict[str, Any]:
    """Decide the fate of every row; return the parts `groups`, `synthetic` and `learn` of the report.

    `frozen`: hashes of frozen questions (data/frozen.py). `set_aside`: ids of the interactions that a person set aside.
    `leave_out`: id of a row -> reason, for rows that a cycle leaves out.
    """
    _drop_equal(work)
    _drop_beginnings(work)
    alike = _drop_near(work, data.near_duplicates) if data.near_duplicates > 0 else ()
    # Shares count what is left: before it, copies would decide how much others may teach.
    synthetic = _cap_synthetic(work)
    _cap_clients(work)
    groups = split_rows(work, alike, data)
    # The next steps take rows out of their splits and move none to another one, so that a held-out row stays held out
    # whatever a config leaves out.
    _set_frozen_aside(work, frozen)
    lessons = judge_rows(work.database, learn.use)
    if data.balance != "none":
        _balance(work, data.balance)
    if data.max_rows is not None:
        _set_aside_behind(work, "fate = 'train'", data.max_rows, "not-drawn")
    work.database.executemany(
        f"UPDATE rows SET fate = 'set-aside' WHERE {USABLE} AND n IN (SELECT n FROM bodies WHERE interaction_id = ?)",
        ((identity,) for identity in sorted(set_aside)),
    )
    if leave_out:
        named = ((reason, LEAVE_OUT[reason], identity) for identity, reason in leave_out.items())
        work.database.execute("CREATE INDEX rows_id ON rows (id)")
        work.database.executemany(f"UPDATE rows SET fate = ?, hint = ? WHERE id = ? AND {USABLE}", named)
    return {"groups": groups, "synthetic": synthetic, "learn": lessons}


def _drop_equal(work: Work) -> None:
    """Drop exact duplicates. The oldest of equal rows is kept, or the first if they have no times."""
    work.database.execute(
        "UPDATE rows SET fate = 'duplicate', stays = equal.first FROM ("
        " SELECT n, first_value(n) OVER (PARTITION BY hash64 ORDER BY time IS NULL, time, n) AS first"
        " FROM rows WHERE fate = 'train') AS equal WHERE rows.n = equal.n AND equal.n != equal.first"
    )


def _drop_beginnings(work: Work) -> None:
    """Drop rows that are the beginning of a longer row, as in a history that grows turn by turn."""
    if work.one("SELECT 1 FROM earlier LIMIT 1") is None:
        return
    work.database.execute(
        "UPDATE rows SET fate = 'beginning', stays = longer.n FROM ("
        " SELECT earlier.lesson64 AS lesson, min(n) AS n FROM earlier JOIN rows USING (n)"
        " WHERE fate = 'train' GROUP BY 1"
        ") AS longer WHERE rows.lesson64 = longer.lesson AND rows.n != longer.n AND rows.fate = 'train'"
    )


def _drop_near(work: Work, threshold: float) -> Iterator[tuple[int, int]]:
    """Drop near copies with nearly the same answer: the oldest row is kept, or the longest if they have no times.
    Return pairs of rows that ask nearly the same.
    """
    # The rows in the order in which they stay. An array, since a list of a million rows takes 40 MB.
    order = array("I")
    for (row,) in work.all("SELECT n FROM rows WHERE fate = 'train' ORDER BY time IS NULL, time, -length, hash64, n"):
        order.append(row)
    with open(work.sketches, "rb") as sketches, open(work.lessons, "rb") as lessons:

        def lesson(row: int) -> Lesson:
            start = work.lesson_ends[row - 1] if row else 0
            return unpacked_lesson(os.pread(lessons.fileno(), work.lesson_ends[row] - start, start))

        work.database.execute("BEGIN")
        work.database.executemany("INSERT INTO near VALUES (?, ?, ?)", near_pairs(sketches, threshold, order, lesson))
    copies = work.all("SELECT * FROM near WHERE share NOT NULL ORDER BY row, other")
    work.database.executemany(
        "UPDATE rows SET fate = 'near-duplicate', stays = ?, share = ? WHERE n = ?",
        ((order[one.other], one.share, order[one.row]) for one in dropped(starmap(Pair, copies))),
    )
    work.database.execute("COMMIT")
    return ((order[row], order[other]) for row, other in work.all("SELECT row, other FROM near ORDER BY rowid"))


def _set_aside_behind(work: Work, condition: str, allowed: int, reason: str) -> None:
    """Set aside the rows that meet a condition, except the first `allowed` of them."""
    # Drawn by content, so that equal rows in another order give the same snapshot.
    work.database.execute(
        f"UPDATE rows SET fate = ? WHERE n IN (SELECT n FROM rows WHERE {condition}"
        " ORDER BY hash64, n LIMIT -1 OFFSET ?)",
        (reason, allowed),
    )


def _cap_synthetic(work: Work) -> dict[str, int]:
    """Set aside synthetic rows above SYNTHETIC_SHARE of the usable rows, or none if all rows are synthetic. Return the
    report's counts.
    """
    made = "fate = 'train' AND maker IS NOT NULL"
    synthetic = work.one(f"SELECT count(*) FROM rows WHERE {made}")
    others = work.one("SELECT count(*) FROM rows WHERE fate = 'train'") - synthetic
    allowed = int(others * SYNTHETIC_SHARE / (1 - SYNTHETIC_SHARE)) if others else synthetic
    _set_aside_behind(work, made, allowed, "quota")
    return {"rows": min(synthetic, allowed), "others": others}


def _cap_clients(work: Work) -> None:
    """Set aside rows of each client of the gateway above CLIENT_SHARE of the trained tokens, or above an even share
    where two clients taught, drawn by content.
    """
    captured = "fate = 'train' AND source LIKE 'gateway:%' AND owner64 NOT NULL"
    tokens = dict(work.all(f"SELECT owner64, sum(coalesce(trained, 1)) FROM rows WHERE {captured} GROUP BY owner64"))
    total = work.one("SELECT sum(coalesce(trained, 1)) FROM rows WHERE fate = 'train'")
    share = max(CLIENT_SHARE, 1 / max(1, len(tokens)))
    # With one client there is nobody whom it could outvote.
    for client, taught in tokens.items() if len(tokens) > 1 else ():
        work.database.execute(
            "UPDATE rows SET fate = 'quota' FROM (SELECT n, sum(coalesce(trained, 1)) OVER (ORDER BY hash64, n)"
            f" AS taught FROM rows WHERE {captured} AND owner64 = ?) AS drawn WHERE rows.n = drawn.n AND taught > ?",
            (client, (total - taught) * share / (1 - share)),
        )


def _set_frozen_aside(work: Work, frozen: Collection[int]) -> None:
    """Keep frozen questions out of training. A past win itself stays a test row."""
    # SQLite has signed integers.
    signed = [(one - (1 << 64) if one >= 1 << 63 else one,) for one in frozen]
    work.database.execute("CREATE TEMP TABLE frozen (hash INTEGER PRIMARY KEY)")
    work.database.executemany("INSERT INTO frozen VALUES (?)", signed)
    work.database.execute(
        "UPDATE rows SET fate = 'frozen-question' WHERE fate IN ('train', 'validation')"
        " AND (question64 IN (SELECT hash FROM frozen) OR read64 IN (SELECT hash FROM frozen))"
    )


def _balance(work: Work, column: str) -> None:
    """Give each agent or category as many trained rows as the rarest has, drawn by content. Held-out rows stay, since
    they are evidence.
    """
    fewest = work.one(
        f"SELECT count(*) FROM rows WHERE fate = 'train' AND {column} IS NOT NULL GROUP BY {column} ORDER BY 1 LIMIT 1"
    )
    if fewest is None:
        return
    # Rows that name none are limited as the others, and set no limit: one such row left one of each agent to train.
    work.database.execute(
        "UPDATE rows SET fate = 'not-drawn' FROM (SELECT n, row_number() OVER"
        f" (PARTITION BY {column} ORDER BY hash64, n) AS place FROM rows WHERE fate = 'train') AS drawn"
        " WHERE rows.n = drawn.n AND drawn.place > ?",
        (fewest,),
    )

"""The result of one chunk: an SQLite file with a line for each row, and what its usable rows hold."""

import json
import sqlite3
from array import array
from collections.abc import Sequence
from typing import Any

from hivetune.data.checks.lessons import lesson_hashes
from hivetune.data.checks.policies import is_vouched
from hivetune.data.judged.answers import with_worse
from hivetune.data.prepare.examine.stages import ExaminedRow, TooLong, num_chars
from hivetune.data.prepare.split import group_hash, text_hashes, tie_hashes
from hivetune.data.reasons import RowRefused
from hivetune.data.render.renderer import RenderedView
from hivetune.data.rows.read import RawRow, judged_hash
from hivetune.data.snapshot import messages_json

RESULT_SCHEMA = """
PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-2000;
CREATE TABLE rows (
  n INTEGER PRIMARY KEY, source TEXT NOT NULL, layout TEXT, reason TEXT, hint TEXT, changed TEXT,
  id TEXT, hash64 INTEGER,            -- of the content
  read64 INTEGER, question64 INTEGER, session64 INTEGER, user64 INTEGER,  -- what ties the row to others; 0: names none
  texts64 BLOB,                       -- of its long texts (array "Q")
  lesson64 INTEGER, earlier BLOB,     -- its last lesson, and those before it (array "Q"); lessons.py
  length INTEGER,                     -- of its longest view
  num_tokens INTEGER, trained INTEGER,  -- of all its views
  agent TEXT, category TEXT, session TEXT, user TEXT, time REAL, answered_by TEXT,
  maker TEXT,                         -- of a synthetic row
  vouched INTEGER,                    -- 1 where somebody or something called the answer good
  lesson TEXT, judged64 INTEGER, worse64 INTEGER,  -- of the last answer, and of a worse one, with all before them
  client64 INTEGER,                   -- whose token asked for the last answer; 0: nobody's
  notes TEXT                          -- what was changed where, as JSON: [[reason, "GitHub token in the answer"], ...]
);
CREATE TABLE bodies (
  n INTEGER PRIMARY KEY, interaction_id TEXT, messages TEXT, tools TEXT, checker TEXT,
  tokens BLOB, mask BLOB,             -- of all its views, one after the other
  views TEXT,                         -- of rows with several: JSON [[tokens, messages, [answers]], ...]
  worse TEXT, worse_tokens BLOB, worse_mask BLOB,  -- messages, tokens and mask with the worse answer
  raw BLOB
);
"""
ROW_COLUMNS, BODY_COLUMNS = 31, 12
BAD_MARK = 0x5F0BAD5F0BAD5F0B  # a bad answer is no copy of a good one
TableRow = tuple[Any, ...]


def refused_rows(raw: RawRow, error: RowRefused) -> tuple[TableRow, TableRow]:
    """What both tables say of a refused row, without its number."""
    length = error.length if isinstance(error, TooLong) else None
    row = (storable(raw.source), None, error.reason, storable(error.hint), *[None] * 10, length, *[None] * 15)
    return row, (*[None] * (BODY_COLUMNS - 2), raw.payload)


def usable_rows(found: ExaminedRow, *, keep_raw: bool) -> tuple[TableRow, TableRow]:
    """What both tables say of a usable row, without its number."""
    example, rendered = found.example, [view.rendered for view in found.views]
    bad, worse = example.lesson == "failure", with_worse(example)
    lessons = array("Q") if bad else lesson_hashes(example.messages, example.tools)
    hash64 = int(example.id[:16], 16)
    row = (
        storable(example.source),
        found.layout,
        None,
        None,
        ",".join(found.changed) or None,
        example.id,
        _signed(hash64 ^ BAD_MARK if bad else hash64),
        *map(_signed, tie_hashes(example)),
        text_hashes(example.messages).tobytes() or None,
        _signed(lessons[-1]) if lessons else None,
        lessons[:-1].tobytes() if len(lessons) > 1 and "cut" not in found.changed else None,
        max((len(r.tokens) for r in rendered), default=num_chars(example.messages)),
        sum(len(r.tokens) for r in rendered) if rendered else None,
        sum(r.trained.count(1) for r in rendered) if rendered else None,
        example.agent,
        example.category,
        example.session,
        example.user,
        example.time,
        example.answered_by,
        example.maker,
        int(is_vouched(example)),
        example.lesson,
        _signed(judged_hash(example.messages, example.tools)),
        None if worse is None else _signed(judged_hash(worse, example.tools)),
        0 if example.client is None else _signed(group_hash(f"client:{example.client}")),
        _json(found.notes),
    )
    return row, _body(found, keep_raw=keep_raw)


def _body(found: ExaminedRow, *, keep_raw: bool) -> TableRow:
    example, rendered, worse = found.example, [view.rendered for view in found.views], with_worse(found.example)
    return (
        found.raw.interaction_id,
        messages_json(example.messages),
        _json([dict(tool) for tool in example.tools]),
        _json(example.checker),
        b"".join([array("I", r.tokens).tobytes() for r in rendered]) if rendered else None,
        b"".join([r.trained for r in rendered]) if rendered else None,
        _views_json(found.views),
        None if worse is None else messages_json(worse),
        array("I", found.worse.rendered.tokens).tobytes() if found.worse else None,
        found.worse.rendered.trained if found.worse else None,
        found.raw.payload if keep_raw else None,
    )


def _views_json(views: Sequence[RenderedView]) -> str | None:
    """What splits the tokens of a row again; None where there is nothing to split."""
    if len(views) < 2:
        return None
    return json.dumps([[len(view.rendered.tokens), view.num_messages, view.answers] for view in views])


def _json(value: object) -> str | None:
    return json.dumps(value) if value else None


def storable(text: str) -> str:
    """File names and hints may hold bytes that are no UTF-8; SQLite takes none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def insert(database: sqlite3.Connection, rows: list[tuple[Any, ...]], bodies: list[tuple[Any, ...]]) -> None:
    """Both lists, which it empties, as lines of their tables."""
    database.execute("BEGIN")
    database.executemany(f"INSERT INTO rows VALUES ({','.join('?' * ROW_COLUMNS)})", rows)
    database.executemany(f"INSERT INTO bodies VALUES ({','.join('?' * BODY_COLUMNS)})", bodies)
    database.execute("COMMIT")
    rows.clear()
    bodies.clear()

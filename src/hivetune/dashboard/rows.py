"""From a release to its rows and back: rows of a snapshot a page at a time, and whatever a row has gone into."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from hivetune.base.database import open_database
from hivetune.data.snapshot import ROWS_FILE, SPLITS
from hivetune.errors import UsageError

ROWS_A_PAGE = 50
LONGEST_SHOWN = 2000


@dataclass(frozen=True)
class ShownRow:
    """A row of a snapshot. `turns`: role and text, cut for display."""

    source: str
    interaction: str | None
    split: str
    session: str | None
    user: str | None
    agent: str | None
    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RowUse:
    """A snapshot that holds a row, the runs that were made of it, and their releases (NAME@VERSION)."""

    snapshot: str
    row: ShownRow
    runs: tuple[str, ...]
    releases: tuple[str, ...]


def snapshot_rows(digest: str, split: str, number: int) -> tuple[list[ShownRow], int]:
    """The rows of page `number` (from 1), and how many there are. Raises UsageError where the snapshot is gone."""
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}", hint=f"choose one of: {', '.join(SPLITS)}")
    with closing(open_database()) as database:
        found = database.execute("SELECT path FROM snapshots WHERE hash = ?", (digest,)).fetchone()
    if found is None or not (Path(found[0]) / ROWS_FILE).is_file():
        raise UsageError("the snapshot of this release was deleted, so its rows can't be shown")
    with closing(_open(Path(found[0]))) as rows:
        total = rows.execute("SELECT count(*) FROM rows WHERE split = ?", (split,)).fetchone()[0]
        where = f"{_COLUMNS} WHERE split = ? ORDER BY row LIMIT ? OFFSET ?"
        return [_shown(row) for row in rows.execute(where, (split, ROWS_A_PAGE, ROWS_A_PAGE * (number - 1)))], total


def uses_of_row(wanted: str) -> Iterator[RowUse]:
    """Every snapshot with a row of this id, interaction or place (file:line), newest snapshot first."""
    with closing(open_database()) as database:
        known = database.execute("SELECT hash, path FROM snapshots ORDER BY created DESC").fetchall()
        for digest, path in known:
            if not (Path(path) / ROWS_FILE).is_file():
                continue
            with closing(_open(Path(path))) as rows:
                where = f"{_COLUMNS} WHERE id = ?1 OR interaction_id = ?1 OR source = ?1 LIMIT 1"
                found = rows.execute(where, (wanted,)).fetchone()
            if found is not None:
                runs = database.execute("SELECT path FROM runs WHERE snapshot = ? ORDER BY created", (digest,))
                made = database.execute(
                    "SELECT name || '@' || version FROM releases WHERE snapshot = ? ORDER BY name, version", (digest,)
                )
                yield RowUse(digest, _shown(found), tuple(p for (p,) in runs), tuple(label for (label,) in made))


_COLUMNS = "SELECT source, interaction_id, split, session, user, agent, messages FROM rows"
_Row = tuple[str, str | None, str, str | None, str | None, str | None, str]


def _open(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(folder / ROWS_FILE))}?mode=ro&immutable=1", uri=True)


def _shown(row: _Row) -> ShownRow:
    source, interaction, split, session, user, agent, messages = row
    turns = tuple((str(turn["role"]), _said(turn)) for turn in json.loads(messages))
    return ShownRow(source, interaction, split, session, user, agent, turns)


def _said(turn: dict[str, object]) -> str:
    text = str(turn.get("content") or "")
    if turn.get("tool_calls"):
        text += json.dumps(turn["tool_calls"], ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " ..."

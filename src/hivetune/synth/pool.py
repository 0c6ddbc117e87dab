"""All drafts that passed the checks against their source, in a file, to choose from; memory does not grow with them."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hivetune.synth.make.draft import Draft

_SCHEMA = """
PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-8000;
CREATE TABLE drafts (
  category TEXT NOT NULL, kind TEXT NOT NULL, page TEXT NOT NULL,
  key INTEGER NOT NULL,               -- drawn from the seed and the text
  turn INTEGER NOT NULL DEFAULT 0,    -- its place among those of its page and kind: pages take turns
  path TEXT NOT NULL, body TEXT NOT NULL
);
CREATE TABLE kept (n INTEGER PRIMARY KEY, key INTEGER NOT NULL, category TEXT NOT NULL, kind TEXT NOT NULL,
                   text TEXT NOT NULL, row TEXT);
"""
_LARGEST = (1 << 63) - 1


def draw_key(seed: int, draft: Draft) -> int:
    """Return a number for the order of a draft, the same for the same seed and text."""
    said = json.dumps(draft.turns, ensure_ascii=False)
    digest = hashlib.blake2b(f"{seed}\0{said}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) & _LARGEST


class Pool:
    """Drafts by category and kind, and the rows that were kept."""

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._database.execute("BEGIN")

    def add(self, category: str, page: str, path: str, key: int, draft: Draft) -> None:
        body = {name: getattr(draft, name) for name in Draft.__slots__ if name != "kind"}
        self._database.execute(
            "INSERT INTO drafts (category, kind, page, key, path, body) VALUES (?, ?, ?, ?, ?, ?)",
            (category, draft.kind, page, key, path, json.dumps(body, ensure_ascii=False)),
        )

    def settle(self) -> None:
        """Close the pool of drafts: from here on pages take turns, so that a long one does not fill its category."""
        self._database.executescript(
            "CREATE INDEX by_page ON drafts (category, kind, page, key);"
            "UPDATE drafts SET turn = place.turn FROM (SELECT rowid AS id, row_number() OVER"
            " (PARTITION BY category, kind, page ORDER BY key) AS turn FROM drafts) AS place"
            " WHERE drafts.rowid = place.id;"
            "CREATE INDEX by_turn ON drafts (category, kind, turn, key);"
        )  # which commits first
        self._database.execute("BEGIN")

    def kinds(self, category: str) -> dict[str, int]:
        """Return how many drafts of each kind there are."""
        found = self._database.execute(
            "SELECT kind, count(*) FROM drafts WHERE category = ? GROUP BY kind ORDER BY kind", (category,)
        )
        return {str(kind): int(count) for kind, count in found}

    def drafts(self, category: str, kind: str) -> Iterator[tuple[str, str, Draft]]:
        """Yield (page, path, draft) in the order in which they are tried."""
        found = self._database.execute(
            "SELECT page, path, body FROM drafts WHERE category = ? AND kind = ? ORDER BY turn, key",
            (category, kind),
        )
        for page, path, body in found:
            yield page, path, _draft(kind, json.loads(body))

    def keep(self, number: int, key: int, category: str, kind: str, text: str, row: str | None) -> None:
        """Keep a row (`row`: its line), or a text that rows are compared with (None)."""
        self._database.execute("INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?)", (number, key, category, kind, text, row))

    def text(self, number: int) -> str:
        (text,) = self._database.execute("SELECT text FROM kept WHERE n = ?", (number,)).fetchone()
        return str(text)

    def rows(self) -> Iterator[str]:
        """Yield the lines of the file, in an order that the seed draws."""
        for (row,) in self._database.execute("SELECT row FROM kept WHERE row IS NOT NULL ORDER BY key, n"):
            yield row

    def close(self) -> None:
        self._database.close()


def _draft(kind: str, body: Mapping[str, Any]) -> Draft:
    return Draft(
        kind,
        tuple((question, answer) for question, answer in body["turns"]),
        body["section"],
        body["passage"],
        tuple(body["absent"]),
        tuple(body["commands"]),
        tuple(body["python"]),
        body["checker"],
    )

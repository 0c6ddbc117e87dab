"""The rows that are kept: new, not frozen, and written as lines of the file; the same for every maker.

A row is there already when it is equal in its words, or nearly so: Jaccard similarity of the word triples of question
and answer at least 0.8.
"""

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from rensa import RMinHash

from hivetune.base.disk import scratch_folder, write_whole
from hivetune.data.checks.dedupe import Table
from hivetune.data.frozen import frozen_hashes
from hivetune.data.prepare.split import group_hash, question
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.errors import DoesNotFit
from hivetune.records import Message
from hivetune.synth.make.draft import Draft
from hivetune.synth.sources.page import words_in

CHECKS_PASSED = ("length", "language", "options", "paths", "units", "parses", "supported", "duplicates", "frozen")


class KeptRows:
    """Rows in the order in which they came, in the pool's file. No row asks a frozen question."""

    def __init__(self, pool: "Pool", maker: str, seed: int):
        self.pool, self._frozen, self._maker, self._seed = pool, frozen_hashes(), maker, seed
        self._seen = SeenRows(pool.text)
        self._number = 0
        self.num_rows = 0

    def remember(self, against: Iterable[tuple[str, str]]) -> None:
        """Remember rows of the user as (source, text), so that none is made again."""
        for source, text in against:
            _, keys = self._seen.look(text)
            if keys:
                self.pool.keep(self._number, 0, source, "", text, None)
                self._seen.add(self._number, keys)
                self._number += 1

    def keep(self, category: str, page: str, path: str, draft: Draft) -> str | None:
        """Keep a draft; return the reason why it can't be kept, or None."""
        text = "\n".join(part for turn in draft.turns for part in turn)
        reason, keys = self._seen.look(text)
        asked = question([Message("user", draft.turns[0][0])])
        if reason is None and group_hash(f"question:{asked}") in self._frozen:
            reason = "frozen-question"
        if reason is not None:
            return reason
        row = _row(category, page, path, draft, maker=self._maker, seed=self._seed)
        key = draw_key(self._seed, draft)
        self.pool.keep(self._number, key, category, draft.kind, text, json.dumps(row, ensure_ascii=False))
        self._seen.add(self._number, keys)
        self._number += 1
        self.num_rows += 1
        return None


def _row(category: str, page: str, path: str, draft: Draft, *, maker: str, seed: int) -> dict[str, Any]:
    """Return one line of the file.

    `session` is the page, so that a split keeps all questions on one page together.
    """
    messages = []
    for ask, answer in draft.turns:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    row: dict[str, Any] = {"messages": messages, "category": category, "session": f"synth {page}"}
    if draft.checker is not None:
        row["checker"] = dict(draft.checker)
    row["synth"] = {
        "kind": draft.kind,
        "sources": [{"page": page, "section": draft.section, "file": path}],
        "passage_sha256": hashlib.sha256(draft.passage.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        "maker": maker,
        "seed": seed,
        "checks": list(CHECKS_PASSED),
    }
    if draft.absent:
        row["synth"]["absent"] = list(draft.absent)
    return row


NEAR_SHARE = 0.8
_NUM_PERM = 64
_BAND_VALUES = 4
_SEED = 1
# 16 bands of 4: a pair with 0.8 of its triples in common shares one with probability 0.9998.
_MASK = (1 << 64) - 1


class SeenRows:
    """Rows by their words. `text_of(number)` gives the text of a row again; about 300 bytes a row are kept here."""

    def __init__(self, text_of: Callable[[int], str]):
        self._text_of = text_of
        self._exact, self._bands = Table(), Table()

    def look(self, text: str) -> tuple[str | None, list[int]]:
        """Return (reason or None, keys to give to `add`)."""
        words_of_text = words_in(text)
        exact = int.from_bytes(hashlib.blake2b(" ".join(words_of_text).encode(), digest_size=8).digest())
        if self._exact.get(exact) is not None:
            return "duplicate", []
        triples = _triples(words_of_text)
        bands = _band_keys(triples)
        for number in {candidate for key in bands if (candidate := self._bands.get(key)) is not None}:
            other_triples = _triples(words_in(self._text_of(number)))
            if len(triples & other_triples) >= NEAR_SHARE * len(triples | other_triples):
                return "near-duplicate", []
        return None, [exact, *bands]

    def add(self, number: int, keys: list[int]) -> None:
        exact, *bands = keys
        self._exact.put(exact, number)
        for key in bands:
            self._bands.put(key, number)


def _triples(words: list[str]) -> set[tuple[str, ...]]:
    return set(zip(words, words[1:], words[2:], strict=False)) or {tuple(words)}


def _band_keys(triples: set[tuple[str, ...]]) -> list[int]:
    minhash = RMinHash(_NUM_PERM, _SEED)
    minhash.update(sorted(" ".join(triple) for triple in triples))
    values = array("I", minhash.digest()).tobytes()
    size = 4 * _BAND_VALUES
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [(crc32(part) << 32 | crc32(part, 1) ^ band * 0x9E3779B9) & _MASK for band, part in enumerate(parts)]


@contextmanager
def write_rows(out: Path, maker: str, seed: int, against: Iterable[tuple[str, str]]) -> Iterator[KeptRows]:
    """Open a file of rows, and write those that were kept within the block; after an error `out` stays as it was.

    Rows of `against` are not made again. Raises DoesNotFit for a full disk.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(out) as file, scratch_folder() as folder, closing(Pool(folder / "pool.db")) as pool:
            rows = KeptRows(pool, maker, seed)
            rows.remember(against)
            yield rows
            for line in pool.rows():
                file.write(f"{line}\n".encode())
    except OSError as error:
        raise DoesNotFit(f"{out} cannot be written: {error.strerror}", hint="make room, or write elsewhere") from None


class Against:
    """The rows to compare with, read once. `unreadable`: number of rows without a text to compare."""

    def __init__(self, sources: Sequence[str]):
        self._sources = sources
        self.rows = self.unreadable = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (place, question and answer). Raises UsageError for a file that is not there."""
        if not self._sources:
            return
        for raw in rows_of_files(self._sources):
            try:
                example = example_of(raw)
            except RowRefused:
                self.unreadable += 1
                continue
            self.rows += 1
            turns = [message.content for message in example.messages if message.role != "system"]
            yield example.source, "\n".join(turns)


# All drafts that passed the checks against their source, in a file, to choose from: memory does not grow with them.

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
    turns = json.dumps(draft.turns, ensure_ascii=False)
    digest = hashlib.blake2b(f"{seed}\0{turns}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
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
        """Close the pool of drafts: from here on pages take turns, so that a long page does not fill its category."""
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
        rows = self._database.execute(
            "SELECT kind, count(*) FROM drafts WHERE category = ? GROUP BY kind ORDER BY kind", (category,)
        )
        return {str(kind): int(count) for kind, count in rows}

    def drafts(self, category: str, kind: str) -> Iterator[tuple[str, str, Draft]]:
        """Yield (page, path, draft) in the order in which they are tried."""
        rows = self._database.execute(
            "SELECT page, path, body FROM drafts WHERE category = ? AND kind = ? ORDER BY turn, key",
            (category, kind),
        )
        for page, path, body in rows:
            fields: dict[str, Any] = json.loads(body)
            fields["turns"] = tuple((question, answer) for question, answer in fields["turns"])
            for name in ("absent", "commands", "python"):
                fields[name] = tuple(fields[name])
            yield page, path, Draft(kind, **fields)

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

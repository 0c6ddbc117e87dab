"""The interactions in hive.db, each stored once by its content.

A batch is one transaction of rows, refused deliveries, the source's cursor and its counts. A source acknowledges a
batch only after `commit_batch` has returned; what is delivered again is a duplicate.
"""

import contextlib
import hashlib
import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.base.database import transaction
from hivetune.data.columns import extract
from hivetune.data.reasons import RowRefused

# Possessive and bounded: linear in a broken row, whatever its quotes are.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.){1,1000}+"')
_WORD = re.compile(r"[^\s\"'{}\[\],;:=()]{1,1000}+")
_COLUMNS = "id, content_id, source, session, user, agent, category, time, success, feedback, row"
# So much of a refused delivery is kept, to see what it was.
KEPT_RAW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Delivery:
    """One row from a source, or the reason why it was refused, with its `raw` bytes.

    `origin` names the source (file, table or stream), `place` the position in it for people (`file:line`). `id` is set
    for rows of another store and of the gateway, else the id is made from the content. `time` is the time of arrival,
    for rows without a time.
    """

    origin: str
    place: str
    row: Mapping[str, Any] | RowRefused
    id: str | None = None
    time: float | None = None
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of one read: the deliveries, and the key and new position of their source. A batch without deliveries
    only stores the position."""

    source: str
    deliveries: Sequence[Delivery] = ()
    cursor: tuple[str, str] | None = None


@dataclass(slots=True)
class Tally:
    """The numbers of deliveries by result. `duplicates` were already stored."""

    stored: int = 0
    duplicates: int = 0
    refused: int = 0
    forgotten: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def delivered(self) -> int:
        return self.stored + self.duplicates + self.refused + self.forgotten

    def add(self, tally: "Tally") -> None:
        self.stored += tally.stored
        self.duplicates += tally.duplicates
        self.refused += tally.refused
        self.forgotten += tally.forgotten
        self.reasons += tally.reasons


def commit_batch(database: sqlite3.Connection, batch: Batch) -> Tally:
    """Store a batch in one transaction that survives a power cut. Returns the numbers of deliveries.

    A delivery with the id of a stored one (or, without an id, its content) is a duplicate. Forgotten rows are not
    stored. Raise DoesNotFit (disk full) or Busy (another process has locked the database for more than 30 s); nothing
    of the batch is then stored.
    """
    with transaction(database):
        # Inside the transaction: what is forgotten while it waits for the lock stays away.
        forgotten = load_forgotten(database)
        outcomes, reasons = Counter[str](), Counter[str]()
        for delivery in batch.deliveries:
            outcome = _store(database, delivery, forgotten)
            outcomes[outcome] += 1
            if outcome == "refused" and isinstance(delivery.row, RowRefused):
                reasons[delivery.row.reason] += 1
        tally = Tally(**outcomes, reasons=reasons)
        if batch.cursor:
            database.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", batch.cursor)
        if tally.delivered:
            database.execute(
                "INSERT INTO intake VALUES (?, ?, ?, ?, ?) ON CONFLICT (source) DO UPDATE"
                " SET stored = stored + excluded.stored, duplicates = duplicates + excluded.duplicates,"
                " refused = refused + excluded.refused, forgotten = forgotten + excluded.forgotten",
                (storable(batch.source), tally.stored, tally.duplicates, tally.refused, tally.forgotten),
            )
    return tally


def read_cursor(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT position FROM cursors WHERE source = ?", (key,)).fetchone()
    return str(row[0]) if row else None


def read_cursors(database: sqlite3.Connection, prefix: str) -> list[str]:
    """Return the positions of all sources whose keys start with `prefix`."""
    query = "SELECT position FROM cursors WHERE substr(source, 1, ?) = ?"
    return [str(position) for (position,) in database.execute(query, (len(prefix), prefix))]


def iter_refused(database: sqlite3.Connection, *, since: float, limit: int) -> Iterator[tuple[str, str, str]]:
    """Yield (place, reason, hint) of the first `limit` deliveries that were refused after the time `since`."""
    yield from database.execute(
        "SELECT source, reason, hint FROM refused WHERE time >= ? ORDER BY rowid LIMIT ?", (since, limit)
    )


def row_hash(row: Mapping[str, Any]) -> str:
    """Return a hash (32 hex digits) of a row."""
    # It does not depend on the order of its keys: a table's columns have another one than a log's.
    return _hash(json.dumps(row, sort_keys=True, separators=(",", ":")))


def tombstone(kind: str, value: str) -> tuple[str, str]:
    """Return (kind, hash of the value), the key of an entry in `forgotten`."""
    # A hash alone, since the value may be a person's name.
    return kind, _hash(f"{kind}\n{value}")


def load_set_aside(database: sqlite3.Connection) -> frozenset[str]:
    """Return the ids of the stored rows that a person set aside, and of their copies."""
    rows = database.execute("SELECT id FROM interactions JOIN set_aside USING (content_id)")
    return frozenset(identity for (identity,) in rows)


def load_forgotten(database: sqlite3.Connection) -> frozenset[tuple[str, str]]:
    return frozenset(database.execute("SELECT kind, value FROM forgotten"))


def is_forgotten(forgotten: frozenset[tuple[str, str]], sources: Sequence[str] = (), **values: str | None) -> bool:
    """Return whether one of `sources` (for path#table also the file), or of the `values`, given by kind, was
    forgotten."""
    if not forgotten:
        return False
    names = {name for source in sources for name in (source, source.partition("#")[0])}
    stones = [tombstone("source", name) for name in names]
    stones += [tombstone(kind, value) for kind, value in values.items() if value is not None]
    return not forgotten.isdisjoint(stones)


def names_in(raw: bytes) -> frozenset[str]:
    """Return every string and word of a broken row, since any of them may be the name of its user or session."""
    text = raw[: 2 * KEPT_RAW_BYTES].decode("utf-8", "replace")
    names = set(_WORD.findall(text))
    for quoted in _QUOTED.findall(text):
        names.add(quoted[1:-1])
        with contextlib.suppress(ValueError):  # not valid JSON
            names.add(json.loads(quoted))
    return frozenset(names)


def raw_hash(raw: bytes) -> str:
    """Return a hash (32 hex digits) of the stored bytes of a broken row."""
    return hashlib.blake2b(raw[:KEPT_RAW_BYTES], digest_size=16).hexdigest()


def is_forgotten_raw(forgotten: frozenset[tuple[str, str]], sources: Sequence[str], raw: bytes) -> bool:
    """Return whether a broken row was forgotten."""
    # Any of its words may be a forgotten user or session.
    if not forgotten:
        return False
    if is_forgotten(forgotten, sources, raw=raw_hash(raw)):
        return True
    kinds = {kind for kind, _ in forgotten} & {"user", "session"}
    return any(tombstone(kind, name) in forgotten for kind in kinds for name in names_in(raw))


def _store(database: sqlite3.Connection, delivery: Delivery, forgotten: frozenset[tuple[str, str]]) -> str:
    """Store a delivery; return the name of the `Tally` field that counts it."""
    row, names, place = delivery.row, (delivery.origin, delivery.place), storable(delivery.place)
    if isinstance(row, RowRefused):
        if is_forgotten_raw(forgotten, names, delivery.raw):
            return "forgotten"
        # By its bytes, so that it is counted once; without any, by its place.
        seen = delivery.raw or delivery.place.encode("utf-8", "surrogateescape")
        identity = hashlib.blake2b(seen, digest_size=16).hexdigest()
        values: tuple[object, ...] = (identity, place, row.reason, row.hint, delivery.raw[:KEPT_RAW_BYTES], time.time())
        query, outcome = "INSERT OR IGNORE INTO refused VALUES (?, ?, ?, ?, ?, ?)", "refused"
    else:
        fields, content = extract(row), row_hash(row)
        identity = delivery.id or content
        who = {"session": fields.session, "user": fields.user, "row": identity, "content": content}
        if is_forgotten(forgotten, names, **who):
            return "forgotten"
        # A row's own time counts: a stream that was copied has new times of arrival.
        moment = delivery.time if fields.time is None else fields.time
        values = (identity, content, place, fields.session, fields.user, fields.agent, fields.category, moment)
        values += (fields.success, fields.feedback, dump_row(row))
        marks = ", ".join("?" * len(values))
        query, outcome = f"INSERT OR IGNORE INTO interactions ({_COLUMNS}) VALUES ({marks})", "stored"
    return outcome if database.execute(query, values).rowcount == 1 else "duplicates"


def change_row(database: sqlite3.Connection, identity: str, row: Mapping[str, Any], feedback: float | None) -> None:
    """Replace row and feedback of an interaction inside the caller's transaction."""
    change = "UPDATE interactions SET row = ?, feedback = ? WHERE id = ?"
    database.execute(change, (dump_row(row), feedback, identity))


def dump_row(row: Mapping[str, Any]) -> str:
    """Return a row for the column `row`: JSON that is valid UTF-8, with null for an infinity."""
    # An infinity comes from 1e999 and from SQLite, and JSON has none.
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        row = json.loads(json.dumps(row), parse_constant=lambda _name: None)
        text = json.dumps(row, ensure_ascii=False)
    return text if storable(text) is text else json.dumps(row)  # escaped, a lone surrogate stays as it was


def storable(text: str) -> str:
    """Return `text` with lone surrogates escaped; the same object where there are none."""
    # SQLite does not accept them, and names of files that are not UTF-8 hold them.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

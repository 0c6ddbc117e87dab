"""Answers and feedback into the store: redacted at the door, durable before they are counted, each exactly once.

One thread writes, so that no answer waits for a disk. What it has not committed yet is kept while the disk is full or
another process holds the database, up to `MOST_WAITING`; above, answers are not captured, and are counted as that.
"""

import contextlib
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hivetune.base.database import open_database, transaction
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, redact_value
from hivetune.data.intake.interactions import Batch, Delivery, commit_batch, dump_row
from hivetune.errors import HivetuneError, NotThere

SOURCE = "gateway"
BATCH = 200
GATHER_S = 0.2
_RETRY_S = 1.0
MOST_WAITING = 10_000

# What redaction or the database raise for a value that no row can hold.
_UNSTORABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, sqlite3.DataError)

Rating = Literal["up", "down"]


@dataclass(frozen=True)
class Captured:
    """One exchange. `label`: the release that answered; `answer`: its message, as the API gave it; `keys`: what the
    request declared of itself, of which agent and category are kept, so that the row belongs to its domain."""

    id: str
    label: str
    messages: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] = ()
    session: str | None = None
    user: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Feedback:
    """What a person said of an answer. `correction`: what it should have been."""

    id: str
    label: str
    client: str
    rating: Rating | None = None
    correction: str | None = None
    reason: str | None = None


class Capture:
    """The writing thread and what waits for it. `captured`: exchanges that are durable; `left_out`: what never will be;
    `problem`: why what waits can't be written now."""

    def __init__(self, retry_s: float = _RETRY_S) -> None:
        self.captured = self.left_out = 0
        self.problem = ""
        self._in_hand = 0
        self._retry_s = retry_s
        self._ending = threading.Event()
        self._queue: queue.Queue[Captured | Feedback] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._queue.qsize() + self._in_hand

    def put(self, entry: Captured | Feedback) -> bool:
        """Whether it was taken. Never waits."""
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.left_out += 1
            return False
        return True

    def close(self) -> None:
        """Write what waits, then end. What can't be written within a last try is counted as left out."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        entries: list[Captured | Feedback] = []
        database: sqlite3.Connection | None = None
        while entries or not self._ending.is_set() or not self._queue.empty():
            entries = entries or self._gather()
            self._in_hand = len(entries)
            try:
                database = database or open_database()
                self._store(database, entries)
                self.problem = ""
            except (HivetuneError, sqlite3.Error, OSError) as error:  # a full disk, a busy database: it stays in hand
                self.problem = str(error)
                if self._ending.wait(self._retry_s):
                    self.left_out += len(entries) + self._queue.qsize()
                    break
            self._in_hand = len(entries)
        if database is not None:
            database.close()

    def _store(self, database: sqlite3.Connection, entries: list[Captured | Feedback]) -> None:
        """Takes from `entries` what is durable, so that nothing is counted twice when the rest is tried again. What
        can't be a row at all is left out alone, and holds up nothing behind it."""
        if not any(isinstance(entry, Feedback) for entry in entries):
            with contextlib.suppress(*_UNSTORABLE):
                self.captured += store_entries(database, entries)
                entries.clear()
        while entries:
            try:
                self.captured += store_entries(database, entries[:1])
            except _UNSTORABLE:
                self.left_out += 1
            del entries[0]

    def _gather(self) -> list[Captured | Feedback]:
        """What came within `GATHER_S` after the first; empty when nothing did for as long."""
        entries: list[Captured | Feedback] = []
        deadline = time.monotonic() + GATHER_S
        while len(entries) < BATCH and (left := deadline - time.monotonic()) > 0:
            try:
                entries.append(self._queue.get(timeout=left))
            except queue.Empty:
                break
        return entries


def store_entries(database: sqlite3.Connection, entries: Sequence[Captured | Feedback]) -> int:
    """Commit entries in their order; how many exchanges are new. Raises DoesNotFit, Busy."""
    exchanges = [entry for entry in entries if isinstance(entry, Captured)]
    tally = commit_batch(database, Batch(SOURCE, [_delivery(entry) for entry in exchanges]))
    for entry in entries:
        if isinstance(entry, Feedback):
            _join(database, entry)
    return tally.stored


def label_of(database: sqlite3.Connection, answer: str) -> str:
    """The release that gave a captured answer. Raises UsageError for an id that was not captured."""
    row = database.execute("SELECT source FROM interactions WHERE id = ?", (answer,)).fetchone()
    if row is None or not str(row[0]).startswith(f"{SOURCE}:"):
        raise NotThere(f"no captured answer has the id {answer!r}", hint="the id is in each answer, as `id`")
    return str(row[0]).removeprefix(f"{SOURCE}:")


def _delivery(entry: Captured) -> Delivery:
    row: dict[str, Any] = {
        "id": entry.id,
        "messages": [*entry.messages, entry.answer],
        "answered_by": entry.label,  # not a person's words: docs/serve.md says when it is learned from
        "timestamp": round(entry.time, 3),
        "latency_s": round(entry.seconds, 3),
    }
    if entry.tools:
        row["tools"] = list(entry.tools)
    row |= {kind: entry.keys[kind] for kind in ("agent", "category") if kind in entry.keys}
    clean: Any = redact_value(redact_value(row, SECRETS), PERSONAL)
    clean |= {"id": entry.id, "timestamp": row["timestamp"]}
    for key, value in (("session_id", entry.session), ("user_id", entry.user)):
        if value is not None:
            clean[key] = value  # so that a user or a session can be forgotten
    place = f"{SOURCE}:{entry.label}"
    return Delivery(place, place, entry.id, clean, id=entry.id, time=entry.time)


def _join(database: sqlite3.Connection, entry: Feedback) -> None:
    """The feedback beside its answer and in it. A correction takes the place of the answer, now `rejected_answer`. Of
    an answer that is not in the store (it was not to be captured, or was forgotten) nothing is kept."""
    correction, reason = _clean(entry.correction), _clean(entry.reason)
    with transaction(database):
        found = database.execute("SELECT row FROM interactions WHERE id = ?", (entry.id,)).fetchone()
        if found is None:
            return
        database.execute(
            "INSERT INTO feedback VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (answer) DO UPDATE SET"
            " rating = coalesce(excluded.rating, rating), correction = coalesce(excluded.correction, correction),"
            " reason = coalesce(excluded.reason, reason), client = excluded.client, time = excluded.time",
            (entry.id, entry.label, entry.rating, correction, reason, entry.client, time.time()),
        )
        row = json.loads(found[0])
        if correction is not None:
            row.setdefault("rejected_answer", row["messages"][-1])
            row["messages"][-1] = {"role": "assistant", "content": correction}
            row.pop("answered_by", None)  # a person's words now
        if "rejected_answer" in row:  # a rating is of the answer that was given, whenever it comes
            row["feedback"] = 1
        elif entry.rating is not None:
            row["feedback"] = 1 if entry.rating == "up" else -1
        database.execute(
            "UPDATE interactions SET row = ?, feedback = ? WHERE id = ?",
            (dump_row(row), row.get("feedback"), entry.id),
        )


def _clean(text: str | None) -> str | None:
    """Redacted, and without what UTF-8 can't say."""
    if text is None:
        return None
    clean: Any = redact_value(redact_value(text, SECRETS), PERSONAL)
    return str(clean).encode("utf-8", "replace").decode()

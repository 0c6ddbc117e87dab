"""Answers and feedback into the store: redacted at the door, durable before they are counted, each exactly once.

One thread writes, several answers in one transaction. The last byte of an answer leaves when it is durable, or after
`KEEP_WAIT_S`: then the answer says so. What it has not committed yet is kept while the disk is full or
another process holds the database, up to `MAX_WAITING`; above, answers are not captured, and are counted as that.
"""

import asyncio
import contextlib
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from hivetune.base.database import open_database, transaction
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, redact_value, redacted_name
from hivetune.data.intake.interactions import Batch, Delivery, change_row, commit_batch
from hivetune.errors import HivetuneError, NotThere

SOURCE = "gateway"
BATCH = 200
LOOK_S = 0.2
KEEP_WAIT_S = 2.0  # an answer waits no longer for the disk
_RETRY_S = 1.0
MAX_WAITING = 10_000

# What redaction or the database raise for a value that no row can hold.
_UNSTORABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, sqlite3.DataError)

Rating = Literal["up", "down"]


@dataclass(frozen=True)
class Captured:
    """One exchange. `label`: the release that answered; `answer`: its message, as the API gave it; `client`: whose
    token asked, and who alone may rate it; `keys`: what the request declared of itself, of which agent and category are
    kept, so that the row belongs to its domain."""

    id: str
    label: str
    messages: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] = ()
    session: str | None = None
    user: str | None = None
    client: str = ""
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


@dataclass
class _Waiting:
    """An entry and who waits for it: True when it is durable, False when it never will be."""

    entry: Captured | Feedback
    durable: "Future[bool]" = field(default_factory=Future)


class Capture:
    """The writing thread and what waits for it. `captured`: exchanges that are durable; `left_out`: what never will be;
    `problem`: why what waits can't be written now."""

    def __init__(self, retry_s: float = _RETRY_S) -> None:
        self.captured = self.left_out = 0
        self.problem = ""
        self._in_hand = 0
        self._retry_s = retry_s
        self._ending = threading.Event()
        self._queue: queue.Queue[_Waiting] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._queue.qsize() + self._in_hand

    def put(self, entry: Captured | Feedback) -> bool:
        """Whether it was taken. Never waits."""
        return self._put(_Waiting(entry))

    async def keep(self, entry: Captured) -> bool:
        """Whether it is durable: waits for that, but not while nothing can be written, nor beyond `KEEP_WAIT_S`."""
        waiting = _Waiting(entry)
        if not self._put(waiting) or self.problem:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_WAIT_S):
                return await asyncio.shield(asyncio.wrap_future(waiting.durable))
        return False

    def _put(self, waiting: _Waiting) -> bool:
        try:
            self._queue.put_nowait(waiting)
        except queue.Full:
            self.left_out += 1
            return False
        return True

    def close(self) -> None:
        """Write what waits, then end. What can't be written within a last try is counted as left out."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        entries: list[_Waiting] = []
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

    def _store(self, database: sqlite3.Connection, entries: list[_Waiting]) -> None:
        """Takes from `entries` what is durable, so that nothing is counted twice when the rest is tried again. What
        can't be a row at all is left out alone, and holds up nothing behind it."""
        if not any(isinstance(waiting.entry, Feedback) for waiting in entries):
            with contextlib.suppress(*_UNSTORABLE):
                self.captured += store_entries(database, [waiting.entry for waiting in entries])
                for waiting in entries:
                    waiting.durable.set_result(True)
                entries.clear()
        while entries:
            try:
                self.captured += store_entries(database, [entries[0].entry])
                entries[0].durable.set_result(True)
            except _UNSTORABLE:
                self.left_out += 1
                entries[0].durable.set_result(False)
            del entries[0]

    def _gather(self) -> list[_Waiting]:
        """What waits now; the first is waited for up to `LOOK_S`. What comes during a commit goes into the next one."""
        entries: list[_Waiting] = []
        with contextlib.suppress(queue.Empty):
            entries.append(self._queue.get(timeout=LOOK_S))
            while len(entries) < BATCH:
                entries.append(self._queue.get_nowait())
        return entries


def store_entries(database: sqlite3.Connection, entries: Sequence[Captured | Feedback]) -> int:
    """Commit entries in their order; how many exchanges are new. Raises DoesNotFit, Busy."""
    exchanges = [entry for entry in entries if isinstance(entry, Captured)]
    tally = commit_batch(database, Batch(SOURCE, [_delivery(entry) for entry in exchanges]))
    for entry in entries:
        if isinstance(entry, Feedback):
            _join(database, entry)
    return tally.stored


def unknown_answer(answer: str) -> NotThere:
    """The same of an answer that another client was given and of one that nobody was."""
    what = f"no captured answer of this client has the id {answer!r}"
    return NotThere(what, hint="the id is in each answer, as `id`")


def label_of(database: sqlite3.Connection, answer: str, client: str) -> str:
    """The release that gave a captured answer. Raises NotThere for an id that was not captured, or that another client
    was given: which of the two is not told."""
    row = database.execute(
        "SELECT source, json_extract(row, '$.client') FROM interactions WHERE id = ?", (answer,)
    ).fetchone()
    if row is None or not str(row[0]).startswith(f"{SOURCE}:") or row[1] != client:
        raise unknown_answer(answer)
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
            clean[key] = redacted_name(value)  # by which a user or a session can be forgotten
    if entry.client:
        clean["client"] = entry.client
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
        change_row(database, entry.id, row, row.get("feedback"))


def _clean(text: str | None) -> str | None:
    """Redacted, and without what UTF-8 can't say."""
    if text is None:
        return None
    clean: Any = redact_value(redact_value(text, SECRETS), PERSONAL)
    return str(clean).encode("utf-8", "replace").decode()

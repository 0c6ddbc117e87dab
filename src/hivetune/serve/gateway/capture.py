"""The capture of answers and feedback: redacted before they are stored, durable before they are counted, each stored
once.

One thread writes, several answers in one transaction. The last byte of an answer is sent when the answer is durable, or
after `KEEP_WAIT_S`; then the answer reports it. While the disk is full or another process holds the database, up to
`MAX_WAITING` entries wait. Beyond that, answers are not captured, and are counted as left out.
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
from hivetune.errors import HivetuneError, NotThere, UsageError

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
class CapturedAnswer:
    """One request with its answer. `label`: the release that answered. `answer`: its message as the API gave it.
    `finish`: why it ended, by the API. `client`: the owner of the token, who alone may rate it. `keys`: what the
    request declared; agent and category are stored, so that the row belongs to its domain."""

    id: str
    label: str
    messages: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any]
    finish: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    session: str | None = None
    user: str | None = None
    client: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Feedback:
    """A person's opinion of an answer. `correction`: the right answer."""

    id: str
    label: str
    client: str
    rating: Rating | None = None
    correction: str | None = None
    reason: str | None = None


# An entry that waits to be stored. Its future becomes True when it is, False when it never will be.
_Waiting = tuple[CapturedAnswer | Feedback, "Future[bool]"]


class Capture:
    """The writing thread and its queue. `captured`: durable answers. `left_out`: entries that will never be stored.
    `problem`: why the queue can't be written now."""

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

    def put(self, entry: CapturedAnswer | Feedback) -> "Future[bool] | None":
        """Queue an entry; return whether it is durable, later, or None where there was no room. Never waits."""
        durable: Future[bool] = Future()
        try:
            self._queue.put_nowait((entry, durable))
        except queue.Full:
            self.left_out += 1
            return None
        return durable

    async def keep(self, entry: CapturedAnswer) -> bool:
        """Return whether the answer is durable. Waits at most `KEEP_WAIT_S`, and not while nothing can be written."""
        durable = self.put(entry)
        if durable is None or self.problem:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_WAIT_S):
                return await asyncio.shield(asyncio.wrap_future(durable))
        return False

    def close(self) -> None:
        """Write the queue again, then end. The rest is counted as left out."""
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
        """Store `entries` and remove them one by one, so that a retry counts nothing twice. An entry that can't become
        a row is left out alone and holds up nothing behind it."""
        if not any(isinstance(entry, Feedback) for entry, _ in entries):
            with contextlib.suppress(*_UNSTORABLE):
                self.captured += store_entries(database, [entry for entry, _ in entries])
                for _, durable in entries:
                    durable.set_result(True)
                entries.clear()
        while entries:
            entry, durable = entries[0]
            try:
                self.captured += store_entries(database, [entry])
                durable.set_result(True)
            except _UNSTORABLE:
                self.left_out += 1
                durable.set_result(False)
            del entries[0]

    def _gather(self) -> list[_Waiting]:
        """Return the queued entries, waiting up to `LOOK_S` for the first. What arrives during a commit goes into the
        next one."""
        entries: list[_Waiting] = []
        with contextlib.suppress(queue.Empty):
            entries.append(self._queue.get(timeout=LOOK_S))
            while len(entries) < BATCH:
                entries.append(self._queue.get_nowait())
        return entries


def store_entries(database: sqlite3.Connection, entries: Sequence[CapturedAnswer | Feedback]) -> int:
    """Commit entries in order and return how many answers are new. Raises DoesNotFit, Busy."""
    exchanges = [entry for entry in entries if isinstance(entry, CapturedAnswer)]
    tally = commit_batch(database, Batch(SOURCE, [_delivery(entry) for entry in exchanges]))
    for entry in entries:
        if isinstance(entry, Feedback):
            _join(database, entry)
    return tally.stored


def unknown_answer(answer: str) -> NotThere:
    """Return the same error for an unknown id and for the id of another client's answer."""
    message = f"no captured answer of this client has the id {answer!r}"
    return NotThere(message, hint="the id is in each answer, as `id`")


def label_of(database: sqlite3.Connection, answer: str, client: str) -> str:
    """Return the release that gave a captured answer. Raises NotThere for an unknown id or another client's answer."""
    row = database.execute(
        "SELECT source, json_extract(row, '$.client') FROM interactions WHERE id = ?", (answer,)
    ).fetchone()
    if row is None or not str(row[0]).startswith(f"{SOURCE}:") or row[1] != client:
        raise unknown_answer(answer)
    return str(row[0]).removeprefix(f"{SOURCE}:")


def _delivery(entry: CapturedAnswer) -> Delivery:
    row: dict[str, Any] = {
        "id": entry.id,
        "messages": [*entry.messages, entry.answer],
        "answered_by": entry.label,  # not a person's words: docs/serve.md says when it is learned from
        "timestamp": round(entry.time, 3),
        "latency_s": round(entry.seconds, 3),
    }
    if entry.finish == "length":
        row["finish_reason"] = entry.finish  # its end is never learned as one, whoever approves it
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
    source = f"{SOURCE}:{entry.label}"
    return Delivery(source, source, clean, id=entry.id, time=entry.time)


def _join(database: sqlite3.Connection, entry: Feedback) -> None:
    """Store feedback beside its answer and in it. A correction replaces the answer, which becomes `rejected_answer`.
    Nothing is kept for an answer that is not in the store, because it was not captured or was forgotten."""
    correction, reason = _clean(entry.correction), _clean(entry.reason)
    with transaction(database):
        stored = database.execute("SELECT row FROM interactions WHERE id = ?", (entry.id,)).fetchone()
        if stored is None:
            return
        database.execute(
            "INSERT INTO feedback VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (answer) DO UPDATE SET"
            " rating = coalesce(excluded.rating, rating), correction = coalesce(excluded.correction, correction),"
            " reason = coalesce(excluded.reason, reason), client = excluded.client, time = excluded.time",
            (entry.id, entry.label, entry.rating, correction, reason, entry.client, time.time()),
        )
        row = json.loads(stored[0])
        if correction is not None:
            row = correct_row(row, correction)
        if entry.rating is not None:
            row = rate_row(row, entry.rating)
        change_row(database, entry.id, row, row.get("feedback"))


def rate_row(row: Mapping[str, Any], rating: Rating) -> dict[str, Any]:
    """Return a stored row with a rating. It is of the answer that was given: a corrected row stays good."""
    return {**row, "feedback": 1 if rating == "up" or "rejected_answer" in row else -1}


def correct_row(row: Mapping[str, Any], correction: str) -> dict[str, Any]:
    """Return a stored row with the right answer in place of the last one, which becomes `rejected_answer`. Raises
    UsageError for a row that does not end with an answer, and for an empty correction."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or messages[-1].get("role", "assistant") != "assistant":
        raise UsageError("this row does not end with an answer, so there is nothing to correct")
    if not correction.strip():
        raise UsageError("an empty text corrects nothing")
    clean = _clean(correction) or ""
    kept = {key: value for key, value in row.items() if key not in ("answered_by", "finish_reason")}  # a person's now
    kept.setdefault("rejected_answer", messages[-1])
    return {**kept, "messages": [*messages[:-1], {"role": "assistant", "content": clean}], "feedback": 1}


def _clean(text: str | None) -> str | None:
    """Return the text redacted, without characters that UTF-8 can't encode."""
    if text is None:
        return None
    clean: Any = redact_value(redact_value(text, SECRETS), PERSONAL)
    return str(clean).encode("utf-8", "replace").decode()

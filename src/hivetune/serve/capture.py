"""The capture of answers and feedback: redacted before they are stored, durable before they are counted, stored once.

One thread writes them in order. An answer that can't be stored is left out and counted, and its client is told.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from hivetune.base.database import open_database, transaction
from hivetune.data.checks.redact import redact_everything, redacted_name
from hivetune.data.intake.interactions import Batch, Delivery, change_row, commit_batch
from hivetune.data.raw import GATEWAY
from hivetune.errors import HivetuneError, MachineNotFit, NotThere, UsageError

# The last byte of an answer waits so long for the disk, or for another process that holds the database: around a kill
# of the gateway, 26 of 442 answers were once given and never captured.
KEEP_WAIT_S = 2.0

# What redaction or the database raise for a value that no row can hold.
_UNSTORABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, sqlite3.DataError)

Rating = Literal["up", "down"]


@dataclass(frozen=True)
class CapturedAnswer:
    """One request with its answer."""

    id: str
    label: str  # the release that answered
    messages: Sequence[Mapping[str, Any]]
    # Its message as the API gave it, and why it ended.
    answer: Mapping[str, Any]
    finish: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    session: str | None = None
    user: str | None = None
    # The owner of the token, who alone may rate it.
    client: str = ""
    # What the request declared.
    keys: Mapping[str, str] = field(default_factory=dict)
    # The mean log-probability of the answer's tokens, None where it is not known.
    logprob: float | None = None
    seconds: float = 0.0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Feedback:
    """A client's rating of an answer that it received. `correction`: the right answer, None without one."""

    id: str
    client: str
    rating: Rating | None = None
    correction: str | None = None
    reason: str | None = None


class Capture:
    """The thread that stores answers. `captured`: number of stored answers. `left_out`: number of entries that could
    not be stored. `problem`: the reason of the last failure, "" if there was none."""

    def __init__(self) -> None:
        self.captured = self.left_out = 0
        self.problem = ""
        # One thread: SQLite has one writer, and feedback stays behind the answer that it is about.
        self._thread = ThreadPoolExecutor(1, "capture")
        self._database: sqlite3.Connection | None = None

    def put(self, entry: CapturedAnswer | Feedback) -> "Future[str]":
        """Queue an entry for the thread, without waiting. The result of the future is the label of its release."""
        return self._thread.submit(self._store, entry)

    async def keep(self, entry: CapturedAnswer | Feedback) -> str:
        """Store an entry and return the label of its release. Raises NotThere or UsageError for feedback that matches
        no answer, MachineNotFit if it was not stored within `KEEP_WAIT_S`.
        """
        stored = self.put(entry)
        try:
            async with asyncio.timeout(KEEP_WAIT_S):
                # Shielded: the answer of a client that goes away now is stored like any other.
                return await asyncio.shield(asyncio.wrap_future(stored))
        except TimeoutError:
            # No queue: what waits for a disk is lost with the process, after its client was told "later".
            self.left_out += stored.cancel()  # else it is being written, and counts when it is
            raise MachineNotFit("the entry can't be stored now", hint="try again later; see /health") from None

    def close(self) -> None:
        """Write the queued entries, then end the thread."""
        self._thread.submit(self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _store(self, entry: CapturedAnswer | Feedback) -> str:
        try:
            self._database = self._database or open_database()
            if isinstance(entry, Feedback):
                label = store_feedback(self._database, entry)
            else:
                label = entry.label
                self.captured += store_answer(self._database, entry)
            self.problem = ""
            return label
        except (NotThere, UsageError):
            raise
        except (*_UNSTORABLE, HivetuneError, sqlite3.Error, OSError) as error:
            self.left_out += 1
            # A full disk, a busy database; or a value that no row holds, which is nothing that /health tells.
            self.problem = "" if isinstance(error, _UNSTORABLE) else str(error)
            raise MachineNotFit(f"the entry can't be stored now: {error}", hint="try again later") from None


def label_of(database: sqlite3.Connection, answer: str, client: str) -> str:
    """Return the label of the release that gave a captured answer. Raises the same NotThere for an unknown id and for
    the id of another client's answer.
    """
    row = database.execute(
        "SELECT source, coalesce(json_extract(row, '$.client'), '') FROM interactions WHERE id = ?", (answer,)
    ).fetchone()
    if row is None or not str(row[0]).startswith(f"{GATEWAY}:") or row[1] != client:
        message = f"no captured answer of this client has the id {answer!r}"
        raise NotThere(message, hint="the id is in each answer, as `id`")
    return str(row[0]).removeprefix(f"{GATEWAY}:")


def messages_of(answer: str, client: str) -> list[dict[str, Any]]:
    """Return the conversation up to a captured answer, redacted as it was stored. Raises NotThere, as `label_of`."""
    with closing(open_database()) as database:
        label_of(database, answer, client)
        (row,) = database.execute("SELECT row FROM interactions WHERE id = ?", (answer,)).fetchone()
    return [*json.loads(row)["messages"]]


def store_answer(database: sqlite3.Connection, entry: CapturedAnswer) -> int:
    """Commit an answer as a row. Returns 1 if it is new, 0 if it was stored before. Raises DoesNotFit, Busy."""
    # `answered_by`: these are not a person's words, so they are learned only where docs/serve.md says.
    row: dict[str, Any] = {"messages": [*entry.messages, entry.answer], "answered_by": entry.label}
    row["latency_s"] = round(entry.seconds, 3)
    # An end that a limit made is never learned as one, whoever approves it.
    row |= {"finish_reason": "length"} if entry.finish == "length" else {}
    row |= {"tools": list(entry.tools)} if entry.tools else {}
    # By these the row belongs to its domain.
    row |= {kind: entry.keys[kind] for kind in ("agent", "category") if kind in entry.keys}
    clean: Any = _redacted(row)
    clean |= {"id": entry.id, "timestamp": round(entry.time, 3)}
    # By it a review finds the answers that the model was least certain of.
    clean |= {} if entry.logprob is None else {"logprob": round(entry.logprob, 4)}
    # By these names a user or a session can be forgotten.
    names = {"session_id": entry.session, "user_id": entry.user}
    clean |= {key: redacted_name(value) for key, value in names.items() if value is not None}
    clean |= {"client": entry.client} if entry.client else {}
    source = f"{GATEWAY}:{entry.label}"
    delivery = Delivery(source, source, clean, id=entry.id, time=entry.time)
    return commit_batch(database, Batch(GATEWAY, [delivery])).stored


def store_feedback(database: sqlite3.Connection, entry: Feedback) -> str:
    """Store feedback in the row of its answer; return the label of the release that answered. A correction replaces the
    answer, which becomes `rejected_answer`. Raises NotThere, UsageError.
    """
    correction, reason = (None if text is None else _clean(text) for text in (entry.correction, entry.reason))
    with transaction(database):
        label = label_of(database, entry.id, entry.client)
        (text,) = database.execute("SELECT row FROM interactions WHERE id = ?", (entry.id,)).fetchone()
        database.execute(
            "INSERT INTO feedback VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (answer) DO UPDATE SET"
            " rating = coalesce(excluded.rating, rating), correction = coalesce(excluded.correction, correction),"
            " reason = coalesce(excluded.reason, reason), client = excluded.client, time = excluded.time",
            (entry.id, label, entry.rating, correction, reason, entry.client, time.time()),
        )
        row = json.loads(text)
        if correction is not None:
            row = correct_row(row, correction)
        if entry.rating is not None:
            row = rate_row(row, entry.rating)
        change_row(database, entry.id, row, row.get("feedback"))
    return label


def rate_row(row: Mapping[str, Any], rating: Rating) -> dict[str, Any]:
    """Return a copy of a stored row with this rating."""
    # It is of the answer that was given: a corrected row stays good.
    return {**row, "feedback": 1 if rating == "up" or "rejected_answer" in row else -1}


_OF_THE_ANSWER = ("answered_by", "finish_reason", "logprob")  # which a correction has not


def correct_row(row: Mapping[str, Any], correction: str) -> dict[str, Any]:
    """Return a stored row whose last answer is replaced by the correction and kept as `rejected_answer`. Raises
    UsageError for a row that does not end with an answer, and for an empty correction.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or messages[-1].get("role", "assistant") != "assistant":
        raise UsageError("this row does not end with an answer, so there is nothing to correct")
    if not correction.strip():
        raise UsageError("a correction must not be empty")
    kept = {key: value for key, value in row.items() if key not in _OF_THE_ANSWER}
    kept.setdefault("rejected_answer", messages[-1])
    answer = {"role": "assistant", "content": _clean(correction)}
    return {**kept, "messages": [*messages[:-1], answer], "feedback": 1}


def _clean(text: str) -> str:
    """Return the text redacted, without characters that UTF-8 can't encode."""
    return str(_redacted(text)).encode("utf-8", "replace").decode()


def _redacted(value: Any) -> Any:
    return redact_everything(value)

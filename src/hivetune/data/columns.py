"""The exact names of columns: those of a question and its answer in published tables, and those of metadata (user,
session, time, outcome), which is read from a row here."""

import contextlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NamedTuple

from hivetune.data.pieces.values import Row

SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input", "user", "human")
ANSWERS = ("completion", "output", "response", "answer", "solution", "assistant")
REASONING = ("reasoning_content", "reasoning", "thinking")
# The exact names of facts, in snake_case, the likeliest first.
SESSION = (
    *("session_id", "session", "conversation_id", "thread_id", "chat_id", "conversation_hash", "conversation"),
    *("gen_ai_conversation_id", "thread", "trace_id"),
)
USER = ("user_id", "username", "user_name", "user", "end_user_id", "enduser_id")
AGENT = ("agent", "agent_name", "agent_id")
CATEGORY = ("category", "tool_used", "tool")
TIME = (
    *("timestamp", "time", "created_at", "created", "ts", "date", "create_time", "start_time", "started_at"),
    "start_time_unix_nano",
)
OWN_ID = ("interaction_id", "event_id", "id", "uuid")
_NAMES = (OWN_ID, SESSION, USER, AGENT, CATEGORY, TIME, ("success",), ("feedback",))  # in the order of Fields
FACTS = frozenset(name for names in _NAMES for name in names)
BESIDE = FACTS | {*SYSTEM, *TOOLS, *REASONING}  # what is read beside any question and answer
_ANSWERS_OF_USER = frozenset(("assistant", "bot", "ai"))  # beside one of these, `user` is what was said
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_THUMBS = dict.fromkeys(("up", "thumbs_up", "like", "good", "+1", "👍"), 1.0)
_THUMBS |= dict.fromkeys(("down", "thumbs_down", "dislike", "bad", "-1", "👎"), -1.0)
# Clocks count s, ms, us or ns, each a thousand times the one before, and today is 1.8e9 s: what is larger than this
# (the year 5138) is of a smaller unit.
_LARGEST_SECONDS = 1e11
# What `data.columns` may map, each with what it is. `hivetune check --help` prints this.
FIELDS: Mapping[str, str] = {
    "prompt": "the question; a+b joins columns",
    "completion": "the answer",
    "messages": "a list of turns",
    "role": "of a turn: who speaks",
    "text": "of a turn: the words; without messages: a text that is learned whole",
    "assistant": "the speaker who answers; all others ask",
    "user": "the user's id",
    "system": "the system prompt, a column or a text in quotes",
    "tools": "the tools that may be called",
    "reasoning": "what was thought before the answer",
    "chosen": "the better of two answers",
    "rejected": "the worse of two answers",
    "correction": "the answer that a person put in the place of the answer",
    "session": "the conversation that a row belongs to",
    "agent": "the agent, a column or a name in quotes",
    "category": "the category, a column or a name in quotes",
    "time": "when it was said",
    "success": "whether the answer was good: true or false, yes or no, 1 or 0",
    "feedback": "the user's judgement: a number, or up or down",
    "checker": "the checker of the answer, an object",
    "rows": "the path of the rows in a record",
    "where": "the rows to read: a=b, a!=b, or a in b|c",
}


def plain_row(row: Row) -> Row:
    """Return `row` with names in snake_case: `systemPrompt`, "System Prompt" and `system_prompt` become the same name.

    If two columns would get the same name, the second one keeps its own.
    """
    renamed = _plain_names(tuple(row))
    return row if renamed is None else dict(zip(renamed, row.values(), strict=True))


@lru_cache(512)
def _plain_names(names: tuple[str, ...]) -> tuple[str, ...] | None:
    plain: list[str] = []
    for name in names:
        new = plain_name(name)
        plain.append(name if new in plain or (new != name and new in names) else new)
    return None if tuple(plain) == names else tuple(plain)


class Fields(NamedTuple):
    """The metadata of one row. `time` is in seconds since 1970, UTC. A field is None if the row does not have it."""

    own_id: str | None
    session: str | None
    user: str | None
    agent: str | None
    category: str | None
    time: float | None
    success: bool | None
    feedback: float | None


def extract(row: Mapping[str, Any]) -> Fields:
    """Return the metadata of a row. An invalid value becomes None; the row itself is not changed."""
    columns = columns_of(tuple(row))
    values = (next((row[name] for name in names if row[name] not in (None, "")), None) for names in columns)
    *texts, time, success, feedback = values
    own_id, session, user, agent, category = map(_text, texts)
    return Fields(own_id, session, user, agent, category, as_time(time), as_success(success), as_feedback(feedback))


def facts_in(row: Mapping[str, Any]) -> set[str]:
    """Return the names of a row's metadata columns (session, user, time, ...) that have a valid value."""
    read = (*[_text] * 5, as_time, as_success, as_feedback)
    fields = zip(columns_of(tuple(row)), read, strict=True)
    return {name for names, fact in fields for name in names if fact(row[name]) is not None}


@lru_cache(512)  # looking for every name in every row took a third of the reading time
def columns_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the columns that may contain each field of `Fields`, the preferred one first."""
    plain: dict[str, str] = {}
    for name in names:
        plain.setdefault(plain_name(name), name)
    if not _ANSWERS_OF_USER.isdisjoint(plain):
        plain.pop("user", None)
    return tuple(tuple(plain[name] for name in field if name in plain) for field in _NAMES)


@lru_cache(4096)
def plain_name(name: str) -> str:
    """Return the name in snake_case: `sessionId`, "Session ID", `session-id` and `session.id` are `session_id`."""
    return _BREAKS.sub("_", _HUMPS.sub("_", name.strip())).lower()


_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z][A-Za-z])")
_BREAKS = re.compile(r"[\s.\-/]+")


def as_time(value: Any) -> float | None:
    """Return a time in seconds since 1970, from a number (in s, ms, us or ns, told apart by its size) or from a text
    (UTC if it has no zone): ISO 8601, RFC 2822 ("Mon, 3 Nov 2025 09:12:33 +0000") or ctime ("Mon Nov 3 09:12:33 +0000
    2025"); None for any other value.
    """
    if (number := as_number(value)) is not None:
        for _ in range(3):
            number = number / 1000 if number > _LARGEST_SECONDS else number
        return number if 0 < number <= _LARGEST_SECONDS else None
    if not isinstance(value, str):
        return None
    for read in (datetime.fromisoformat, parsedate_to_datetime):  # the latter reads RFC 2822 and ctime
        with contextlib.suppress(ValueError, OverflowError):
            moment = read(value.strip())
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return None


def as_position(value: Any) -> float | None:
    """Return a number as it is, else a time in seconds, as a sort key for turns; None for any other value."""
    number = as_number(value)
    return as_time(value) if number is None else number


def as_success(value: Any) -> bool | None:
    """Return the boolean that a value means (true, 0, 1, yes, no, ...), or None if it means neither."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    return _WORDS.get(value.strip().lower()) if isinstance(value, str) else None


def as_feedback(value: Any) -> float | None:
    """Return a rating as a number: numbers unchanged; true, false, thumbs and words such as "up" as 1 or -1;
    else None."""
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    thumb = _THUMBS.get(value.strip().lower()) if isinstance(value, str) else None
    return as_number(value) if thumb is None else thumb


def _text(value: Any) -> str | None:
    """Return an id or a name: text, or a whole number (CSV and Parquet make 7.0 of 7)."""
    if isinstance(value, float) and math.isfinite(value):
        value = int(value) if value.is_integer() else value
    elif isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).encode("utf-8", "replace").decode()  # a lone surrogate cannot be stored


def as_number(value: Any) -> float | None:
    """Return a finite number, also one that is written as text; None for anything else, and for a truth value."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None

"""Failures that teach nothing: what failed was a clock, a tool or a network, not the answer."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from hivetune.data.columns import looks_like_content
from hivetune.data.pieces.answers import ENDS
from hivetune.data.pieces.fields import NESTED, extract, names_of, plain_name
from hivetune.records import Message

# Columns in which logs say why something failed, and those of a call's error.
_CAUSE_COLUMNS, _ERRORS = map(frozenset, names_of("cause", "error"))
_OUTSIDE = re.compile(
    r"\btime[ds]?[ _-]?out\b|timeout|deadline[ _]exceeded"
    r"|\bconnection[ _]?(?:reset|refused|error|aborted|closed|lost)|\bECONN\w+|\bE(?:TIMEDOUT|PIPE|AI_AGAIN|NOTFOUND)\b"
    r"|\bnetwork[ _]?(?:error|is unreachable|lost|down)|\b(?:no|lost) network\b|name resolution|\bbroken pipe\b"
    r"|\btool[ _]?(?:error|crash\w*|failure|failed|unavailable)\b|\b(?:service|server)[ _]unavailable\b|\bbad gateway\b"
    r"|\brate[ _-]?limit|too many requests|\b(?:HTTP|status)[ :]*(?:408|429|50[0234])\b|\bout of memory\b|\bOOM\b"
    r"|\bsegmentation fault\b|\bkilled\b|\bcancell?ed\b|\bSIG(?:KILL|TERM|SEGV)\b",
    re.IGNORECASE,
)
_IS_MESSAGE = re.compile(r"\W*(?:error|exception|fatal|failed|failure|traceback|warning)\b", re.IGNORECASE)
_IS_ERROR = re.compile(r"(?:[\w.]*[a-z](?:Error|Exception)|[a-z]+(?:_[a-z]+)*_error)(?::|\(|\Z)")
_JSON_BEGIN = re.compile(r"(\s*(?:```(?:json)?\s*)?)[{\[]\s*[\"{\[]")
_LOOKED_AT_CHARS, MAX_MESSAGE_CHARS = 2000, 300
# How many tokens a log counted in an answer, and in which objects such a count may stand.
_COUNTS, _COUNTED_IN = map(frozenset, names_of("count", "counted_in"))
_MIN_LIMIT, _MAX_COUNT_DIGITS = 16, 10


def outside_cause(row: Mapping[str, Any], answer: str = "") -> str:
    """Return the row's text on a failure outside of the answer; empty without one. An answer that is an error's message
    ("Error: the tool timed out.") is not a model's.
    """
    message = answer if len(answer) <= MAX_MESSAGE_CHARS and _IS_MESSAGE.match(answer) else ""
    for text in (message, *_reasons(row)):
        match = _OUTSIDE.search(text[:_LOOKED_AT_CHARS])
        if match:
            return match.group()
    return ""


def call_failed(row: Mapping[str, Any], messages: Sequence[Message]) -> bool:
    """Return whether a log says of a call that it ended in an error, in a column of its own: what it holds as the
    answer is none. An error that somebody talks about stands in the conversation.
    """
    values = [row[name] for name in row if plain_name(name) in _ERRORS]
    parts = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    texts = [part.strip() for part in parts if isinstance(part, str) and part.strip()]
    errors = [text for text in texts if _IS_ERROR.match(text) or _OUTSIDE.search(text[:_LOOKED_AT_CHARS])]
    return any(not any(text in message.content for message in messages) for text in errors)


def cut_at(row: Mapping[str, Any], answer: str, most_tokens: int = 0) -> int | None:
    """Return the limit at which an answer was cut: as many tokens as its log counted, a number that people set as one,
    where the answer ends inside a sentence. None: nothing reports it, the row says otherwise, or other answers of its
    log are longer (`most_tokens`).
    """
    end = answer[-1:] if answer[-1:].strip() else answer.rstrip()[-1:]
    if not end or not (end.isalnum() or end in ",;("):
        return None
    counts = [count for count in _answer_tokens(row) if count >= max(_MIN_LIMIT, most_tokens)]
    limits = [count for count in counts if count % 50 == 0 or count & (count - 1) == 0]
    if not limits or any(isinstance(row[name], str) and row[name].strip() for name in ENDS & row.keys()):
        return None
    return limits[0]


def most_tokens_in(rows: Iterable[Any]) -> int:
    """Return the most tokens that a log counted in one answer; 0: it counted none."""
    return max((count for row in rows if isinstance(row, dict) for count in _answer_tokens(row)), default=0)


def _answer_tokens(row: Mapping[str, Any]) -> list[int]:
    top, holders = _count_columns(tuple(row))
    if not top and not holders:
        return []
    counts = [row[name] for name in top]
    for holder in (row[name] for name in holders):
        counts += [holder[name] for name in _count_columns(tuple(holder))[0]] if isinstance(holder, dict) else []
    return [int(count) for count in counts if str(count).isdecimal() and len(str(count)) < _MAX_COUNT_DIGITS]


def is_cut_json(answer: str) -> bool:
    """Return whether an answer begins as an object or a list in JSON and ends inside it."""
    begin = _JSON_BEGIN.match(answer)
    if begin is None or answer.rstrip()[-1:] in ("}", "]", "`"):
        return False
    try:
        json.loads(answer[begin.end(1) :])
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string") or error.pos >= len(answer.rstrip()) - begin.end(1)
    except (ValueError, RecursionError):  # as of an integer with more digits than Python reads
        return False
    return False


@lru_cache(512)
def _count_columns(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (columns of an answer's tokens, columns that may hold such a count) among these."""
    plain = {name: plain_name(name) for name in names}
    return tuple(name for name in names if plain[name] in _COUNTS), tuple(
        name for name in names if plain[name] in _COUNTED_IN
    )


def without_reasons(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a failed row without the columns that give the reason, which can't be learned."""
    reasons = {name for name in row if plain_name(name) in _CAUSE_COLUMNS}
    if not reasons:
        return row
    fields = extract(row)
    if fields.success is False or (fields.feedback is not None and fields.feedback < 0):
        return {name: value for name, value in row.items() if name not in reasons}
    return row


def _reasons(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        plain = plain_name(name)
        if plain in NESTED and isinstance(value, dict):
            yield from _reasons(value)
        elif plain in _CAUSE_COLUMNS:
            if isinstance(value, dict):
                yield " ".join(str(part) for part in value.values())
            elif isinstance(value, str):
                yield value


# At which length the answers of a file were cut: several end there inside a sentence.

MIN_CUT_CHARS = 200  # shorter answers may be as long as each other by chance
CUT_NEAR_CHARS = 12  # by which cut answers differ: white space goes after the cut, and three points come
CUT_ROWS, CUT_SHARE = 4, 0.7  # how many different answers of one length, and how many of these end inside a sentence
CUT_OF_ROWS = 10  # different answers of a file: among fewer, four are as long as each other by chance
WHOLE_SHARE = 0.5  # of the shorter answers: where they end anyhow too (words, code), the ends say nothing


def cut_length(answers: Collection[str]) -> int:
    """Return the length in characters at which answers of a file were cut, by its first rows; 0: none were."""
    answers = {answer.strip() for answer in answers}
    longest = max(map(len, answers), default=0)
    near = {answer for answer in answers if len(answer) >= longest - CUT_NEAR_CHARS}
    if longest < MIN_CUT_CHARS or len(near) < CUT_ROWS or len(answers) < CUT_OF_ROWS:
        return 0
    shorter = answers - near
    if sum(map(ends_inside, shorter)) > (1 - WHOLE_SHARE) * len(shorter):
        return 0
    return longest if sum(map(ends_inside, near)) >= CUT_SHARE * len(near) else 0


def ends_inside(answer: str) -> bool:
    """Return whether a text ends inside a sentence, or with three points. A text without words does not."""
    end = answer.removesuffix("...").removesuffix("\u2026").rstrip()[-1:]
    return looks_like_content(answer) and (end.isalnum() or end in (",", ";", "(")) and len(answer.split()) > 1

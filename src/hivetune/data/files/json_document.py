"""Rows of a JSON document: elements of an array (maybe below a key: {"data": [..]}), or objects in order.

One of them is in memory at a time. Where an element is broken, reading continues at the next object whose first key is
that of a row seen before; the broken text is a row of its own, which the checks refuse. So a missing brace or quote
costs the row that it is in.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.columns import column_kind, looks_like_content
from hivetune.data.files.text import Text
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.logs import MAX_ROW_CHARS, PlacedRow, one_line
from hivetune.data.pieces.said import names
from hivetune.data.reasons import RowRefused

_KEPT_CHARS = 1 << 20  # of a broken element
_MAX_KEY_CHARS = 1024
_NEAR_END_CHARS = 64  # an error so close to the end of what was read may be the end
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.){0,200}+)"\s*:')
_SCALAR = r'(?:"[^"\\]{0,400}"|-?[0-9.eE+-]{1,40}|true|false|null)'
_WRAPPER = re.compile(
    rf'\{{(?:\s*"[^"\\]{{1,60}}"\s*:\s*{_SCALAR}\s*,){{0,20}}\s*"(?:data|rows|examples|records)"\s*:\s*\[(?=\s*\{{)'
)
_KEY = re.compile(r'"([^"\\]{1,60})"\s*:')
_NEXT_KEY = re.compile(r'[\s,]*"([^"\\]{1,60})"\s*:\s*')
_LIST = re.compile(r"\[\s*(?=\{)")
# What holds conversations, in an export; samples of an evaluation have more to say than their messages.
_TALKS = names("conversations chats sessions threads dialogues dialogs transcripts data")
_TALK = names("messages chat_messages conversation dialog dialogue turns history")
_SPEAKERS = names("role from sender speaker author")
_SEPARATORS = re.compile(r"[\s,]*")
_scan = json.JSONDecoder().raw_decode


class _Document:
    """The text of the document and the current position."""

    def __init__(self, source: Text):
        self.source = source
        self.buffer = source.more()
        self.position, self.line = 0, 1

    @property
    def is_over(self) -> bool:
        return self.source.ended and self.position == len(self.buffer)

    def skip(self, end: int) -> str:
        """Go on to `end` in the buffer; return the skipped text."""
        passed = self.buffer[self.position : end]
        self.line += passed.count("\n")
        self.position = end
        return passed

    def read_more(self) -> bool:
        """Read more text, and return whether there was more. Text before the position is released."""
        more = self.source.more()
        self.buffer, self.position = self.buffer[self.position :] + more, 0
        return bool(more)

    def at_value(self) -> str:
        """Return the first character after white space and commas; empty at the end."""
        while True:
            end = _SEPARATORS.match(self.buffer, self.position).end()  # type: ignore[union-attr]
            self.skip(end)
            if end < len(self.buffer):
                return self.buffer[end]
            if not self.read_more():
                return ""


def json_rows(source: Text) -> Iterator[PlacedRow]:
    document = _Document(source)
    in_array = wrapped = _skip_wrapper(document)
    first_keys: set[str] = set()
    while first := document.at_value():
        line = document.line
        if first in "[]" and in_array == (first == "]"):
            in_array = first == "["
            document.skip(document.position + 1)
            if wrapped and not in_array:
                yield from _behind(document)
                return
            continue
        end = _end_of_value(document)
        if end is None:
            text = _broken(document, first_keys)
            if document.is_over:
                in_array = False
                if not text.endswith("]"):
                    yield line, RowRefused("broken-file", source.problem or "the JSON breaks off in this row")
                    return
            yield line, one_line(text)
            continue
        text = document.skip(end)
        key = _FIRST_KEY.match(text)
        if key:
            first_keys.add(key.group(1))
        yield line, one_line(text)
    if source.problem or in_array:
        yield document.line, RowRefused("broken-file", source.problem or "the JSON array breaks off here")


def _skip_wrapper(document: _Document) -> bool:
    """Return whether the rows are below a key, as in {"version": 1, "data": [..]}; then continues after the bracket."""
    if document.at_value() != "{":
        return False
    if begin := _begin_of_conversations(document):
        document.skip(begin)
        return True
    wrapper = _WRAPPER.match(document.buffer, document.position)
    beside = _KEY.findall(wrapper.group())[:-1] if wrapper else []
    if wrapper is None or any(column_kind(plain_name(name)) == "content" for name in beside):
        return False
    document.skip(wrapper.end())
    return True


def _begin_of_conversations(document: _Document) -> int | None:
    """Return where the conversations of an export begin: {"user": {..}, "chats": [{"title": .., "messages":
    [..]}, ..]}.
    """
    while len(document.buffer) - document.position <= MAX_ROW_CHARS:
        try:
            return _first_conversation(document.buffer, document.position + 1)
        except (ValueError, RecursionError):
            if document.source.ended:
                return None
        size = 2 * (len(document.buffer) - document.position)
        while len(document.buffer) - document.position < size and document.read_more():
            pass
    return None


def _first_conversation(text: str, at: int) -> int | None:
    """Return the start of the first conversation; the keys of an object are at `at`. Raise ValueError: the text ends
    before it.
    """
    while key := _NEXT_KEY.match(text, at):
        at = key.end()
        if text[at : at + _NEAR_END_CHARS].strip() in ("", "["):
            break
        holds = plain_name(key.group(1)) in _TALKS
        if holds and (match := _LIST.match(text, at)) and _is_conversation(_scan(text, match.end())[0]):
            return match.end()
        if column_kind(plain_name(key.group(1))) == "content":
            return None
        at = _scan(text, at)[1]
    if text[at : at + _NEAR_END_CHARS].lstrip()[:1] == "}":
        return None
    raise ValueError


def _is_conversation(element: Any) -> bool:
    """Return whether an element of a list is a conversation, not a turn."""
    if not isinstance(element, dict) or not _SPEAKERS.isdisjoint(element):
        return False
    for key, value in element.items():
        name = plain_name(key)
        if name in ("mapping", "chat") and isinstance(value, dict) and (name == "mapping" or _is_conversation(value)):
            return True
        turns = value if name in _TALK and isinstance(value, list) else []
        if turns and all(isinstance(turn, dict) and not _SPEAKERS.isdisjoint(turn) for turn in turns):
            return True
    return False


def _may_be_rows(value: Any) -> bool:
    """Return whether text after the rows may be more rows, not the page number and count of an API."""
    if isinstance(value, dict):
        return looks_like_content(value) or any(isinstance(inner, list | dict) for inner in value.values())
    return isinstance(value, list) and bool(value)


def _behind(document: _Document) -> Iterator[PlacedRow]:
    """Yield the end of a wrapper and notes after its rows; report anything else."""
    while len(document.buffer) - document.position < _KEPT_CHARS and document.read_more():
        pass
    line, rest = document.line, document.buffer[document.position :].strip()
    try:
        notes = json.loads("{" + rest.removeprefix(",")) if document.source.ended else None
    except (ValueError, RecursionError):
        notes = None
    if notes is None or any(map(_may_be_rows, notes.values())):
        yield (
            line,
            RowRefused("broken-file", document.source.problem or "what stands behind the list of rows was not read"),
        )


def _end_of_value(document: _Document) -> int | None:
    """Return where the JSON value that begins here ends; None when it is broken or larger than any row. Reads
    on as needed.
    """
    size = 0
    while True:
        buffer, position, ended = document.buffer, document.position, document.source.ended
        try:
            end = _scan(buffer, position)[1]
        except json.JSONDecodeError as error:
            may_go_on = error.msg.startswith("Unterminated string") or error.pos > len(buffer) - _NEAR_END_CHARS
        except (ValueError, RecursionError):  # as of an integer with more digits than Python reads
            return None
        else:
            if end < len(buffer) or ended or buffer[end - 1] in "}]":
                return end
            may_go_on = True  # a number may have more digits
        if not may_go_on or ended or len(buffer) - position > MAX_ROW_CHARS:
            return None
        size = max(2 * (len(buffer) - position), size)
        while len(document.buffer) - document.position < size and document.read_more():
            pass


def _broken(document: _Document, first_keys: set[str]) -> str:
    """Return the text up to the next row, at most _KEPT_CHARS."""
    first_key = _FIRST_KEY.match(document.buffer, document.position)
    keys = first_keys | ({first_key.group(1)} if first_key else set())
    any_key = "|".join(map(re.escape, sorted(keys)))
    start = re.compile(rf'\{{\s*"(?:{any_key})"\s*:' if keys else r"\{")
    text = document.skip(document.position + 1)
    while True:
        next_row = start.search(document.buffer, document.position)
        # Without a match the last characters stay: they may be the beginning of one.
        end = next_row.start() if next_row else max(document.position, len(document.buffer) - _MAX_KEY_CHARS)
        text = (text + document.skip(end))[:_KEPT_CHARS]
        if next_row:
            return text.rstrip(", \t\r\n")
        if not document.read_more():
            return (text + document.skip(len(document.buffer)))[:_KEPT_CHARS].rstrip()

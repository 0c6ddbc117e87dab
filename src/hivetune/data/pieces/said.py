"""What a layout makes of a row, and how single values are read: text, JSON text, a list of something."""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from hivetune.data.reasons import RowRefused
from hivetune.records import Message

Row = Mapping[str, Any]
NOT_HELD = "not-held"  # why a turn is refused whose image, file or tool a log does not hold
BYTE_ORDER_MARK = "\ufeff"
MAX_PYTHON_CHARS = 1 << 20
MAX_VALUES = 200  # looked at inside one list or object
_PYTHON = re.compile(r"\s*(?:\[\s*)*(?:\{\s*)?'")
Tools = tuple[Mapping[str, Any], ...]


class Conversation(NamedTuple):
    """The conversation of a row. `untrusted`: a tool or a web page wrote the answer; `changed`: reasons of severity
    warn.
    """

    layout: str
    messages: tuple[Message, ...]
    tools: Tools = ()
    untrusted: bool = False
    changed: tuple[str, ...] = ()


# Where an answer names a source by its number in what the provider found: today's marks of ChatGPT (of which some hold
# words of the sentence: a name, a link), the ones before them, those of OpenAI's assistants and of DeepSeek.
_MARK = re.compile(r" ?\ue200(\w+)(?:\ue202([^\ue200\ue201]*))?\ue201")
_OLD_MARK = re.compile(
    r" ?(?::contentReference\[oaicite:\d+\]\{index=\d+\}|\[citation:\d+\]"
    r"|\u3010\d+(?::\d+)?\u2020[^\u3010\u3011]*\u3011)"
)
_IN_MARKS = ("\ue200", "\u2020", "oaicite", "[citation:")  # the first ones are no characters of any text


def clean_texts(conversation: Conversation, *, marked: bool, nul: bool) -> Conversation:
    """Return the conversation without what is not a character of a text.

    `marked`: a file that was read with its byte order mark was pasted. `nul`: a program printed NUL; in a tool's result
    it is read as U+FFFD, as all that is not a text.
    """
    turns = conversation.messages
    citing = [t.role == "assistant" and any(mark in t.content for mark in _IN_MARKS) for t in turns]
    if not (marked or nul or any(citing)):
        return conversation
    # Where the sources are there, or asked for, the older marks are meant.
    meant = any(mark in turn.content for turn in turns if turn.role != "assistant" for mark in _IN_MARKS[1:])
    messages = []
    cited = had_nul = False
    for turn, cites in zip(turns, citing, strict=True):
        text = _MARK.sub(_text_of_mark, turn.content) if cites else turn.content
        text = _OLD_MARK.sub("", text) if cites and not meant else text
        cited = cited or text != turn.content
        text = text.replace(BYTE_ORDER_MARK, "") if marked else text
        if nul and turn.role == "tool" and "\0" in text:
            text = text.replace("\0", "\ufffd")
            had_nul = True
        messages.append(turn if turn.content == text else replace(turn, content=text))
    changed = (*conversation.changed, *(["source-marks"] if cited else ()), *(["nul-in-result"] if had_nul else ()))
    return conversation._replace(messages=tuple(messages), changed=changed)


def _text_of_mark(mark: re.Match[str]) -> str:
    """Return the text of a mark in its sentence, with the blank before it."""
    kind, fields = mark[1], (mark[2] or "").split("\ue202")
    blank = " " if mark[0].startswith(" ") else ""
    if kind == "url":
        return blank + fields[0]
    entity = parsed(fields[0]) if kind == "entity" else None
    return blank + str(entity[1]) if isinstance(entity, list) and len(entity) > 1 else ""


def names(text: str) -> frozenset[str]:
    """Return the words of `text`, for long lists of column names."""
    return frozenset(text.split())


def is_json_text(value: str) -> bool:
    """Return whether a text begins as a list or an object does."""
    head = value[:1]
    return (value.lstrip()[:1] if head.isspace() else head) in ("[", "{")


def parsed(value: Any) -> Any:
    """Return the list or object in a text of JSON or Python syntax, as in CSV, Parquet and logs; any other value
    unchanged.
    """
    if not isinstance(value, str) or not is_json_text(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        if len(value) > MAX_PYTHON_CHARS or not _PYTHON.match(value):
            return value
    try:  # as Python's `str` writes it: strings have single quotes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes that no escape begins with
            return json.loads(json.dumps(ast.literal_eval(value)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return value


def text_of(value: Any, column: str) -> str:
    """Return the text of one value, empty for null. Raise RowRefused("wrong-type") for what is not a text or number."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool | dict | list):
        kind = {bool: "true or false", dict: "an object", list: "a list"}[type(value)]
        raise RowRefused("wrong-type", f"{column}: a string, not {kind}")
    return str(value)


def first_of(row: Row, names: tuple[str, ...]) -> str | None:
    """Return the first of these columns that has a value; else the first that is there; else None."""
    empty = None
    for name in names:
        if name in row:
            if row[name] is not None and row[name] != "":
                return name
            empty = empty or name
    return empty


def objects(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a list of objects that is not empty, without what is null in it; else None."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(item, dict) for item in value):
        return value
    return [item for item in value if item is not None] if {dict, type(None)} == set(map(type, value)) else None


def all_texts(value: Any) -> TypeGuard[list[str]]:
    """Return whether `value` is a list of texts that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def listed(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def one_of(value: Any, *names: str) -> Any:
    """Return the first of these keys of an object that has a value, else None."""
    if isinstance(value, dict):
        for name in names:
            field = value.get(name)
            if field is not None:
                return field
    return None


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings in a value, at most MAX_VALUES, without keys."""
    stack, num_values = [value], 0
    while stack and num_values < MAX_VALUES:
        item = stack.pop()
        num_values += 1
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list):
            stack += item

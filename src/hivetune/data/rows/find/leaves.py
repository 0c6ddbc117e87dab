"""Everything that a row holds, by its path, and what of it a conversation does not account for."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Row, Tools, all_texts, is_json_text, parsed
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.names import (
    SHORTENED,
    answers_somehow,
    is_expected,
    is_note,
    is_of_a_person,
    is_reference,
    names_role,
    part_of,
    role_of,
    words,
)
from hivetune.data.rows.find.talk.turn_lists import names_party
from hivetune.data.rows.find.written import Written
from hivetune.data.rows.layouts.columns import looks_like_content, stands_in
from hivetune.records import Message

_PARTIES = ("user", "agent")  # who it was; or, beside the other's words, what they said
MAX_ROW_DEPTH = 24
MAX_NODES = 20_000
NESTED_WORDS = 8  # a nested text of fewer words, under a name that nobody knows, is a value and not a document
_FEW_WORDS = 3
_ADDRESS = re.compile(r"\s*https?://\S+\s*\Z")


class Node(NamedTuple):
    """Something in a row. `path`: its names, "[]" for any place in a list."""

    path: tuple[str, ...]
    value: Any


def nodes(row: Row) -> Iterator[Node]:
    """Everything in a row, outer things first; lists and objects that are written as text too.

    Raises RowRefused when there is more than anybody could account for.
    """
    waiting = deque(Node((str(key),), value) for key, value in row.items())
    seen = 0
    while waiting:
        node = waiting.popleft()
        seen += 1
        if seen > MAX_NODES or len(node.path) > MAX_ROW_DEPTH:
            raise RowRefused("unknown-layout", "the row holds too much to find one conversation in it")
        value = _inside(node.value)
        yield Node(node.path, value)
        if isinstance(value, dict):
            waiting.extend(Node((*node.path, str(key)), inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend(Node((*node.path, "[]"), inner) for inner in value)


def _inside(value: Any) -> Any:
    """A list or an object that was written as text; not an answer that is one text."""
    return parsed(value) if isinstance(value, str) and not isinstance(value, Written) and is_json_text(value) else value


def at(row: Row, path: str) -> Any:
    value: Any = row
    for key in path.split("."):
        value = parsed(value)
        value = value.get(key) if isinstance(value, dict) else None
    return value


def left_out(
    row: Row, messages: Sequence[Message], tools: Tools, used: Sequence[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each written text that the conversation does not hold, with its path. Raises RowRefused for media."""
    said = [message.content for message in messages] + [message.reasoning or "" for message in messages]
    calls = [str(call) for message in messages for call in message.tool_calls]
    whole = "\n".join([*said, *calls, *(str(dict(tool)) for tool in tools)])
    unspaced = "".join(whole.split())
    texts = sorted({text.strip() for text in said if text.strip()}, key=len, reverse=True)
    for path, value in nodes(row):
        if not isinstance(value, str) or not value.strip() or _ADDRESS.match(value):
            continue
        if not _has_to_be_said(path, value, used) or value.strip() in whole:
            continue
        if "".join(value.split()) not in unspaced and not _is_made_of(value, texts):  # words may be cut apart there
            yield path, value


def _has_to_be_said(path: tuple[str, ...], value: str, used: Sequence[tuple[str, ...]]) -> bool:
    """Whether a text must be found in the conversation. `used`: where that was read from. Raises RowRefused."""
    above = max((len(one) for one in used if path[: len(one)] == one), default=0)
    named = tuple(name for name in (path[above:] or path) if name != "[]") or path
    if is_note(named) or is_of_a_person(path) or path in used or path[:-1] in used:
        return False  # the text itself, or others beside it
    if above and ((names_role(path[-1]) and names_party(value)) or role_of(value) is not None):
        return False  # who speaks
    parts = [part_of(name) for name in named]
    if is_reference(named[-1], value):
        return False
    if "media" in parts:
        raise RowRefused("unsupported-content", f"{'.'.join(path)[:60]}: only text can be learned")
    return _matters(value, parts, nested=len(path) > 1)


def _matters(value: str, parts: Sequence[str], *, nested: bool) -> bool:
    """Whether a text has to be explained: by its name, else by its length; below a name that says something, three
    words are enough.
    """
    if parts[-1] != "unknown":
        return True
    known = any(part != "unknown" for part in parts)
    return looks_like_content(value) and (known or not nested or len(value.split()) >= NESTED_WORDS)


def _is_made_of(value: str, texts: Sequence[str]) -> bool:
    """Whether a text holds next to nothing beside some of these, the longest first."""
    rest = value
    for text in texts:
        rest = rest.replace(text, " ")
    return rest != value and len([word for word in rest.split() if any(c.isalpha() for c in word)]) < _FEW_WORDS


def open_paths(row: Row) -> dict[str, Any]:
    """The texts of a row that stand in no list and below no note."""
    found: dict[str, Any] = {}
    for path, value in nodes(row):
        if is_note(path) and plain_name(path[-1]) not in _PARTIES and not _is_reply(path[-1], value):
            continue
        if any(part_of(name) == "media" or "." in name for name in path) or "[]" in path:
            continue
        if isinstance(value, dict):
            continue
        if all_texts(value) and len(set(value)) == 1:
            value = value[0]
        found[".".join(path)] = value
    return found


def _is_reply(name: str, value: Any) -> bool:
    """Whether a name that begins as a note's does is one for an answer: `gen_alpha_reply`."""
    return answers_somehow(name) and isinstance(value, str) and looks_like_content(value)


def system_in(row: Row) -> Any:
    found = [node for node in nodes(row) if part_of(node.path[-1]) == "system" and isinstance(node.value, str | list)]
    texts = {str(node.value): node.value for node in found if node.value}
    return next(iter(texts.values())) if len(texts) == 1 else None


def is_copied(answer: str, question: str, answered: str) -> bool:
    """Whether an answer is a piece of the question: most of it, or any where the name at `answered` hardly says answer.
    A headline may stand in its article, and what is said to be right in its passage.
    """
    named = part_of(answered) == "answered" or is_expected(answered) or bool(SHORTENED & set(words(answered)))
    if named and 2 * len(answer.strip()) <= len(question):
        return False
    return stands_in(answer.strip(), question)

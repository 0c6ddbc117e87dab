"""What the other columns of a row are: facts and notes about it, media, or content that a layout has to explain.

A row is read only if each part of it that looks like content is found again in its conversation. Names decide first,
since a name means the same in every row of a file; a value is looked at only under a name that nobody knows.
"""

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from hivetune.data.pieces.fields import NAMES, names_of, plain_name
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, first_of, names, parsed, texts_in
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

Kind = Literal["note", "media", "content", "choice", "unknown"]


def _names(*parts: str) -> tuple[str, ...]:
    return tuple(name for part in parts for name in NAMES[part])


SYSTEM, TOOLS, QUESTIONS, REPLIES = _names("system"), _names("tools"), _names("question"), _names("answer")
ANSWERED = _names("answer", "expected_answer")
CONTEXT, THOUGHTS, TURNS, LABELS = _names("context"), _names("thoughts"), _names("turns"), _names("class")
_FACTS = ("session", "user", "agent", "category", "time", "success", "feedback", "own_id", "nested")
FACTS = tuple(itertools.chain.from_iterable(names_of(*_FACTS)))
MEDIA = frozenset(_names("media"))
CONTENT = frozenset((*SYSTEM, *QUESTIONS, *ANSWERED, *CONTEXT, *THOUGHTS, *TURNS, *_names("content")))
OUTCOMES: list[dict[str, list[str]]] = NAMES["outcome"]
NOTES = frozenset((*FACTS, *_names("note"), *(name for one in OUTCOMES for name in one["names"])))
TRUE_ANSWERS = frozenset(_names("true_answer"))
_OR_ANSWER = "correct"  # an outcome, or the answer that was right
_NO_INPUT = ("noinput", "no input", "n/a", "none", "null", "nan", "no input required", "no input needed")
# Layouts of published data, whose other columns may be anything.
PUBLISHED = ("prompt-completion", "alpaca", "question-answer", "input-output", "messages", "sharegpt", "agent", "calls")
# Words that choose among things known before, where one word stands; more words are what was said to the model.
_CHOSEN = names("persona story scenario knowledge profile mode style tone")

CHOICE = re.compile(r"\A(?:(?:option|opt|op|choice|answer_option|answer)_?)?([a-j])\Z")  # one of several, by its letter
NUMBERED_CHOICE = re.compile(r"\A(?:option|opt|choice|ending|sol)_?(\d)\Z")  # or by its number
_NAMED_DOCUMENT = re.compile(r"(?=\S*[A-Za-z])(?=\S*[\d_./:#-])[\w./:#@%+-]+", re.ASCII)
MIN_WORDS = 3
MIN_WIDE_CHARS = 8  # Chinese and Japanese write without spaces
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def plain_row(row: Row) -> Row:
    """Return `row` with names in snake_case: `systemPrompt`, "System Prompt" and `system_prompt` are one.

    A name that would be there twice stays as it is.
    """
    renamed = _plain_names(tuple(row))
    return row if renamed is None else dict(zip(renamed, row.values(), strict=True))


@lru_cache(512)
def _plain_names(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the plain name of each column; None when all are plain already."""
    plain: list[str] = []
    for name in names:
        new = plain_name(name)
        plain.append(name if new in plain or (new != name and new in names) else new)
    return None if tuple(plain) == names else tuple(plain)


def is_content(key: str, value: Any) -> bool:
    """Return whether a layout must have a place for this column."""
    kind = column_kind(plain_name(key))
    return kind in ("content", "media") or (kind == "unknown" and looks_like_content(value))


@lru_cache(4096)
def column_kind(name: str) -> Kind:
    """Return the meaning of a column by its name."""
    if name in MEDIA:
        return "media"
    if (name in CONTENT or name in TOOLS) and name != "user":  # mostly who asked, not what
        return "content"
    if CHOICE.match(name) or NUMBERED_CHOICE.match(name):
        return "content"  # one word may be a choice, without which the answer "B" means nothing
    return "note" if name in NOTES else "unknown"


def unexplained(row: Row, layout: Format, conversation: Conversation) -> str | None:
    """Return the first column that looks like content and is not found in the conversation. Raise RowRefused for
    media.
    """
    for name, kind in _content_columns(tuple(row), layout):
        value = row[name]
        nothing: tuple[Any, ...] = (
            (None, "") if name in layout.asks else (None, "", [], {})
        )  # no part of this text may have a label
        chosen = name in _CHOSEN and isinstance(value, str) and value.isidentifier()  # selects what is known
        if name in conversation.explained or value in nothing or chosen or (name == "input" and says_none(value)):
            continue
        if kind == "media":
            raise RowRefused("unsupported-content", f"the column {name[:40]}: only text can be learned")
        if _is_lost(name, kind, value, conversation):
            return name
        if name in layout.asks or (kind in ("content", "choice") and layout.asks):
            return name  # a document beside a question, an answer or a label is half of something
        if kind == "unknown" and not looks_like_content(value):
            continue
        if not _is_explained(value, kind in ("content", "choice"), conversation.messages):
            return name
    return None


def leaves_out(row: Row, layout: Format, conversation: Conversation) -> bool:
    """Return whether a column with an unknown name has a value that the conversation lacks. Other columns of programs'
    records are known.
    """
    if layout.name not in PUBLISHED:
        return False
    for name, kind in _content_columns(tuple(row), layout):
        if (
            kind == "unknown"
            and name not in (*conversation.explained, _OR_ANSWER)
            and row[name] not in (None, "", [], {})
        ):
            text = str(row[name]).strip()
            if not any(text in message.content for message in conversation.messages):
                return True
    return False


def _is_lost(name: str, kind: Kind, value: Any, conversation: Conversation) -> bool:
    """Return whether a choice is not named, or the expected text is not the answer, which a tested system gave."""
    if name == "expected" and isinstance(value, str):
        return not any(message.content.strip() == value.strip() for message in conversation.messages)
    if name in TRUE_ANSWERS and isinstance(value, str | int | float) and not isinstance(value, bool):
        right = str(value).strip().lower()
        answers = [message.content.lower() for message in conversation.messages if message.role == "assistant"]
        return not answers or (right != "" and not stands_in(right, answers[-1]))
    if kind != "choice":
        return False
    # The question has to name it by its letter: a match of the words alone may be chance.
    named = re.compile(rf"(?<!\w){name[-1]}\W{{1,3}}{re.escape(str(value).strip()[:200])}", re.I)
    return not any(named.search(message.content) for message in conversation.messages if message.role == "user")


def stands_in(short: str, long: str) -> bool:
    """Return whether a longer text contains this one as whole words."""
    return bool(short) and short in long and _with_borders(short) in _with_borders(long)


def _with_borders(text: str) -> str:
    """Return `text` with a sign wherever a word may begin or end: one search finds all, in time linear in the text."""
    return re.sub("(?<![\\w.\ufdd1])", "\ufdd0", re.sub(r"(?!\w)", "\ufdd1", text))


@lru_cache(512)
def _content_columns(names: tuple[str, ...], layout: Format) -> tuple[tuple[str, Kind], ...]:
    """Return the columns of such rows that may be content, by their names."""
    kinds: list[tuple[str, Kind]] = [
        (name, "unknown" if name == _OR_ANSWER else column_kind(name)) for name in names if name not in layout.explains
    ]
    choices = {name for name in names if CHOICE.match(name) and name[:-1] + "a" in names and name[:-1] + "b" in names}
    return tuple(
        (name, "choice" if name in choices else kind)
        for name, kind in kinds
        if name in layout.asks or (kind != "note" and (kind == "media" or name not in layout.beside))
    )


def looks_like_content(value: Any) -> bool:
    """Return whether somebody wrote this: at least three words, or as many signs of a script without spaces."""
    return any(_is_prose(text) for text in texts_in(value))


def _is_prose(text: str) -> bool:
    if text.startswith("data:image/"):
        return True
    return (len(text.split(None, MIN_WORDS)) >= MIN_WORDS and any(c.isalpha() for c in text[:200])) or (
        not text.isascii() and len(_WIDE.findall(text)) >= MIN_WIDE_CHARS
    )


def says_none(value: Any) -> bool:
    """Return whether somebody wrote that an instruction has no input."""
    return isinstance(value, str) and value.strip().lower().strip("<>[]() .") in _NO_INPUT


def names_document(text: str) -> bool:
    """Return whether a text only names a document: `page_12`, `guides/returns.txt`."""
    return _NAMED_DOCUMENT.fullmatch(text.strip()) is not None


def _is_explained(value: Any, named: bool, messages: Sequence[Message]) -> bool:
    """Return whether all prose of `value` (all its texts, if its name says content) stands in the conversation, or the
    conversation in it: a column that holds the whole row as one text adds nothing.
    """
    if isinstance(value, str) and any(value in message.content for message in messages):
        return True  # the usual case
    if isinstance(value, str):
        inside = parsed(value)
        value = value if isinstance(inside, str) else inside
    texts = [text.strip() for text in texts_in(value) if (named and text.strip()) or _is_prose(text)]
    if not texts:
        return True  # numbers: nothing that anybody said
    contents = [message.content for message in messages]
    if isinstance(value, str) and all(line.strip() in value for piece in contents for line in piece.split("\n")):
        return True  # a template may have left out what was thought
    whole = "\n".join((*contents, *(message.reasoning for message in messages if message.reasoning)))
    return all(text in whole for text in texts)


def outcome_of(row: Row) -> bool | None:
    """Return whether an answer was a good one, by an outcome column of the row."""
    for name, good, bad in _outcome_columns(tuple(row)):
        value = row[name]
        if isinstance(value, str | int | float):
            word = str(value).strip().lower().removesuffix(".0")
            if word in good or word in bad:
                return word in good
    return None


@lru_cache(512)
def _outcome_columns(names: tuple[str, ...]) -> tuple[tuple[str, frozenset[str], frozenset[str]], ...]:
    """Return columns with the outcome of an answer, and the values of a failure."""
    return tuple(
        (name, frozenset(outcome["good"]), frozenset(outcome["bad"]))
        for name in names
        for outcome in OUTCOMES
        if plain_name(name) in outcome["names"]
    )


def system_of(row: Row) -> Any:
    """Return the system prompt in its own column."""
    name = first_of(row, SYSTEM)
    return row[name] if name else None


def tools_of(row: Row) -> Any:
    name = first_of(row, TOOLS)
    return row[name] if name else None


def thoughts_of(row: Row) -> str | None:
    """Return the reasoning before the answer, from its own column."""
    name = first_of(row, THOUGHTS)
    value = row[name] if name else None
    return value if isinstance(value, str) and value.strip() else None

"""The one way from a row to its conversation: its format, and what no format of many programs may read."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hivetune.data.columns import QUESTIONS, leaves_out, plain_row, unexplained
from hivetune.data.formats import formats_with
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, objects, one_of
from hivetune.data.pieces.session import read_session
from hivetune.data.reasons import RowRefused

_BETTER = ("response_j", "preferred", "selected", "accepted", "preferred_output")
_WORSE = ("rejected", "response_k", "dispreferred", "worse_", "non_preferred_output")
# Columns of a chat's single message, with its text; a text beside one of them is no document.
_SPEAKERS = ("role", "sender", "speaker", "from", "author_role")
_MESSAGE_KIND = re.compile(
    r"(?:user|human|assistant|ai|bot|agent|customer|tool|command|function|reasoning|thinking)[_. -]?"
    r"(?:message|msg|utterance|input|output|response|text|call|result)?|say|ask|message",
    re.I,
)
_PART_KINDS = ("text", "input_text", "output_text", "summary_text", "reasoning", "thinking", "thought")
_MESSAGE_COLUMNS = ("id", "message_id", "session_id", "time")
_SPOKEN = ("text", "content", "message", "body", "value")


_MEDIA_TAG = re.compile(
    r"<(img|audio|video)>[^<\n]{3,}</\1>|\A\s*<(?:image|video|audio)>|<(?:image|video|audio)>\s*\Z"
    r"|<\|(?:vision_start|image_pad|video_pad|image(?:_\d+)?)\|>"
)


def read_conversation(row: Row, *, mapped: bool = False) -> Conversation:
    """Return the conversation of `row`, by the first format that recognises it. `mapped`: the user mapped the columns,
    so only these are read.

    Raises RowRefused: unknown-layout, unexplained-column, or the problem with the row.
    """
    row = plain_row(row)
    if "hivetune_session" in row:
        return read_session(row)
    formats = formats_with(tuple(row))
    for layout in formats:
        if layout.rank == 0 and (conversation := layout.conversation(row)) is not None:
            return conversation
    if (sides := preference_columns(row)) is not None:
        fact = f"{sides[0]} and {sides[1]} are for preference training"
        raise RowRefused("preference-row", f"{fact}: learn.use: [sft, pairs], or --columns {_preferred(row, sides[0])}")
    layout, conversation = _read(row, [layout for layout in formats if layout.rank > 0])
    for message in conversation.messages:  # data sets for other models point to an image, a sound or a film
        if message.role == "user" and "<" in message.content and (tag := _MEDIA_TAG.search(message.content)):
            raise RowRefused("unsupported-content", f"the text holds {tag.group()[:40]!r}: only text can be learned")
    column = None if mapped else unexplained(row, layout, conversation)
    if column is not None:
        example = "messages=messages" if "messages" in layout.explains else "prompt=...,completion=..."
        example = "text=text (whole texts) or prompt=text,completion=..." if layout.asks else example
        fact = f"{column[:40]!r} looks like content, and the layout {layout.name} has no place for it"
        hint = f"{fact}: name the columns to learn from, as in --columns {example}"
        raise RowRefused("unexplained-column", hint)
    if not mapped and leaves_out(row, layout, conversation):
        return conversation._replace(changed=(*conversation.changed, "left-out-columns"))
    return conversation


def _read(row: Row, formats: Sequence[Format]) -> tuple[Format, Conversation]:
    """Return the first of these formats that reads a row, and what it reads. Raise RowRefused: none does."""
    for layout in formats:
        if layout.asks:
            _refuse_single_message(row)
        if (conversation := layout.conversation(row)) is not None:
            return layout, conversation
    _refuse_single_message(row)
    raise _unknown(row)


@lru_cache(512)
def _preferences(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns of better and of worse answers, under all the names that data sets use."""
    better = tuple(name for name in names if name.startswith(("chosen", "better_")) or name in _BETTER)
    worse = tuple(name for name in names if name.startswith(_WORSE))
    good = tuple(name for name in names if name.startswith("good_") and f"bad_{name[5:]}" in names)
    return (*better, *good), (*worse, *(f"bad_{name[5:]}" for name in good))


def preference_columns(row: Row) -> tuple[str, str] | None:
    """Return the columns of a better and of a worse answer, where a row with plain names has both."""
    sides = _preferences(tuple(row))
    if not all(sides):
        return None
    better, worse = (
        [name for name in some if row[name] not in (None, "", []) and not isinstance(row[name], int | float)]
        for some in sides
    )
    return (better[0], worse[0]) if better and worse else None


def _answers(turn: Any) -> bool:
    return one_of(turn, "role", "from") in ("assistant", "gpt")


def _preferred(row: Row, column: str) -> str:
    """Return the part of a `--columns` line that reads the better answer; `...` if its question is unclear."""
    better = row[column]
    spoken = objects(better) or []
    if len(spoken) > 1 and not _answers(spoken[0]) and _answers(spoken[-1]):
        return f"messages={column}"  # it also contains its question
    if isinstance(row.get("input"), dict) and isinstance(row["input"].get("messages"), list):
        return f"prompt=input.messages,completion={column}"
    turns = [name for name in ("messages", "conversations", "prompt") if isinstance(row.get(name), list)]
    answers = isinstance(better, list) and all(map(_answers, better))
    if turns and (answers or isinstance(better, str | dict)):
        return f"messages={turns[0]},completion={column}"  # the question is their last turn
    texts = [name for name in QUESTIONS if isinstance(better, str) and isinstance(row.get(name), str)]
    question = texts[0] if texts else "..."  # what is no text may hold the question too
    return f"prompt={question},completion={column}"


def _unknown(row: Row) -> RowRefused:
    """Return the refusal of a row of no layout, or of one half of a batch."""
    if "custom_id" not in row:
        names = ", ".join(str(key)[:30] for key in list(row)[:8]) or "none"
        unknown = f"columns {names}: none is known to ask or to answer"
        return RowRefused("unknown-layout", f"{unknown}; name those that do: --columns prompt=...,completion=...")
    if row.get("body") or row.get("params"):
        return RowRefused("no-answer", "a question of a batch: give the file with its answers too")
    return RowRefused("earlier-turns-missing", "an answer of a batch: give the file with its questions too")


def _refuse_single_message(row: Row) -> None:
    kind = row.get("type")
    speaks = isinstance(kind, str) and _MESSAGE_KIND.fullmatch(kind) is not None
    speaker = next((name for name in _SPEAKERS if isinstance(row.get(name), str)), "type" if speaks else None)
    spoken = next((name for name in _SPOKEN if isinstance(row.get(name), str)), None)
    if speaker and spoken:
        raise RowRefused("one-message", f"the columns {speaker} and {spoken}: one message of a conversation")
    if spoken is None:
        return
    if kind in _PART_KINDS and any(name in row for name in _MESSAGE_COLUMNS):
        raise RowRefused("one-message", f"a part of type {kind!r} of a message that is in another row or file")

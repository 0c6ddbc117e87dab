"""The one way from a row to its conversation: its format, and what no format of many programs may read."""

import re
from functools import lru_cache
from typing import Any

from hivetune.data.columns import QUESTIONS, leaves_out, plain_row, unexplained
from hivetune.data.formats import read_record, record_format
from hivetune.data.formats.callback_log import event_in
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.rendered import spoken_turns
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
    layout = record_format(row)
    if layout is not None and layout.rank == 0:
        return read_record(layout, row)
    _refuse_preference(row)
    if layout is None or layout.asks:
        _refuse_single_message(row)
    if layout is None:
        raise _batch_half_refusal(row) if "custom_id" in row else _of_unknown_layout(row)
    conversation = read_record(layout, row)
    _refuse_media_tags(conversation)
    column = None if mapped else unexplained(row, layout, conversation)
    if column is not None:
        raise RowRefused("unexplained-column", _advice(layout, column))
    if not mapped and leaves_out(row, layout, conversation):
        return conversation._replace(changed=(*conversation.changed, "left-out-columns"))
    return conversation


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


def _refuse_preference(row: Row) -> None:
    columns = preference_columns(row)
    if columns is not None:
        fact = f"{columns[0]} and {columns[1]} are for preference training"
        better = row[columns[0]]
        line = f"{_question_of_preference(row, better)},completion={columns[0]}"
        line = f"messages={columns[0]}" if _is_whole(better) else line
        raise RowRefused("preference-row", f"{fact}: learn: [sft, pairs], or --columns {line}")


def _is_whole(better: Any) -> bool:
    """Return whether the better answer also contains its question."""
    turns = (spoken_turns(better.strip()) or []) if isinstance(better, str) else objects(better) or []
    return len(turns) > 1 and not _answers(turns[0]) and _answers(turns[-1])


def _answers(turn: Any) -> bool:
    return one_of(turn, "role", "from") in ("assistant", "gpt")


def _question_of_preference(row: Row, better: Any) -> str:
    """Return the part of a `--columns` line for the question; `...` if it is unclear."""
    if isinstance(row.get("input"), dict) and isinstance(row["input"].get("messages"), list):
        return "prompt=input.messages"
    turns = [name for name in ("messages", "conversations", "prompt") if isinstance(row.get(name), list)]
    answers = isinstance(better, list) and all(map(_answers, better))
    if turns and (answers or isinstance(better, str | dict)):
        return f"messages={turns[0]}"  # the question is their last turn
    texts = [name for name in QUESTIONS if isinstance(better, str) and isinstance(row.get(name), str)]
    return f"prompt={texts[0]}" if texts else "prompt=..."  # what is no text may hold the question too


def _refuse_single_message(row: Row) -> None:
    kind = row.get("type")
    speaks = isinstance(kind, str) and _MESSAGE_KIND.fullmatch(kind) is not None
    speaker = next((name for name in _SPEAKERS if isinstance(row.get(name), str)), "type" if speaks else None)
    spoken = next((name for name in _SPOKEN if isinstance(row.get(name), str)), None)
    if speaker and spoken:
        raise RowRefused("one-message", f"the columns {speaker} and {spoken}: one message of a conversation")
    if spoken is None:
        return
    if (event := event_in(row)) is not None:
        raise RowRefused("one-message", f"an event {event!r} of a log: what was asked or answered, and not both")
    if kind in _PART_KINDS and any(name in row for name in _MESSAGE_COLUMNS):
        raise RowRefused("one-message", f"a part of type {kind!r} of a message that is in another row or file")


def _of_unknown_layout(row: Row) -> RowRefused:
    names = ", ".join(str(key)[:30] for key in list(row)[:8]) or "none"
    unknown = (
        f"columns {names}: none is known to ask or to answer; name those that do: --columns prompt=...,completion=..."
    )
    return RowRefused("unknown-layout", unknown)


def _batch_half_refusal(row: Row) -> RowRefused:
    if row.get("body") or row.get("params"):
        return RowRefused("no-answer", "a question of a batch: give the file with its answers too")
    return RowRefused("earlier-turns-missing", "an answer of a batch: give the file with its questions too")


def _refuse_media_tags(conversation: Conversation) -> None:
    """Raise RowRefused for texts that point to an image, a sound or a film, as data sets for such models write them."""
    for message in conversation.messages:
        if message.role == "user" and "<" in message.content and (tag := _MEDIA_TAG.search(message.content)):
            raise RowRefused("unsupported-content", f"the text holds {tag.group()[:40]!r}: only text can be learned")


def _advice(layout: Format, column: str) -> str:
    example = "messages=messages" if "messages" in layout.explains else "prompt=...,completion=..."
    if layout.asks:
        example = "text=text (whole texts) or prompt=text,completion=..."
    return (
        f"{column[:40]!r} looks like content, and the layout {layout.name} has no place for it: name the columns to "
        f"learn from, as in --columns {example}"
    )

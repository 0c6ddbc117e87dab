"""Reads a row by the first format that recognises it."""

from collections.abc import Mapping

from hivetune.data.columns import plain_row
from hivetune.data.formats import formats_with
from hivetune.data.pieces.said import Conversation, Row
from hivetune.data.pieces.session import read_session
from hivetune.data.reasons import RowRefused

_SPEAKERS, _SPOKEN = ("role", "sender", "speaker", "from"), ("content", "text", "message", "body", "value")
_MAX_NAMED, _MAX_CHARS = 8, 30


def read_conversation(row: Row) -> Conversation:
    """Return the conversation of `row`. Raise RowRefused: unknown-layout, or the problem with the row."""
    named, row = row, plain_row(row)
    if "hivetune_session" in row:
        return read_session(row)
    if row.get("chosen") not in (None, "", []) and row.get("rejected") not in (None, "", []):
        hint = "learn: [sft, pairs] learns from both; --columns prompt=...,completion=chosen from the better one"
        raise RowRefused("preference-row", hint)
    for form in formats_with(tuple(row)):
        if (conversation := form.read(row)) is not None:
            return conversation
    raise _unknown(row, named)


def _unknown(row: Mapping[str, object], named: Mapping[str, object]) -> RowRefused:
    """Return the refusal of a row of no format, of one message, or of one half of a batch. `named`: with the names that
    the file has.
    """
    if "custom_id" in row and (row.get("body") or row.get("params")):
        return RowRefused("no-answer", "a question of a batch: give the file with its answers too")
    if "custom_id" in row:
        return RowRefused("earlier-turns-missing", "an answer of a batch: give the file with its questions too")
    speaker = next((name for name in _SPEAKERS if isinstance(row.get(name), str)), None)
    spoken = next((name for name in _SPOKEN if isinstance(row.get(name), str | list)), None)
    if speaker and spoken:
        return RowRefused("one-message", f"the columns {speaker} and {spoken}: one message of a conversation")
    names = ", ".join(str(name)[:_MAX_CHARS] for name in list(named)[:_MAX_NAMED]) or "none"
    fact = f"no prompt or answer column recognised among {names}"
    return RowRefused("unknown-layout", f"{fact}; map yours: --columns prompt=...,completion=...")

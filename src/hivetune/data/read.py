"""The reading of one row into an Example. Pure."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from hivetune.data.columns import extract, facts_in, plain_name, plain_row
from hivetune.data.formats import claude_code, codex, format_named, read_conversation
from hivetune.data.judged import TwoAnswers, only_last_answer, read_corrected, read_preference
from hivetune.data.mapping import (
    CONTENT,
    MAX_NAMED,
    OF_ANSWERS,
    OWN,
    columns_read,
    is_turn_table,
    map_columns,
    maps_content,
    near_column,
    write_columns,
)
from hivetune.data.pieces.answers import refuse_cut_row, refuse_pieces
from hivetune.data.pieces.format import Conversation
from hivetune.data.pieces.rendered import with_thoughts_apart
from hivetune.data.pieces.sessions import ASSISTANT, SESSION
from hivetune.data.pieces.turns import is_conversation, without_padding
from hivetune.data.pieces.values import Row, parsed
from hivetune.data.raw import GATEWAY, RawRow
from hivetune.data.reasons import RowRefused, not_encodable, not_utf8
from hivetune.records import Example, Message, Rendered

_MARK = "\ufeff"  # of the byte order
_STRAYS = (_MARK, "\\ufeff", "\\uFEFF", "\\u0000")  # also as JSON writes them
EMPTY: tuple[Any, ...] = (None, "", [], {})
QUARANTINE_KEY = "hivetune_quarantine"
_UNTRUSTED_ORIGINS = ("tool", "web")
# Of these a line of a session has one: asking its programs about every row took longer than parsing it.
_OF_SESSION_LINES = frozenset(("type", "message", "instructions"))


class NotJson(ValueError):
    """Raised for text that Python's parser accepts but JSON forbids: NaN, Infinity, or a key with two values."""


def refuse_constant(name: str) -> None:
    """Raise NotJson for NaN and Infinity, which Python's json and others write."""
    raise NotJson(f"JSON has no {name}: write null, or leave the field out")


def unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    """Return the object of these pairs. Raise NotJson for a key with two values."""
    row = dict(pairs)
    if len(row) < len(pairs) and (key := next((key for key, value in pairs if row[key] != value), None)) is not None:
        raise NotJson(f"the key {key!r} has two values: keep one of them")
    return row


_decode = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=unique_keys).decode


def parse_row(payload: bytes) -> Row:
    """Return the JSON object in `payload`; for a line of a quarantine file, the row in it. Raise RowRefused."""
    return _parsed_row(row_text(payload))


def row_text(payload: bytes) -> str:
    """Return a row without a byte order mark. Raise RowRefused if it is not UTF-8."""
    if b"\0" in payload:
        raise RowRefused("bad-characters", "the row has a NUL byte: part of the file is lost, or the file is binary")
    try:
        return payload.decode().removeprefix(_MARK)
    except UnicodeDecodeError as error:
        raise not_utf8(payload[error.start], payload[: error.start].decode()) from None


def _parsed_row(text: str) -> Row:
    try:
        value = _decode(text)
    except RecursionError:
        raise RowRefused("bad-json", "the JSON is nested too deeply: flatten the row") from None
    except (json.JSONDecodeError, NotJson) as error:
        rest = text[error.pos :][:20] if isinstance(error, json.JSONDecodeError) else ""
        is_more = str(error).startswith("Extra data")  # without its place, so that such rows are told as one
        hint = f"Extra data behind the object: {rest!r}; write one object a line" if is_more else str(error)
        raise RowRefused("bad-json", hint) from None
    except ValueError:
        raise RowRefused(
            "bad-json", f"a number has more than {sys.get_int_max_str_digits():,} digits: write it as a string"
        ) from None
    if isinstance(value, str):
        value = parsed(value)  # a row that was written as JSON twice
    if isinstance(value, list) and is_conversation(value):
        return {"messages": value}
    if isinstance(value, dict) and QUARANTINE_KEY in value:
        value = value.get("row")
        if isinstance(value, str):
            return parse_row(value.encode("utf-8", "surrogatepass"))
    if not isinstance(value, dict):
        raise RowRefused("bad-json", 'the row is not an object: write each row as {"prompt": ..., "completion": ...}')
    return value


Note = tuple[str, str]  # a reason for a change, and what was changed where


@dataclass(slots=True)
class ExaminedRow:
    """A row as an Example, to which each stage of its preparation adds its results (prepare/examine.py).

    The example has no id before redaction, because redaction may still change its text. `changed`: what was changed, as
    keys of REASONS or REWRITTEN. `views` is empty without a model. `missing`: fields that the user mapped to a column
    which the row does not have. `late`: unread columns that the first rows of its file do not have, with their values.
    """

    raw: RawRow
    layout: str
    example: Example
    changed: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    views: tuple[Rendered, ...] = ()
    worse: Rendered | None = None
    missing: tuple[str, ...] = ()
    late: tuple[tuple[str, Any], ...] = ()


def unread_columns(row: Row, layout: str, columns: Mapping[str, str]) -> list[str]:
    """Return the columns of a row that have a value but were not read and are not facts about the row."""
    form = format_named(layout)
    # Rows that were made of a file's lines have the columns of no line.
    if SESSION in row or not (form or maps_content(columns)):
        return []
    read = columns_read(row, columns)
    if form is not None and not maps_content(columns):
        # Of columns that mean the same, the first with a value is read, and the others are not.
        plain = plain_row(row)
        read |= {*form.reads, *(next((n for n in names if plain.get(n) not in EMPTY), "") for names in form.one_of)}
    known = {*read, *facts_in(row), *OF_ANSWERS, *OWN}
    return [name for name, value in row.items() if value not in EMPTY and known.isdisjoint((name, plain_name(name)))]


def refuse_session_line(row: Row) -> None:
    """Raise RowRefused for one line of a coding agent's session, which is not a row without the other lines."""
    if not _OF_SESSION_LINES.isdisjoint(row) and (claude_code.is_line(row) or codex.is_line(row)):
        raise RowRefused("unknown-layout", "the row is one line of a coding agent's session: check the whole file")


def read_example(raw: RawRow, columns: Mapping[str, str], *, pairs: bool = False) -> ExaminedRow:
    """Return one row, by its format. `pairs`: a better and a worse answer are read too. Raise RowRefused."""
    if raw.problem is not None:
        raise raw.problem
    text = row_text(raw.payload)
    row = whole = _parsed_row(text)
    refuse_session_line(row)
    refuse_cut_row(row)
    if raw.source.startswith(f"{GATEWAY}:"):
        columns = {}  # they name the columns of the user's files, beside which our gateway's rows have their own form
    missing: Mapping[str, str] = {}
    if columns and not (SESSION in row and is_turn_table(columns)):
        row, missing = map_columns(row, columns)
    if "assistant" in columns and "messages" not in columns:
        row = {**row, ASSISTANT: columns["assistant"]}
    try:
        two = read_corrected(row) or (read_preference(row) if pairs else None)
        conversation = read_conversation(row) if two is None else two.conversation
    except RowRefused as refused:
        if refused.reason != "unknown-layout":
            raise
        if maps_content(columns):
            raise _unmapped(whole, row, columns, missing) from None
        if raw.file is None or not raw.file.suggestion:
            raise
        # The mapping that fits the whole file goes before one for this row.
        raise RowRefused(refused.reason, f"{refused.hint.partition('; map yours')[0]}; {raw.file.suggestion}") from None
    if raw.file is not None and raw.file.refusal and is_table(conversation, columns):
        raise RowRefused("unread-column", raw.file.refusal)
    if any(stray in text for stray in _STRAYS):
        conversation = _without_strays(conversation)
    conversation = without_padding(conversation)
    conversation = conversation._replace(messages=tuple(map(with_thoughts_apart, conversation.messages)))
    example = _example(raw, row, conversation, columns)
    if "success" in columns and example.success is None and row.get("success") not in (None, ""):
        hint = f"{columns['success']} is {str(row['success'])[:40]!r}: neither true nor false, yes nor no, 1 nor 0"
        raise RowRefused("unread-outcome", hint)
    refuse_pieces(example.messages[-1].content)
    read = ExaminedRow(raw, conversation.layout, _judged(example, two), conversation.changed, missing=tuple(missing))
    known = whole if raw.file is None else raw.file.columns
    if any([name not in known and value not in EMPTY for name, value in whole.items()]):
        unread = unread_columns(whole, read.layout, columns)
        read.late = tuple((name, whole[name]) for name in unread if name not in known)
    return read


def _unmapped(row: Row, mapped: Row, columns: Mapping[str, str], missing: Mapping[str, str]) -> RowRefused:
    """Return why a mapping does not fit a row: a column that it lacks, or that is empty."""
    for field in (field for field in CONTENT if field in columns):
        if field in missing:
            hint = f"the row has no column {missing[field]!r}; {near_column(row, missing[field])}"
            return RowRefused("unknown-layout", hint)
        if mapped.get(field) in (None, ""):
            return RowRefused("empty-turn", f"the column {columns[field]!r} is empty: fill it in or delete the row")
    others = ", ".join(name for name in list(row)[:MAX_NAMED] if name not in columns.values()) or "none"
    half = f"the mapping {write_columns(columns)} needs prompt and completion, or messages"
    return RowRefused("unknown-layout", f"{half}; other columns: {others}")


def is_table(conversation: Conversation, columns: Mapping[str, str]) -> bool:
    """Return whether a row was read by the names of its columns alone, ours or those that the user named."""
    form = format_named(conversation.layout)
    return maps_content(columns) or (form is not None and form.table)


def _without_strays(conversation: Conversation) -> Conversation:
    """Return the conversation without byte order marks, and with U+FFFD for NUL in the results of tools."""
    # Marks were pasted with files. A program may print bytes, and bytes that are not text are read as U+FFFD
    # everywhere.
    nul = {"tool": "\ufffd"}
    texts = [m.content.replace(_MARK, "").replace("\0", nul.get(m.role, "\0")) for m in conversation.messages]
    messages = tuple(replace(m, content=text) for m, text in zip(conversation.messages, texts, strict=True))
    changed = (*conversation.changed, *(["stray-characters"] if messages != conversation.messages else []))
    return conversation._replace(messages=messages, changed=changed)


def _judged(example: Example, two: TwoAnswers | None) -> Example:
    """Return the row with its judgement on the last turn of the answer only."""
    is_disliked = example.feedback is not None and example.feedback < 0
    if two is not None:
        feedback = None if is_disliked else example.feedback  # a bad rating belongs to the worse answer
        example = replace(example, lesson=two.lesson, worse=two.worse, success=None, feedback=feedback)
    elif example.success is False or is_disliked:
        example = replace(example, lesson="failure")
    elif example.answered_by is None or example.feedback is None:
        return example
    return replace(example, messages=only_last_answer(example.messages))


def _example(raw: RawRow, row: Row, conversation: Conversation, columns: Mapping[str, str]) -> Example:
    facts = extract(row)._asdict()
    del facts["own_id"]
    # The store's values win over the row's: they may come from a column map of its own.
    facts |= {name: value for name, value in (raw.stored or {}).items() if name in facts and name not in columns}
    success = facts.pop("success")
    checker, synthesis = row.get("checker"), row.get("synth")  # the latter of `data synth`
    # What the gateway captured (serve/capture.py); other data may have a column `client`, too.
    captured = "answered_by" in row or "rejected_answer" in row
    return Example(
        id="",
        source=raw.source,
        messages=conversation.messages,
        tools=conversation.tools,
        success=None if success is None else bool(success),
        checker=checker if isinstance(checker, dict) else None,
        untrusted=conversation.untrusted or row.get("untrusted") is True or row.get("origin") in _UNTRUSTED_ORIGINS,
        maker=str(synthesis.get("maker") or "unknown") if isinstance(synthesis, dict) else None,
        answered_by=row["answered_by"] if isinstance(row.get("answered_by"), str) else None,
        client=row["client"] if captured and isinstance(row.get("client"), str) else None,
        **facts,
    )


def content_id(messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()) -> str:
    """Return a hash (32 hex digits) of everything in a row that is trained on or read as context.

    Raise RowRefused("bad-characters") for lone surrogates, which UTF-8 can't encode.
    """
    pieces = []
    for m in messages:
        pieces.append(f"{m.role} {len(m.content)} {m.content}")
        if m.tool_calls or m.weight != 1 or m.tool_call_id or m.name or m.reasoning:
            extra = [m.weight, m.name, m.tool_call_id, [dict(call) for call in m.tool_calls], m.reasoning]
            pieces.append(json.dumps(extra, ensure_ascii=False, sort_keys=True))
    if tools:
        pieces.append(json.dumps([dict(tool) for tool in tools], ensure_ascii=False, sort_keys=True))
    try:
        return blake2b("\n".join(pieces).encode(), digest_size=16).hexdigest()
    except UnicodeEncodeError as error:
        raise not_encodable(error) from None


def judged_hash(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
    """Return a 64-bit hash of an answer and all turns before it, whichever of them are trained."""
    trained = tuple(replace(m, weight=1.0) if m.weight != 1 else m for m in messages)
    return int(content_id(trained, tuple(tools))[:16], 16)

"""From a row as it came to an Example. Pure."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from hivetune.data.columns import CHOICE, outcome_of
from hivetune.data.conversation import read_conversation
from hivetune.data.formats import claude_code, codex
from hivetune.data.judged.answers import (
    TwoAnswers,
    only_last_answer,
    read_corrected,
    read_preference,
    with_answers_apart,
)
from hivetune.data.mapping import map_columns, maps_content, missing_column, missing_fields, with_user_columns
from hivetune.data.pieces.answers import refuse_cut_row
from hivetune.data.pieces.fields import as_success, extract
from hivetune.data.pieces.said import BYTE_ORDER_MARK, Conversation, Row, clean_texts, parsed
from hivetune.data.pieces.session import ASSISTANT
from hivetune.data.pieces.streams import refuse_pieces
from hivetune.data.pieces.turns import is_conversation
from hivetune.data.raw import RawRow, Source
from hivetune.data.reasons import RowRefused, not_utf8
from hivetune.records import Example, Message, Rendered

WRITTEN_MARKS = ("\\ufeff", "\\uFEFF")
NUL_ESCAPE = "\\u0000"
QUARANTINE_KEY = "hivetune_quarantine"
UNTRUSTED_ORIGINS = ("tool", "web")
# What a layout says of a row that it does not know; any other reason is a fault of the row.
NOT_KNOWN = ("unknown-layout", "unexplained-column", "unknown-role", "wrong-type", "no-answer", "role-order")
_IN_SESSION_LINES = frozenset(("type", "message", "instructions"))  # of which a line of a session has one
WHOLE_ROWS = ("text",)  # layouts in which nothing is asked
KTO_LABELS = ("label", "kto_tag")  # as TRL and LLaMA-Factory name it


class NotJson(ValueError):
    """What Python's parser would take: a number that JSON lacks, or the last of two values of a key."""


def refuse_constant(name: str) -> None:
    """Raise NotJson for NaN and Infinity, which Python's json and others write."""
    raise NotJson(f"JSON has no {name}: write null, or leave the field out")


def unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    """Return the object of these pairs. Raise NotJson for a key with two values."""
    row = dict(pairs)
    if len(row) < len(pairs):
        for key, value in pairs:
            if row[key] != value:
                raise NotJson(f"the key {key!r} has two values: keep one of them")
    return row


_decode = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=unique_keys).decode


def parse_row(payload: bytes) -> Row:
    """Return the JSON object in `payload`; a row from a quarantine file comes out of its wrapper. Raise RowRefused."""
    return _parsed_row(row_text(payload)[0])


def row_text(payload: bytes) -> tuple[str, tuple[str, ...]]:
    """Return (text without a byte order mark, reasons of severity warn). Raise RowRefused if it is not UTF-8."""
    if b"\0" in payload:
        raise RowRefused("nul-byte")
    try:
        text = payload.decode()
    except UnicodeDecodeError as error:
        raise _not_text(payload, error) from None
    marked = BYTE_ORDER_MARK in text or WRITTEN_MARKS[0] in text or WRITTEN_MARKS[1] in text
    return text.removeprefix(BYTE_ORDER_MARK), ("byte-order-mark",) if marked else ()


def _parsed_row(text: str) -> Row:
    try:
        value = _decode(text)
    except RecursionError:
        raise RowRefused("too-deep") from None
    except (json.JSONDecodeError, NotJson) as error:
        raise RowRefused("bad-json", str(error)) from None
    except ValueError:
        raise RowRefused("bad-json", f"a number has more than {sys.get_int_max_str_digits():,} digits") from None
    if isinstance(value, str):
        value = parsed(value)  # a row that was written as JSON twice
    if isinstance(value, list) and is_conversation(value):
        return {"messages": value}
    value = _object(value)
    if QUARANTINE_KEY in value:
        inner = value.get("row")
        return parse_row(inner.encode("utf-8", "surrogatepass")) if isinstance(inner, str) else _object(inner)
    return with_answers_apart(value) if "chosen" in text else value


def _object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise RowRefused("not-an-object")
    return value


def _not_text(payload: bytes, error: UnicodeDecodeError) -> RowRefused:
    """Return why these bytes are no UTF-8: halves of characters, or another encoding."""
    try:
        text = payload.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        if error.reason == "unexpected end of data":
            return RowRefused("bad-utf8", f"byte {error.start + 1} of the row: the text was cut inside a character")
        return not_utf8(payload[error.start], payload[: error.start].decode())
    for i, character in enumerate(text):
        if "\udc80" <= character <= "\udcff":
            return not_utf8(ord(character) - 0xDC00, text[:i])
    return RowRefused("lone-surrogate")


Note = tuple[str, str]  # a reason for a change, and what was changed where


@dataclass(slots=True)
class ExaminedRow:
    """A row as an Example, to which each stage of its preparation adds its results (prepare/stages.py).

    The example has no id before redaction, which may still change its text. `changed`: reasons of severity warn.
    `views` is empty without a model.
    `missing`: fields whose column, as the user named it, the row does not have.
    """

    raw: RawRow
    layout: str
    example: Example
    changed: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    views: tuple[Rendered, ...] = ()
    worse: Rendered | None = None
    missing: tuple[str, ...] = ()


def refuse_session_line(row: Row) -> None:
    """Raise RowRefused for one line of a coding agent's session, which is no row without the other lines."""
    if not _IN_SESSION_LINES.isdisjoint(row) and any(program.is_line(row) for program in (claude_code, codex)):
        raise RowRefused("session-line")


def read_example(raw: RawRow, columns: Mapping[str, str], *, pairs: bool = False) -> ExaminedRow:
    """Return one row, by its layout. `pairs`: a better and a worse answer are read too. Raise RowRefused with the
    reason.
    """
    if raw.problem is not None:
        raise raw.problem
    text, changed = row_text(raw.payload)
    row = _parsed_row(text)
    refuse_session_line(row)
    refuse_cut_row(row)
    if "assistant" in columns and not maps_content({name: "" for name in columns if name != "assistant"}):
        row = {**row, ASSISTANT: columns["assistant"]}
        columns = {name: column for name, column in columns.items() if name != "assistant"}
    missing: tuple[str, ...] = ()
    if columns:
        missing = missing_fields(row, columns)
        row = map_columns(row, columns)
    mapped, two = maps_content(columns), None
    try:
        two = read_corrected(row, mapped=mapped) or (read_preference(row) if pairs else None)
        if two is not None:
            conversation = two.conversation
        else:
            conversation = read_conversation(row, mapped=mapped)
    except RowRefused as refused:
        if columns and refused.reason == "unknown-layout":
            raise missing_column(_parsed_row(text), columns) or refused from None
        if columns:
            raise with_user_columns(refused, columns) from None
        raise _with_advice(refused, raw.file.line if raw.file else "") from None
    if not columns and raw.file is not None:
        _refuse_by_file(row, conversation, raw.file)
    conversation = clean_texts(conversation, marked="byte-order-mark" in changed, nul=NUL_ESCAPE in text)
    stored = {name: value for name, value in (raw.stored or {}).items() if name not in columns}
    example = _example(raw.source, row, conversation, stored)
    refuse_pieces(example.messages[-1].content)
    example = _judged(example, two)
    return ExaminedRow(raw, conversation.layout, example, (*changed, *conversation.changed), missing=missing)


def _refuse_by_file(row: Row, conversation: Conversation, file: Source) -> None:
    """Raise RowRefused for a column without which equal questions have different answers, as other rows show."""
    if file.telling and file.telling in row and conversation.layout not in WHOLE_ROWS:
        hint = f"without {file.telling!r} equal questions have different answers: {file.line}"
        raise RowRefused("unread-column", hint)


def _judged(example: Example, two: TwoAnswers | None) -> Example:
    """Return the row with its judgement on the last turn of the answer only. A rating of two answers belongs to the
    worse one.
    """
    if two is not None:
        feedback = None if example.feedback is not None and example.feedback < 0 else example.feedback
        messages = only_last_answer(example.messages)
        return replace(example, lesson=two.lesson, worse=two.worse, success=None, feedback=feedback, messages=messages)
    if example.success is False or (example.feedback is not None and example.feedback < 0):
        return replace(example, lesson="failure", messages=only_last_answer(example.messages))
    if example.answered_by is not None and example.feedback is not None:
        return replace(example, messages=only_last_answer(example.messages))
    return example


def _with_advice(refused: RowRefused, line: str) -> RowRefused:
    """Return the reason with the suggested mapping of the row's file, if there is one."""
    if refused.reason not in NOT_KNOWN or not line:
        return refused
    hint = re.split(": (?:name |none is known|--columns )", refused.hint, maxsplit=1)[0]
    return RowRefused(refused.reason, f"{hint}: {line}")


def _example(source: str, row: Row, conversation: Conversation, stored: Mapping[str, Any]) -> Example:
    """Return the example. The store's values win over the row's: they may come from a column map of its own."""
    fields = extract(row)
    success = fields.success if "success" not in stored else bool(stored["success"])
    if success is None:
        success = _kto_label(row)
    if success is None and conversation.layout not in WHOLE_ROWS:
        success = outcome_of(row)
    if success is None and isinstance(row.get("result"), bool):
        success = row["result"]
    checker, synthesis = row.get("checker"), row.get("synth")  # the latter of `data synth`
    # What the gateway captured (serve/gateway/capture.py); other data may have a column `client`, too.
    captured = "answered_by" in row or "rejected_answer" in row
    return Example(
        id="",
        source=source,
        messages=conversation.messages,
        tools=conversation.tools,
        agent=stored.get("agent", fields.agent),
        category=stored.get("category", fields.category),
        session=stored.get("session", fields.session),
        user=stored.get("user", fields.user),
        time=stored.get("time", fields.time),
        success=success,
        feedback=stored.get("feedback", fields.feedback),
        checker=checker if isinstance(checker, dict) else None,
        untrusted=conversation.untrusted or row.get("untrusted") is True or row.get("origin") in UNTRUSTED_ORIGINS,
        maker=str(synthesis.get("maker") or "unknown") if isinstance(synthesis, dict) else None,
        answered_by=row["answered_by"] if isinstance(row.get("answered_by"), str) else None,
        client=row["client"] if captured and isinstance(row.get("client"), str) else None,
    )


def _kto_label(row: Row) -> bool | None:
    """Return whether an answer is a good one: a label that is true or false, or such a word, as in CSV, or a 0 or 1
    beside a question and one of its answers. Other labels are classes, which are the answer itself.
    """
    for name in KTO_LABELS:
        label = row.get(name)
        if isinstance(label, bool) or (isinstance(label, str) and label.strip().lower() in ("true", "false")):
            return as_success(label)
        is_mark = str(label) in ("0", "1") and {"question", "answer"} <= row.keys()
        # Choices among which it may be a number stand in a list.
        if is_mark and not any(isinstance(value, list | dict) or CHOICE.match(key) for key, value in row.items()):
            return as_success(label)
    return None


def content_id(messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()) -> str:
    """Return 32 hex digits over everything that is trained on or read: rows with equal ids teach the same.

    Raise RowRefused("lone-surrogate"): such text has no bytes.
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
    except UnicodeEncodeError:
        raise RowRefused("lone-surrogate") from None


def judged_hash(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
    """Return 64 bits of an answer and all before it, whichever turns are trained."""
    return int(
        content_id(tuple(m if m.weight == 1 else replace(m, weight=1.0) for m in messages), tuple(tools))[:16], 16
    )

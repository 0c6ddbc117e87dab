"""The one way from a row to its conversation: by its layout, and where none has a place for it, by its structure."""

from dataclasses import replace

from hivetune.data.pieces.attributes import nested
from hivetune.data.pieces.calls import call_in_columns
from hivetune.data.pieces.rendered import is_marked, is_rendered, turns_of
from hivetune.data.pieces.said import Conversation, Row, objects, parsed
from hivetune.data.pieces.turns import in_order, read_messages
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.made import made_of
from hivetune.data.rows.find.row import read_structure
from hivetune.data.rows.find.talk.transcripts import turns_behind_system, turns_in_text
from hivetune.data.rows.layouts.table import read_layout
from hivetune.records import Message

# What a layout says of a row that it does not know; any other reason is a fault of the row.
NOT_KNOWN = ("unknown-layout", "unexplained-column", "unknown-role", "wrong-type", "no-answer", "role-order")

PAIR = 2  # messages of a question and its answer


def read_conversation(row: Row, *, mapped: bool = False) -> Conversation:
    """The messages of `row`. `mapped`: the user named the columns, so others are left out at their word.

    Raises RowRefused: unknown-layout, unexplained-column, or what is wrong with the row.
    """
    try:
        found = read_layout(row, mapped=mapped)
        if mapped or found.layout != "text":
            return found
        return _spoken(found) if made_of(row) is None else read_structure(row)
    except RowRefused as refused:
        if refused.reason not in NOT_KNOWN or (mapped and "messages" not in row):
            raise
        try:
            return read_structure(row, mapped=mapped)
        except RowRefused as other:
            if not mapped and (told := _with_sides(row) or _with_call(row)) is not None:
                return read_conversation(told)
            known = refused.reason != "unknown-layout" or other.reason in NOT_KNOWN
            raise (refused if known else other) from None


def with_system_of_text(row: Row, said: Conversation) -> Conversation:
    """A question and its answer with the system prompt of the text that a template wrote of them, where the row keeps
    that, too.
    """
    if said.messages[0].role == "system" or len(said.messages) != PAIR:
        return said
    for text in row.values():
        if isinstance(text, str) and text.lstrip()[:1] in ("<", "[") and is_marked(text):
            turns = turns_of(text, whole=True) or []
            told = [turn["content"].strip() for turn in turns]
            if told[1:] == [message.content.strip() for message in said.messages] and turns[0]["role"] == "system":
                return said._replace(messages=(Message("system", turns[0]["content"]), *said.messages))
    return said


def with_written_message(said: Conversation) -> Conversation:
    """A conversation whose question is the list of one message, written as text, with what that message says."""
    first = said.messages[0]
    if first.role != "user" or first.content[:2] != "[{":
        return said
    inner = objects(parsed(first.content)) or []
    if len(inner) != 1 or set(inner[0]) != {"role", "content"} or inner[0]["role"] != "user":
        return said
    text = inner[0]["content"]
    return said._replace(messages=(replace(first, content=text), *said.messages[1:])) if isinstance(text, str) else said


def _with_sides(row: Row) -> Row | None:
    """A row of a table whose columns were made of what stood below `inputs` and `outputs` or the like."""
    heads = {name.partition(".")[0] for name in row if "." in name}
    asked, answered = heads & {"inputs", "input", "request"}, heads & {"outputs", "output", "response", "expected"}
    if not asked or not answered:
        return None
    sides = {name: value for name, value in row.items() if name.partition(".")[0] in asked | answered}
    rest = {name: value for name, value in row.items() if name not in sides}
    return {**rest, **nested({name: parsed(value) for name, value in sides.items()}, "")}


def _with_call(row: Row) -> Row | None:
    """A row that names a tool and its arguments in two columns, with the call as the answer."""
    found = call_in_columns(row)
    if found is None:
        return None
    call, columns = found
    return {**{name: value for name, value in row.items() if name not in columns}, "answers": [call]}


def _spoken(found: Conversation) -> Conversation:
    """A text alone, or its turns where speakers take turns in it. Raises RowRefused where a template wrote it and
    nobody can tell them.
    """
    if len(found.messages) > 1:
        return found
    text = found.messages[0].content
    turns = turns_in_text(text) or turns_behind_system(text)
    if turns is None and is_rendered(text):
        raise RowRefused("rendered-text")
    if turns is None:
        return found
    messages, changed = in_order(read_messages(turns, None))
    return found._replace(messages=messages, changed=("turns-from-text", *changed))

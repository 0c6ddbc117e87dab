"""The one way from a row to its conversation: by its layout, and where none has a place for it, by its structure."""

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.fields import plain_name
from hivetune.data.rows.find.made import made_of
from hivetune.data.rows.find.row import read_structure
from hivetune.data.rows.find.talk.transcripts import turns_in_text
from hivetune.data.rows.layouts.said import Conversation, Row, names, parsed
from hivetune.data.rows.layouts.table import read_layout
from hivetune.data.rows.layouts.turns import in_order, read_messages
from hivetune.data.rows.sessions.rendered import is_rendered
from hivetune.data.rows.traces.attributes import nested

# What a layout says of a row that it does not know; any other reason is a fault of the row.
NOT_KNOWN = ("unknown-layout", "unexplained-column", "unknown-role", "wrong-type", "no-answer", "role-order")

_TOOL_NAMES = names("tool tool_name function function_name")
_ARGUMENTS = names(
    "args arguments parameters params tool_args tool_arguments tool_input tool_params function_args function_arguments"
)


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
    tools = [name for name in row if plain_name(name) in _TOOL_NAMES]
    given = [name for name in row if plain_name(name) in _ARGUMENTS]
    if len(tools) != 1 or len(given) != 1:
        return None
    name, arguments = row[tools[0]], parsed(row[given[0]])
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(arguments, dict):
        return None
    kept = {key: value for key, value in row.items() if key not in (*tools, *given)}
    return {**kept, "answers": [{"name": name, "arguments": arguments}]}


def _spoken(found: Conversation) -> Conversation:
    """A text alone, or its turns where speakers take turns in it. Raises RowRefused where a template wrote it and
    nobody can tell them.
    """
    if len(found.messages) > 1:
        return found
    turns = turns_in_text(found.messages[0].content)
    if turns is None and is_rendered(found.messages[0].content):
        raise RowRefused("rendered-text")
    if turns is None:
        return found
    messages, changed = in_order(read_messages(turns, None))
    return found._replace(messages=messages, changed=("turns-from-text", *changed))

"""An agent's row: the task that it was given, and its output.

The columns are those of the table in docs/formats.md.
"""

from hivetune.data.columns import SYSTEM, TOOLS, system_of
from hivetune.data.pieces.fields import AGENT
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, first_of, text_of
from hivetune.data.pieces.turns import read_system
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_TASK = ("task", "input", "prompt", "query")


def read(row: Row) -> Conversation | None:
    holds = "output" in row or "result" in row or any(row.get(key) is not None for key in _TASK)
    if "command" in row or not holds:
        return None
    tasks = [text for key in _TASK if (text := text_of(row.get(key), key))]
    if not tasks:
        raise RowRefused("unknown-layout", "an agent's row needs a task or input beside its output")
    output = first_of(row, ("output", "result", "response"))
    if output is None or row[output] is None:
        raise RowRefused("no-answer", "the row has no output")
    asked = (*read_system(system_of(row)), Message("user", "\n".join(tasks)))
    return Conversation("agent", (*asked, Message("assistant", text_of(row[output], output))))


FORMAT = Format("agent", read, needs=frozenset(AGENT), rank=30, explains=frozenset((*SYSTEM, *TOOLS, *_TASK)))

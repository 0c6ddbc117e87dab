"""A question and the command that answers it, or what came of one.

The columns are those of the table in docs/formats.md.
"""

from hivetune.data.columns import SYSTEM, TOOLS, system_of
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, one_of, text_of
from hivetune.data.pieces.turns import read_system
from hivetune.records import Message

_QUESTION = ("user_query", "user_request", "input", "query")
_RESULT = ("result", "output")
_NEEDS = frozenset(("tool_used", "tool", "command"))


def read(row: Row) -> Conversation | None:
    """Return the row with its command as the answer. The result came from a machine, so it is never trained."""
    question = one_of(row, *_QUESTION)
    if question is None:
        return None
    command = row.get("command")
    if isinstance(command, str) and command.strip():
        answer, untrusted = command, False
    else:
        answer, untrusted = next((row[key] for key in _RESULT if row.get(key) is not None), ""), True
    messages = (
        *read_system(system_of(row)),
        Message("user", text_of(question, "user_query")),
        Message("assistant", text_of(answer, "result")),
    )
    return Conversation("tool", messages, untrusted=untrusted)


FORMAT = Format("tool", read, needs=_NEEDS, rank=31, explains=_NEEDS.union(SYSTEM, TOOLS, _RESULT))

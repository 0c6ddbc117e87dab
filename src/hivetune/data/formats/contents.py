"""Gemini's tuning rows: `contents` with parts, the system instruction beside them.

https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare
"""

from hivetune.data.columns import SYSTEM, TOOLS, tools_of
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import read_tools
from hivetune.data.pieces.said import Conversation, Row, names, one_of, parsed
from hivetune.data.pieces.session import BESIDE, ordered_conversation
from hivetune.data.pieces.turns import read_messages


def read(row: Row) -> Conversation:
    messages = read_messages(parsed(row["contents"]), parsed(one_of(row, "system_instruction", *SYSTEM)))
    return ordered_conversation("contents", messages, read_tools(tools_of(row)))


_READ = frozenset((*SYSTEM, *TOOLS, "contents", "system_instruction"))
FORMAT = Format("contents", read, needs=names("contents"), rank=21, explains=_READ, beside=BESIDE)

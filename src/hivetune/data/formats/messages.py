"""A list of messages with their roles, as OpenAI's fine-tuning files and most chat data sets have it. The answer may
stand in a column of its own where the list ends with a question.

https://platform.openai.com/docs/guides/supervised-fine-tuning and https://huggingface.co/docs/trl/dataset_formats
"""

import re
from dataclasses import replace

from hivetune.data.columns import REPLIES, SYSTEM, TOOLS, system_of
from hivetune.data.pieces.answers import read_answer
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import read_tools
from hivetune.data.pieces.said import Conversation, Row, first_of, names, one_of, parsed
from hivetune.data.pieces.session import BESIDE, TEXT_ANSWERS, ordered_conversation
from hivetune.data.pieces.turns import THOUGHT_KEYS, read_messages

_MAX_REPEATED = 200  # characters of what a question says of its answer


def read(row: Row) -> Conversation:
    messages = read_messages(parsed(row["messages"]), system_of(row))
    answer = first_of(row, ("response", *REPLIES, *TEXT_ANSWERS))
    changed: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    if messages[-1].role in ("user", "tool") and answer is not None and not _repeats(row, answer, messages[-1].content):
        answer_messages, changed = read_answer(row[answer])
        thoughts = next((name for name in THOUGHT_KEYS if isinstance(row.get(name), str) and row[name].strip()), None)
        if thoughts is not None and not answer_messages[0].reasoning:
            answer_messages = [replace(answer_messages[0], reasoning=row[thoughts]), *answer_messages[1:]]
        messages, used = [*messages, *answer_messages], (answer, *([thoughts] if thoughts else []))
    return ordered_conversation("messages", messages, read_tools(one_of(row, *TOOLS, "tool_config")), changed, used)


def _repeats(row: Row, column: str, question: str) -> bool:
    """Return whether a column is empty, or the question repeats it under the column's name: "reach the target 77"."""
    if row[column] in (None, ""):
        return True
    value = str(row[column]).strip()
    pattern = rf"{column}\W{{1,8}}{re.escape(value)}(?!\w)"
    return len(value) <= _MAX_REPEATED and re.search(pattern, question, re.I) is not None


_READ = frozenset((*SYSTEM, *TOOLS, "messages", "tool_config"))
FORMAT = Format("messages", read, needs=names("messages"), rank=20, explains=_READ, beside=BESIDE)

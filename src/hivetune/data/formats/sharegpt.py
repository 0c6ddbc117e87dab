"""A list of turns under another name than `messages`: ShareGPT's `conversations` with `from` and `value`, and its kin.
Texts alone take turns.

https://github.com/lm-sys/FastChat/blob/main/docs/training.md and
https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html
"""

import re

from hivetune.data.columns import SYSTEM, TOOLS, system_of, tools_of
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import read_tools
from hivetune.data.pieces.said import Conversation, Row, all_texts, objects, parsed
from hivetune.data.pieces.session import BESIDE, ordered_conversation
from hivetune.data.pieces.turns import read_messages
from hivetune.data.reasons import RowRefused

LISTS = ("conversations", "conversation", "chat", "dialogue", "dialog", "turns", "data", "history")

_TALKED = ("conversation", "conversations", "dialogue", "dialog")
_TURN_MARKS = (
    re.compile(r"\s*(?:问|問|提问|Q|Question|User|Human)\s*[:：]\s*", re.I),
    re.compile(r"\s*(?:答|回答|A|Answer|Assistant|Bot|AI)\s*[:：]\s*", re.I),
)
_SPEAKER = re.compile(r"\A\s*[^\W\d][\w .-]{0,30}:(\s?)")  # "Amanda: I baked cookies."


def read(row: Row) -> Conversation | None:
    column = _list_column(row)
    if column is None:
        return None
    turns = parsed(row[column])
    if all_texts(turns) and len(turns) > 1:
        # Some medical data sets mark each question and answer.
        marks = [_TURN_MARKS[i % 2].match(text) for i, text in enumerate(turns)]
        turns = [t[mark.end() :] for t, mark in zip(turns, marks, strict=True) if mark] if all(marks) else turns
        odd = len(turns) % 2 and column not in _TALKED  # the last one was not answered any more
        named = [_SPEAKER.match(turn) for turn in turns]
        if column == "turns" or odd or all(named) or any(turn_name and turn_name[1] for turn_name in named):
            raise RowRefused("unknown-role", f"{column}: texts that do not say who speaks")
        turns = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return ordered_conversation(
        "sharegpt", read_messages(turns, system_of(row)), read_tools(tools_of(row)), (), (column,)
    )


def _list_column(row: Row) -> str | None:
    """Return the column that is a list of turns."""
    turns = objects(row.get("paragraph"))
    if turns is not None and all({"q", "a"} <= turn.keys() for turn in turns):
        return "paragraph"
    for name in LISTS:
        if name in row and (name.startswith("conversation") or isinstance(parsed(row[name]), list)):
            return name if name != "history" or "trajectory" in row else None  # else what came before a question
    return None


_NEEDS, _READ = frozenset((*LISTS, "paragraph")), frozenset((*SYSTEM, *TOOLS))
FORMAT = Format("sharegpt", read, needs=_NEEDS, rank=22, explains=_READ, beside=BESIDE)

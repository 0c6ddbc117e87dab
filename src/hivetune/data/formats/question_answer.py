"""A question and its answer under any of the names in data/columns.toml, in many languages.

https://huggingface.co/datasets/openai/gsm8k is a set with these columns.
"""

from hivetune.data.columns import ANSWERED, ASKED, CONTEXT
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.pairs import EXPLAINED, read_pair
from hivetune.data.pieces.said import Conversation, Row, first_of


def recognise(row: Row) -> bool:
    return first_of(row, ASKED) not in (None, "input") and first_of(row, ANSWERED) is not None


def rows(row: Row) -> Conversation:
    return read_pair("question-answer", row, ASKED, ANSWERED, CONTEXT)


FORMAT = Format("question-answer", recognise, rows, needs=frozenset(ASKED), rank=33, explains=EXPLAINED)

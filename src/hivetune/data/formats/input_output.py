"""An input and an output: what a model was given, and what it gave back.

The names are those of data/columns.toml; https://github.com/allenai/natural-instructions is a set with these columns.
"""

from hivetune.data.columns import ANSWERED, ASKED, CONTEXT
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.pairs import EXPLAINED, read_pair
from hivetune.data.pieces.said import Conversation, Row, first_of


def recognise(row: Row) -> bool:
    return first_of(row, ANSWERED) is not None


def rows(row: Row) -> Conversation:
    return read_pair("input-output", row, ASKED, ANSWERED, CONTEXT)


FORMAT = Format("input-output", recognise, rows, needs=frozenset(("input",)), rank=32, explains=EXPLAINED)

"""An instruction, maybe with its input, and the output: Alpaca's columns.

https://github.com/tatsu-lab/stanford_alpaca#data-release
"""

from hivetune.data.columns import ANSWERED, CONTEXT
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.pairs import EXPLAINED, read_pair, read_parties
from hivetune.data.pieces.said import Conversation, Row, first_of


def recognise(row: Row) -> bool:
    return "instruction" in row and first_of(row, ANSWERED) is not None


def rows(row: Row) -> Conversation:
    parties = read_parties("alpaca", row, "instruction")
    return parties or read_pair("alpaca", row, ("instruction",), ANSWERED, ("input", *CONTEXT))


FORMAT = Format(
    "alpaca",
    recognise,
    rows,
    needs=frozenset(("instruction",)),
    rank=25,
    explains=EXPLAINED | {"instruction"},
)

"""A table of two columns, `key` and `value`, with sentences in both; names and settings are no sentences.

The columns are those of the table in docs/formats.md.
"""

from hivetune.data.columns import looks_like_content
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.pairs import read_pair
from hivetune.data.pieces.said import Conversation, Row


def recognise(row: Row) -> bool:
    return set(row) == {"key", "value"} and looks_like_content(row["key"]) and looks_like_content(row["value"])


def rows(row: Row) -> Conversation:
    return read_pair("key-value", row, ("key",), ("value",), ())


FORMAT = Format("key-value", recognise, rows, needs=frozenset(("key",)), rank=34, explains=frozenset(("key", "value")))

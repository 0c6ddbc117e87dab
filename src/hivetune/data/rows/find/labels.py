"""Columns under names that nobody knows which hold a label in every row of a file: an app, a theorem, a kind of task.

What a column holds is decided for a file: where others hold two words of it, five words are no text that somebody has
to explain.
"""

from collections.abc import Sequence
from typing import Any

from hivetune.data.rows.fields import plain_name
from hivetune.data.rows.find.names import answers_somehow, asks_somehow, part_of
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.data.rows.layouts.pairs import LABELS
from hivetune.data.rows.layouts.said import Row

MOST_WORDS, MOST_CHARS = 8, 80  # of a label
MIN_ROWS = 5  # in which every value may be short by chance
BARE_SHARE = 0.5  # of the values that are no text by themselves


def label_columns(rows: Sequence[Any]) -> tuple[str, ...]:
    """The columns of a file, by its first rows, whose values are labels."""
    objects = [row for row in rows if isinstance(row, dict)]
    if len(objects) < MIN_ROWS:
        return ()
    found = dict.fromkeys(name for row in objects for name in row if _may_be_label(name))
    return tuple(name for name in found if _are_labels([row.get(name) for row in objects]))


def _may_be_label(name: str) -> bool:
    is_class = plain_name(name) in LABELS  # of a text it may be what is to be learned
    return part_of(name) == "unknown" and not (is_class or answers_somehow(name) or asks_somehow(name))


def _are_labels(values: Sequence[Any]) -> bool:
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if len(texts) < MIN_ROWS or not all(_is_short(text) for text in texts):
        return False
    return sum(not looks_like_content(text) for text in texts) >= BARE_SHARE * len(texts)


def _is_short(text: str) -> bool:
    return len(text) <= MOST_CHARS and len(text.split()) < MOST_WORDS


def without_labels(row: Row, labels: Sequence[str]) -> Row:
    """The row without what is a label in it."""
    if not labels:
        return row
    plain = {plain_name(name) for name in labels}
    return {
        name: value
        for name, value in row.items()
        if not (plain_name(name) in plain and isinstance(value, str) and _is_short(value))
    }

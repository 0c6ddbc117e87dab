"""Whether the first line of a table names its columns, decided on the first lines of a file; and names for the columns
of a table without such a line: `question` and `answer` for two columns of sentences, `text` and `label` for sentences
with one of few words, else `column_1`, `column_2` ...
"""

from collections.abc import Sequence

from hivetune.data.columns import column_kind, looks_like_content, names_document
from hivetune.data.pieces.fields import as_number, as_time, plain_name

HEAD_RECORDS = 30  # records of a table
_MIN_RECORDS = 4  # below which a table without a header can't be told from one with an odd one
_MAX_NAME_CHARS, _MAX_NAME_WORDS = 40, 5
_MAX_CLASS_CHARS = 40
_ROWS_A_CLASS = 3  # at least, on average
_LETTERS, _MIN_CHOICES = "ABCDEFGHIJ", 2
_SENTENCE_ENDS = (".", "?", "!", "。", "？", "！", "…")


def names_without_header(records: Sequence[list[str]]) -> list[str] | None:
    """Names for the columns of a table whose first record is a row; None where it names them. `records`: the first ones
    of the table.
    """
    first = records[0]
    below = [record for record in records[1:] if len(record) == len(first)]
    if len(below) < _MIN_RECORDS - 1 or not _is_row(first, below):
        return None
    rows = [first, *below]
    return _names([[row[i].strip() for row in rows] for i in range(len(first))])


def _is_row(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Whether a first record is like those below: one of its values comes again in its column (not in a header that is
    there twice), or none is a known name and those that can't be names are like what stands below them.
    """
    columns = [[row[i].strip() for row in below] for i in range(len(first))]
    cells = [cell.strip() for cell in first]
    if any(_is_name(cell) and len(cell) > 1 and column_kind(plain_name(cell)) != "unknown" for cell in cells):
        return False
    for i, cell in enumerate(cells):
        if cell and as_number(cell) is None and any(row[i].strip() == cell for row in below if row != first):
            return True
    others = [(cell, column) for cell, column in zip(cells, columns, strict=True) if cell and not _is_name(cell)]
    return bool(others) and all(_share(column, _look(cell)) > 1 / 2 for cell, column in others)


def _is_name(cell: str) -> bool:
    """Whether somebody would call a column so."""
    short = len(cell) <= _MAX_NAME_CHARS and len(cell.split()) <= _MAX_NAME_WORDS
    return bool(cell) and short and not cell.endswith(_SENTENCE_ENDS) and _look(cell) in ("word", "prose")


def _look(cell: str) -> str:
    """number, time, document, prose or word."""
    if as_number(cell) is not None:
        return "number"
    if as_time(cell) is not None:
        return "time"
    if "/" in cell and names_document(cell):
        return "document"
    return "prose" if looks_like_content(cell) else "word"


def _share(column: Sequence[str], look: str) -> float:
    return sum(_look(cell) == look for cell in column) / len(column)


def _names(columns: Sequence[Sequence[str]]) -> list[str]:
    """What the columns are called, by what they hold."""
    called = [f"column_{number}" for number in range(1, len(columns) + 1)]
    told = [
        i for i, column in enumerate(columns) if not (_share(column, "number") == 1 and len(set(column)) == len(column))
    ]
    prose = [i for i in told if _share(columns[i], "prose") > 1 / 2]
    classes = [i for i in told if i not in prose and _are_classes(columns[i])]
    if len(told) == 2 and len(prose) == 2:
        called[prose[0]], called[prose[1]] = "question", "answer"
    elif len(columns) > _MIN_CHOICES + 1 and _are_letters(columns[-1], len(columns) - 2) and 0 in prose:
        called = ["question", *_LETTERS[: len(columns) - 2], "answer"]
    elif len(told) == 2 and len(prose) == len(classes) == 1:
        called[prose[0]], called[classes[0]] = "text", "label"
    return called


def _are_letters(column: Sequence[str], choices: int) -> bool:
    """Whether a column holds the letters of so many choices, as MMLU's tables do behind them."""
    return set(column) <= set(_LETTERS[:choices])


def _are_classes(column: Sequence[str]) -> bool:
    kinds = set(column)
    named = all(0 < len(kind) <= _MAX_CLASS_CHARS and _look(kind) in ("word", "number", "prose") for kind in kinds)
    return named and len(kinds) * _ROWS_A_CLASS <= len(column)

"""Rows of a CSV file, quoted as they should be. Lines above the header that are only a title are not rows. A carriage
return within a line is a character of its field: pandas writes it without quotes.

A quote that is opened and never closed would swallow the rows after it into one field, and nobody would see it. Where a
quote is wrong, reading continues at the first line from which records are whole again.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from hivetune.data.columns import column_kind, looks_like_content, names_document
from hivetune.data.files.text import Text
from hivetune.data.pieces.fields import as_number, as_time, plain_name
from hivetune.data.pieces.logs import MAX_ROW_CHARS, PlacedRow
from hivetune.data.reasons import RowRefused

_DELIMITERS = (",", ";", "\t", "|")
_WHOLE_AGAIN = 3  # records in a row that must be whole before reading goes on there
_MAX_LINES_AHEAD = 1000  # in which they must be found
_TOP_LINES = 12  # among which the header is looked for
_MIN_COLUMNS = 3  # of a table under a title: a line of text has two pieces soon
_MAX_NAME_CHARS = 40
# A carriage return within a line, where the csv module raises: a character that no decoded text has.
_CR = "\udc0d"


class _Form(NamedTuple):
    """The way in which the fields of a record are separated. `spaced`: a space follows each delimiter of the header, so
    that it is not part of the names and values.
    """

    delimiter: str
    spaced: bool


class _Lines:
    """Lines that can be given back, with _CR within them. `taken`: those since the last record began."""

    def __init__(self, lines: Iterator[str]):
        self._lines = lines
        self._given_back: list[str] = []  # the next one last
        self.taken: list[str] = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._given_back.pop() if self._given_back else next(self._lines)
        if "\r" in line and "\r" in (text := line.rstrip("\r\n")):
            line = text.replace("\r", _CR) + line[len(text) :]
        self.taken.append(line)
        return line

    def give_back(self, lines: list[str]) -> None:
        self._given_back += reversed(lines)

    def ahead(self, index: int) -> Iterator[str]:
        """Yield taken lines from `index` on, then lines that are taken now."""
        while index < len(self.taken) or next(self, None) is not None:
            yield self.taken[index]
            index += 1


def csv_rows(source: Text, delimiter: str | None) -> Iterator[PlacedRow]:
    lines = _Lines(source.lines())
    title, form, header = _beginning(lines, delimiter)
    named = header is None
    again: list[str] = []  # the header as it stands, where it is a line
    number = 1 + title
    for fields in _records(lines, form):
        size = len(lines.taken)
        fields = _or_by_tabs(fields, lines, form, header) if header is not None else fields
        if fields is None and header is None:
            yield (
                number,
                RowRefused("csv-quote", "the quotes of the header do not match, so nothing behind it was read"),
            )
            return
        if fields is None:
            size = _end_of_broken(lines, form, len(header or []))
            yield from _broken(lines.taken[:size], number, form.delimiter, len(header or []))
            lines.give_back(lines.taken[size:])
        elif fields and header is None:
            again, header = fields, _each_once(fields)
        elif header is not None and any(fields) and not (named and fields == again):
            # No blank line, no separators alone, and not the header again, as in joined files.
            if len(fields) > len(header) and form.delimiter == "," and not form.spaced:
                fields = _joined(fields)
            if len(fields) == len(header):
                yield number, dict(zip(header, fields, strict=True))
            else:
                yield number, RowRefused("csv-columns", f"{len(fields)} fields, the header has {len(header)}")
        number += min(size, len(lines.taken))
    if source.problem:
        yield number, RowRefused("broken-file", source.problem)


def _each_once(names: list[str]) -> list[str]:
    """Return the names of the columns; one that comes again gets its number, else it would hide the first of them."""
    distinct: list[str] = []
    for place, name in enumerate(names, 1):
        numbered = (f"{name or 'column'}_{number}" for number in count(place))
        distinct.append(next(new for new in numbered if new not in names) if name in distinct else name)
    return distinct


def _or_by_tabs(fields: list[str] | None, lines: _Lines, form: _Form, header: list[str]) -> list[str] | None:
    """Return the fields of a record; those between the tabs of its first line where its quotes are signs like others,
    as in most files with tabs. The lines after that one are given back.
    """
    if form.delimiter != "\t" or (fields is not None and len(fields) in (0, len(header))):
        return fields
    plain = _with_cr(lines.taken[0].rstrip("\r\n").split("\t"))
    if len(plain) != len(header):
        return fields
    lines.give_back(lines.taken[1:])
    del lines.taken[1:]
    return plain


def has_header(source: Text, delimiter: str | None) -> bool:
    """Return whether the first line of a table names its columns."""
    return _beginning(_Lines(source.lines()), delimiter)[2] is None


def _beginning(lines: _Lines, delimiter: str | None) -> tuple[int, _Form, list[str] | None]:
    """Return (lines above the table, its form, names of its columns if it has no header)."""
    csv.field_size_limit(MAX_ROW_CHARS)
    top = list(islice(lines, _TOP_LINES))
    title, delimiter = _title(top, delimiter)
    lines.give_back(top[title:])
    first = "".join(top[title : title + 1])
    form = _Form(delimiter, first.count(delimiter) == first.count(f"{delimiter} ") > 0)
    return title, form, _names_of_rows(lines, form)


def _names_of_rows(lines: _Lines, form: _Form) -> list[str] | None:
    """Return names for the columns of a table whose first record is a row, else None. The lines that were looked at are
    given back.
    """
    taken: list[str] = []
    records: list[list[str]] = []
    for fields in islice(_records(lines, form), HEAD_RECORDS):
        taken += lines.taken
        if fields is None or len(taken) > _MAX_LINES_AHEAD:
            break
        records += [fields] if any(fields) else []
    lines.give_back(taken)
    return names_without_header(records) if records else None


def _title(top: list[str], delimiter: str | None) -> tuple[int, str]:
    """Return (lines above the header, delimiter). Sheets often begin with a title, a date, an empty line: one cell
    each.
    """
    usual = delimiter or max(_DELIMITERS, key="".join(top[:1]).count)
    for mark in (usual,) if delimiter or usual in "".join(top[:1]) else _DELIMITERS:
        # A line that is longer than any row has no fields.
        cells = [next(csv.reader([line], delimiter=mark), []) if len(line) <= MAX_ROW_CHARS else [] for line in top]
        filled = [sum(bool(cell.strip()) for cell in line) for line in cells]
        number = next((number for number, count in enumerate(filled) if count > 1), 0)
        above = all(len(line) <= 1 or len(line) == len(cells[number]) for line in cells[:number])
        below = [len(line) for line in cells[number + 1 : number + 2]]
        if number and above and _are_names(cells[number]) and below in ([0], [len(cells[number])]):
            return number, mark
    return 0, usual


def _are_names(cells: list[str]) -> bool:
    """Return whether these are the names of a table's columns, and not the pieces of a sentence with commas."""
    named = [cell for cell in cells if cell.strip()]
    short = all(len(cell) <= _MAX_NAME_CHARS and not cell[0].isspace() for cell in named)
    return len(cells) >= _MIN_COLUMNS and len(set(named)) == len(named) and short


def _joined(fields: list[str]) -> list[str]:
    """Return the fields without the cuts before a space: sentences that nobody quoted have commas, too."""
    whole = fields[:1]
    for field in fields[1:]:
        if field[:1] == " ":
            whole[-1] += f",{field}"
        else:
            whole.append(field)
    return whole


def _records(lines: _Lines, form: _Form) -> Iterator[list[str] | None]:
    """Yield records one by one; None for one in which a quote is not closed, or closed before the end of its field."""
    reader = csv.reader(lines, delimiter=form.delimiter, skipinitialspace=form.spaced, strict=True)
    while True:
        lines.taken = []
        try:
            yield _with_cr(next(reader))
        except StopIteration:
            return
        except csv.Error:
            reader = csv.reader(lines, delimiter=form.delimiter, skipinitialspace=form.spaced, strict=True)
            yield None


def _with_cr(fields: list[str]) -> list[str]:
    return [field.replace(_CR, "\r") for field in fields] if any(_CR in field for field in fields) else fields


def _end_of_broken(lines: _Lines, form: _Form, columns: int) -> int:
    """Return how many of the taken lines are lost, up to the first complete record."""
    if len(lines.taken[0]) > MAX_ROW_CHARS:  # no quote is wrong: the line alone is too large
        return 1
    index = 1
    while any(True for _ in lines.ahead(index)):
        ahead = _Lines(islice(lines.ahead(index), _MAX_LINES_AHEAD))
        records = islice((fields for fields in _records(ahead, form) if fields != []), _WHOLE_AGAIN)
        if all(whole := [fields is not None and len(fields) == columns for fields in records]) and whole:
            return index
        index += 1
    return index


def _broken(lines: list[str], line_number: int, delimiter: str, columns: int) -> Iterator[PlacedRow]:
    """Yield the row in which the quote was opened, each line after it that has as many fields as a row, and those that
    are too large.
    """
    for number, line in enumerate(lines):
        if len(line) > MAX_ROW_CHARS:
            yield line_number + number, RowRefused("line-too-large", f"{len(line):,} characters")
        elif number == 0 or line.count(delimiter) >= max(1, columns - 1):
            yield line_number + number, RowRefused("csv-quote")


# Whether the first line of a table names its columns, decided on the first lines of a file; and names for the columns
# of a table without such a line: `question` and `answer` for two columns of sentences, `text` and `label` for sentences
# with one of few words, else `column_1`, `column_2` ...

HEAD_RECORDS = 30  # records of a table
_MIN_RECORDS = 4  # below which a table without a header can't be told from one with an odd one
_MAX_HEADER_CHARS, _MAX_NAME_WORDS = 40, 5
_MAX_CLASS_CHARS = 40
_ROWS_A_CLASS = 3  # at least, on average
_LETTERS, _MIN_CHOICES = "ABCDEFGHIJ", 2
_SENTENCE_ENDS = (".", "?", "!", "。", "？", "！", "…")


def names_without_header(records: Sequence[list[str]]) -> list[str] | None:
    """Return names for the columns of a table whose first record is a row; None where it names them. `records`: the
    first ones of the table.
    """
    first = records[0]
    below = [record for record in records[1:] if len(record) == len(first)]
    if len(below) < _MIN_RECORDS - 1 or not _is_first_row(first, below):
        return None
    rows = [first, *below]
    return _names([[row[i].strip() for row in rows] for i in range(len(first))])


def _is_first_row(first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return whether a first record is like those below: one of its values comes again in its column (not in a header
    that is there twice), or none is a known name and those that can't be names are like what stands below them.
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
    """Return whether a text looks like a column name."""
    short = len(cell) <= _MAX_HEADER_CHARS and len(cell.split()) <= _MAX_NAME_WORDS
    return bool(cell) and short and not cell.endswith(_SENTENCE_ENDS) and _look(cell) in ("word", "prose")


def _look(cell: str) -> str:
    """Return the kind of a cell: number, time, document, prose or word."""
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
    """Return names of the columns, by their content."""
    called = [f"column_{number}" for number in range(1, len(columns) + 1)]
    distinct = [
        i for i, column in enumerate(columns) if not (_share(column, "number") == 1 and len(set(column)) == len(column))
    ]
    prose = [i for i in distinct if _share(columns[i], "prose") > 1 / 2]
    classes = [i for i in distinct if i not in prose and _are_classes(columns[i])]
    if len(distinct) == 2 and len(prose) == 2:
        called[prose[0]], called[prose[1]] = "question", "answer"
    elif len(columns) > _MIN_CHOICES + 1 and set(columns[-1]) <= set(_LETTERS[: len(columns) - 2]) and 0 in prose:
        called = ["question", *_LETTERS[: len(columns) - 2], "answer"]  # the letters of choices, as in MMLU's tables
    elif len(distinct) == 2 and len(prose) == len(classes) == 1:
        called[prose[0]], called[classes[0]] = "text", "label"
    return called


def _are_classes(column: Sequence[str]) -> bool:
    kinds = set(column)
    named = all(0 < len(kind) <= _MAX_CLASS_CHARS and _look(kind) in ("word", "number", "prose") for kind in kinds)
    return named and len(kinds) * _ROWS_A_CLASS <= len(column)

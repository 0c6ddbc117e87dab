"""Rows of a CSV file, quoted as they should be. Lines above the header that are only a title are no rows.

A quote that is opened and never closed would swallow the rows behind it into one field, and nobody would see it. Where
a quote is wrong, reading goes on at the first line from which records are whole again.
"""

import csv
import json
from collections.abc import Iterator
from itertools import islice

from hivetune.data.rows.placed import MAX_ROW_CHARS, PlacedRow, TextSource

_DELIMITERS = (",", ";", "\t", "|")
_WHOLE_AGAIN = 3  # records in a row that must be whole before reading goes on there
_MAX_LINES_AHEAD = 1000  # in which they must be found
_TOP_LINES = 12  # among which the header is looked for
_MIN_COLUMNS = 3  # of a table under a title: a line of text has two pieces soon
_MAX_NAME_CHARS = 40


class _Lines:
    """Lines that can be given back. `taken`: those since the last record began."""

    def __init__(self, lines: Iterator[str]):
        self._lines = lines
        self._again: list[str] = []  # the next one last
        self.taken: list[str] = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else next(self._lines)
        self.taken.append(line)
        return line

    def give_back(self, lines: list[str]) -> None:
        self._again += reversed(lines)

    def ahead(self, place: int) -> Iterator[str]:
        """Taken lines from `place` on, then lines that are taken now."""
        while place < len(self.taken) or next(self, None) is not None:
            yield self.taken[place]
            place += 1


def csv_rows(source: TextSource, delimiter: str | None) -> Iterator[PlacedRow]:
    lines = _Lines(source.lines())
    csv.field_size_limit(MAX_ROW_CHARS)
    top = list(islice(lines, _TOP_LINES))
    title, delimiter = _title(top, delimiter)
    lines.give_back(top[title:])
    header: list[str] | None = None
    place = 1 + title
    for fields in _records(lines, delimiter):
        size = len(lines.taken)
        if fields is None and header is None:
            yield place, "p", "csv-quote:the quotes of the header do not match, so nothing behind it was read"
            return
        if fields is None:
            size = _end_of_broken(lines, delimiter, len(header or []))
            yield from _broken(lines.taken[:size], place, delimiter, len(header or []))
            lines.give_back(lines.taken[size:])
        elif fields and header is None:
            header = fields
        elif any(fields or ()) and header is not None:  # a line of separators alone is a blank one
            yield _csv_row(place, header, fields or [])
        place += size
    if source.problem:
        yield place, "p", source.problem


def _title(top: list[str], delimiter: str | None) -> tuple[int, str]:
    """(lines above the header, delimiter). Sheets often begin with a title, a date, an empty line: one cell each."""
    own = delimiter or max(_DELIMITERS, key="".join(top[:1]).count)
    for mark in (own,) if delimiter or own in "".join(top[:1]) else _DELIMITERS:
        cells = [next(csv.reader([line], delimiter=mark), []) for line in top]
        filled = [sum(bool(cell.strip()) for cell in line) for line in cells]
        number = next((number for number, count in enumerate(filled) if count > 1), 0)
        above = all(len(line) <= 1 or len(line) == len(cells[number]) for line in cells[:number])
        below = [len(line) for line in cells[number + 1 : number + 2]]
        if number and above and _are_names(cells[number]) and below in ([0], [len(cells[number])]):
            return number, mark
    return 0, own


def _are_names(cells: list[str]) -> bool:
    """Whether these are the names of a table's columns, and not the pieces of a sentence with commas."""
    named = [cell for cell in cells if cell.strip()]
    short = all(len(cell) <= _MAX_NAME_CHARS and not cell[0].isspace() for cell in named)
    return len(cells) >= _MIN_COLUMNS and len(set(named)) == len(named) and short


def _csv_row(place: int, header: list[str], fields: list[str]) -> PlacedRow:
    if len(fields) != len(header):
        return place, "p", f"csv-columns:{len(fields)} fields, the header has {len(header)}"
    return place, "r", json.dumps(dict(zip(header, fields, strict=True)), ensure_ascii=False)


def _records(lines: _Lines, delimiter: str) -> Iterator[list[str] | None]:
    """Records one by one; None for one in which a quote is not closed, or closed before the end of its field."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.taken = []
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            yield None


def _end_of_broken(lines: _Lines, delimiter: str, columns: int) -> int:
    """How many of the taken lines are lost: up to the first one from which the next records are whole."""
    place = 1
    while any(True for _ in lines.ahead(place)):
        ahead = _Lines(islice(lines.ahead(place), _MAX_LINES_AHEAD))
        records = islice((fields for fields in _records(ahead, delimiter) if fields != []), _WHOLE_AGAIN)
        if all(whole := [fields is not None and len(fields) == columns for fields in records]) and whole:
            return place
        place += 1
    return place


def _broken(lines: list[str], place: int, delimiter: str, columns: int) -> Iterator[PlacedRow]:
    """The row in which the quote was opened, and each line behind it that has as many fields as a row."""
    for number, line in enumerate(lines):
        if number == 0 or line.count(delimiter) >= max(1, columns - 1):
            yield place + number, "p", "csv-quote:"

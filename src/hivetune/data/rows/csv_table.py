"""Rows of a CSV file, quoted as they should be.

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
    head = next(lines, "")
    delimiter = delimiter or max(_DELIMITERS, key=head.count)
    csv.field_size_limit(MAX_ROW_CHARS)
    lines.give_back(lines.taken)
    header: list[str] | None = None
    place = 1
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
        elif fields and header is not None:
            yield _csv_row(place, header, fields)
        place += size
    if source.problem:
        yield place, "p", source.problem


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

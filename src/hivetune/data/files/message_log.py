"""Rows of one file of which each is a turn of a conversation, or a line of a log, joined by the format of these."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hivetune.data.formats import format_of_file
from hivetune.data.pieces.format import Head, Log, PlacedRow

NUM_SAMPLE = 20  # rows by which a table is told: all have to be of one format


def joined_rows(rows: Iterator[PlacedRow], name: str, log: Log | None = None) -> Iterator[PlacedRow]:
    """Yield one row for each conversation of a file called `name`, if a format, or `log`, reads its rows together;
    else the rows.
    """
    first = list(itertools.islice(rows, NUM_SAMPLE))
    everything = itertools.chain(first, rows)
    begun = [event for _, record in first if (event := _object(record)) is not None]
    if log is None and begun and 2 * len(begun) >= len(first):  # a line may be broken
        log = format_of_file(Head(name, b"", begun))
    if log is None:
        yield from everything
        return
    problems: list[PlacedRow] = []
    yield from log.rows(_lines(everything, problems))
    yield from problems


def _lines(rows: Iterable[PlacedRow], problems: list[PlacedRow]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a log; `problems` gets the places without one."""
    for number, record in rows:
        if isinstance(record, str):
            yield number, record
        elif isinstance(record, Mapping):
            yield number, json.dumps(record, ensure_ascii=False)
        else:
            problems.append((number, record))


def _object(record: Any) -> dict[str, Any] | None:
    if isinstance(record, Mapping):
        return dict(record)
    try:
        event = json.loads(record) if isinstance(record, str) else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None

"""All named formats, and the registry that finds them here and in other packages.

A module of this package holds `FORMAT`, and more where one program writes several. Another package brings its own by
the entry point `hivetune.formats`.
"""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.metadata import entry_points

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow
from hivetune.data.pieces.said import Row
from hivetune.errors import UsageError


@cache
def all_formats() -> tuple[Format, ...]:
    """Return every format: the lower its rank the earlier, then by name. Raise UsageError where two have one name."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    formats = [value for module in modules for value in vars(module).values() if isinstance(value, Format)]
    formats += [entry.load() for entry in entry_points(group="hivetune.formats")]
    names = [form.name for form in formats]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two formats are called {twice[0]!r}", hint="uninstall one of the packages that bring them")
    return tuple(sorted(formats, key=lambda form: (form.rank, form.name)))


def format_of_file(head: Head) -> Format | None:
    """Return the format of a whole file by its beginning."""
    return next((form for form in _of_unit("file") if form.recognise(head)), None)


def file_rows(name: str, lines: Lines) -> Iterator[PlacedRow]:
    """Yield the records of a file of the format `name`, each with the line where it begins."""
    form = next(candidate for candidate in _of_unit("file") if candidate.name == name)
    yield from form.rows(lines)


def is_file_format(name: str) -> bool:
    return any(form.name == name for form in _of_unit("file"))


def may_hold_rows(payload: bytes) -> bool:
    """Return whether a record may have rows inside; a fast check for most rows."""
    return payload[:1] == b"{" and _batch_mark().search(payload) is not None


@cache
def _batch_mark() -> re.Pattern[bytes]:
    keys = sorted({key for form in _of_unit("batch") for key in form.needs})
    return re.compile(b'"(?:%s)"' % "|".join(map(re.escape, keys)).encode())


def rows_inside(payload: bytes) -> list[bytes] | None:
    """Return the rows that a record holds, in order; None when it is a row itself, or no JSON."""
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "messages" in record:
        return None
    for form in _candidates("batch", tuple(record)):
        if form.recognise(record):
            return [json.dumps(row).encode() for row in form.rows(record)] or None
    return None


def record_format(record: Row) -> Format | None:
    """Return the format of a record whose names are in snake_case."""
    return next((form for form in _candidates("record", tuple(record)) if form.recognise(record)), None)


@cache
def _of_unit(unit: str) -> tuple[Format, ...]:
    return tuple(form for form in all_formats() if form.unit == unit)


@lru_cache(1024)
def _candidates(unit: str, names: tuple[str, ...]) -> tuple[Format, ...]:
    """Return formats that a record with these columns may have. Asking all of them took half the time of a record."""
    return tuple(form for form in _of_unit(unit) if not form.needs or not form.needs.isdisjoint(names))

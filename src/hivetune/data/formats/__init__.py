"""All named formats, one a module, and the registry that finds them here and in other packages.

A module of this package holds `FORMAT`. Another package brings its own by the entry point `hivetune.formats`.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import cast

from hivetune.data.pieces.format import Format, Head, Lines
from hivetune.data.pieces.logs import PlacedRow
from hivetune.data.pieces.said import Conversation, Row
from hivetune.errors import UsageError


@cache
def all_formats() -> tuple[Format, ...]:
    """Every format: the lower its rank the earlier, then by name. Raises UsageError where two have one name."""
    own = [importlib.import_module(f"{__name__}.{module.name}").FORMAT for module in pkgutil.iter_modules(__path__)]
    found: list[Format] = [*own, *(entry.load() for entry in entry_points(group="hivetune.formats"))]
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two formats are called {twice[0]!r}", hint="uninstall one of the packages that bring them")
    return tuple(sorted(found, key=lambda one: (one.rank, one.name)))


def file_format(head: Head) -> Format | None:
    """The format of a whole file by its beginning."""
    return next((one for one in _of_unit("file") if one.recognise(head)), None)


def file_rows(name: str, lines: Lines) -> Iterator[PlacedRow]:
    """The records of a file of the format `name`, each with the line where it begins."""
    found = next(one for one in _of_unit("file") if one.name == name)
    return cast(Iterator[PlacedRow], found.rows(lines))


def is_file_format(name: str) -> bool:
    return any(one.name == name for one in _of_unit("file"))


def batch_keys() -> tuple[str, ...]:
    """Names of which a record that holds many has one."""
    return tuple(sorted({key for one in _of_unit("batch") for key in one.needs}))


def batch_rows(record: Row) -> list[Row] | None:
    """The records that a record holds; None: it is one itself. Raises RowRefused."""
    for one in _candidates("batch", tuple(record)):
        if one.recognise(record):
            return list(cast(Iterator[Row], one.rows(record)))
    return None


def record_format(record: Row) -> Format | None:
    """The format of a record whose names are in snake_case."""
    return next((one for one in _candidates("record", tuple(record)) if one.recognise(record)), None)


def read_record(found: Format, record: Row) -> Conversation:
    """The conversation of a record of this format. Raises RowRefused."""
    return cast(Conversation, found.rows(record))


@cache
def _of_unit(unit: str) -> tuple[Format, ...]:
    return tuple(one for one in all_formats() if one.unit == unit)


@lru_cache(1024)
def _candidates(unit: str, names: tuple[str, ...]) -> tuple[Format, ...]:
    """Formats that a record with these columns may have. Asking all of them took half the time of a record."""
    return tuple(one for one in _of_unit(unit) if not one.needs or not one.needs.isdisjoint(names))

"""All named formats, and the registry that finds them here and in other packages.

A module of this package holds `FORMAT`, and more where one program writes several. Another package brings its own by
the entry point `hivetune.formats`.
"""

import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from hivetune.data.pieces.format import Batch, Format, Head, Lines, Log
from hivetune.data.pieces.logs import PlacedRow
from hivetune.data.pieces.said import Row
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

_T = TypeVar("_T")


@cache
def all_formats() -> tuple[Format | Batch | Log, ...]:
    """Return every format: the lower its rank the earlier, then by name. Raise UsageError where two have one name, or
    another package's can't be loaded."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    formats = [form for module in modules for form in vars(module).values() if isinstance(form, Format | Batch | Log)]
    formats += [_foreign(entry) for entry in entry_points(group="hivetune.formats")]
    names = [form.name for form in formats]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two formats are called {twice[0]!r}", hint="uninstall one of the packages that bring them")
    return tuple(sorted(formats, key=lambda form: (form.rank, form.name)))


def _foreign(entry: EntryPoint) -> Format | Batch | Log:
    """Return the format of another package. A row that its functions fail on is refused, and ends no check."""
    try:
        form = entry.load()
    except Exception as error:  # noqa: BLE001 (whatever that package does)
        problem = f"can't be loaded: {type(error).__name__}: {error}"
    else:
        if isinstance(form, Format):
            return form._replace(read=_careful(form.name, form.read), rows=form.rows and _careful(form.name, form.rows))
        if isinstance(form, Batch | Log):
            return form
        problem = "is no Format, Batch or Log"
    raise UsageError(
        f"the format {entry.name!r} of another package ({entry.value}) {problem}",
        hint="correct that package, or uninstall it",
    )


def _careful(name: str, read: Callable[[Row], _T]) -> Callable[[Row], _T]:
    def careful(row: Row) -> _T:
        try:
            return read(row)
        except RowRefused:
            raise
        except Exception as error:
            hint = f"the format {name} of another package failed on it: {type(error).__name__}: {error}"
            raise RowRefused("unknown-layout", hint) from error

    return careful


@cache
def _logs() -> tuple[Log, ...]:
    return tuple(form for form in all_formats() if isinstance(form, Log))


def format_of_file(head: Head) -> Log | None:
    """Return the format of a whole file by its beginning."""
    return next((log for log in _logs() if log.recognise(head)), None)


def file_rows(name: str, lines: Lines) -> Iterator[PlacedRow]:
    """Yield the records of a file of the format `name`, each with the line where it begins."""
    yield from next(log for log in _logs() if log.name == name).rows(lines)


def is_file_format(name: str) -> bool:
    return any(log.name == name for log in _logs())


def may_hold_rows(payload: bytes) -> bool:
    """Return whether a record may have rows inside; a fast check for most rows."""
    return payload[:1] == b"{" and _batch_mark().search(payload) is not None


@cache
def _batch_mark() -> re.Pattern[bytes]:
    keys = sorted({key for form in all_formats() if isinstance(form, Batch) for key in form.needs})
    return re.compile(b'"(?:%s)"' % "|".join(map(re.escape, keys)).encode())


def rows_inside(payload: bytes) -> list[bytes] | None:
    """Return the rows that a record holds, in order; None when it is a row itself, or no JSON."""
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "messages" in record:
        return None
    for batch in _batches_with(tuple(record)):
        if inside := [json.dumps(row).encode() for row in batch.rows(record)]:
            return inside
    return None


# Asking all formats took half the time of a record.


@lru_cache(512)
def _batches_with(names: tuple[str, ...]) -> tuple[Batch, ...]:
    """Return the batches that a record with these columns may be."""
    return tuple(form for form in all_formats() if isinstance(form, Batch) and not form.needs.isdisjoint(names))


@lru_cache(512)
def formats_with(names: tuple[str, ...]) -> tuple[Format, ...]:
    """Return the formats that a record with these columns may have, in the order in which they are asked."""
    formats = (form for form in all_formats() if isinstance(form, Format))
    return tuple(form for form in formats if not form.needs or not form.needs.isdisjoint(names))

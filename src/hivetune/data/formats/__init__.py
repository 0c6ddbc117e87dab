"""All named formats, and the registry that finds them: entries of formats.toml, modules of this package that define
`FORMAT`, a user's TOML files in `$HIVETUNE_HOME/formats/`, and other packages by the entry point `hivetune.formats`.
"""

import contextlib
import importlib
import json
import pkgutil
import re
import sqlite3
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from hivetune.base.database import open_to_read
from hivetune.base.disk import home
from hivetune.base.paths import spelled
from hivetune.data.columns import plain_row
from hivetune.data.formats.spec import format_of
from hivetune.data.pieces.format import AnyFormat, Batch, Conversation, Format, Head, Lines, Log, PlacedRow, Store
from hivetune.data.pieces.sessions import ASSISTANT, SESSION, read_session
from hivetune.data.pieces.values import Row, has_needs, objects, parsed
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, UsageError

_SPEAKERS, SPOKEN = ("role", "sender", "speaker", "from"), ("content", "text", "message", "body", "value")
_MAX_NAMED, _MAX_CHARS = 8, 30
OWN_FILE = Path(__file__).with_name("formats.toml")
AnyKind = TypeVar("AnyKind", Format, Batch, Log, Store)


@cache
def all_formats() -> tuple[AnyFormat, ...]:
    """Return every format in the order in which they are tried: the user's, other packages', those of modules, those of
    formats.toml. Raise UsageError if two have the same name, or if one can't be loaded."""
    formats: list[AnyFormat] = []
    for path in sorted((home() / "formats").glob("*.toml")):
        formats += specs_in(path)
    formats += [_foreign(entry) for entry in entry_points(group="hivetune.formats")]
    for module in pkgutil.iter_modules(__path__):
        values = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        formats += [form for form in values if isinstance(form, AnyFormat)]
    formats += specs_in(OWN_FILE)
    names = [form.name for form in formats]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two formats are called {twice!r}", hint="rename one of them")
    return tuple(formats)


def specs_in(path: Path) -> list[AnyFormat]:
    """Return the formats of a TOML file. Raise UsageError."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}", hint="correct the file, or remove it") from None
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise UsageError(f"{path}: {name!r} is outside of a table", hint="begin each format with its name: [name]")
    return [format_of(name, entry, str(path)) for name, entry in entries.items()]


def _foreign(entry: EntryPoint) -> Format:
    """Return the format of another package, which must be a Format without `days`. If its `read` fails on a record,
    that record is refused, and the check goes on. Raise UsageError.
    """
    try:
        form, problem = entry.load(), "must be a Format without `days`"
    except Exception as error:  # noqa: BLE001 (whatever that package does)
        form, problem = None, f"can't be loaded: {type(error).__name__}: {error}"

    def read(row: Row) -> Conversation | None:
        try:
            return form.read(row)  # type: ignore[no-any-return]  # of a Format
        except RowRefused:
            raise
        except Exception as error:
            hint = f"the format {form.name} of another package failed on it: {type(error).__name__}: {error}"
            raise RowRefused("unknown-layout", hint) from error

    if not isinstance(form, Format) or form.days is not None:
        fact = f"the format {entry.name!r} of another package ({entry.value}) {problem}"
        raise UsageError(fact, hint="correct that package, or uninstall it")
    return form._replace(read=read)


@cache
def _of_kind(kind: type[AnyKind]) -> dict[str, AnyKind]:
    """Return the formats of one kind by their names, in the order in which they are tried."""
    return {form.name: form for form in all_formats() if isinstance(form, kind)}


@lru_cache(512)  # asking all formats took half the time of a record
def formats_with(names: tuple[str, ...]) -> tuple[Format, ...]:
    """Return the formats that may fit a record with these columns, in the order in which they are tried."""
    return tuple(form for form in _of_kind(Format).values() if has_needs(form.needs, names))


def format_named(name: str) -> Format | None:
    """Return the format of records with this name; None for the name of a format of whole files."""
    return _of_kind(Format).get(name)


# Of whole files.


def format_of_file(head: Head) -> Log | None:
    """Return the format of a whole file, recognised by its beginning; None if rows are read from it one by one."""
    return next((log for log in _of_kind(Log).values() if log.recognise(head)), None)


def store_of(path: str) -> str | None:
    """Return the name of the format of an SQLite file, recognised by its tables; None if no format fits."""
    tables = tables_of(path)
    return next((store.name for store in _of_kind(Store).values() if store.tables <= tables), None)


def tables_of(path: str) -> set[str]:
    """Return the tables of an SQLite file; none of a damaged one."""
    with contextlib.closing(open_to_read(path)) as database, contextlib.suppress(sqlite3.Error):
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return set()


def joins_rows(name: str) -> bool:
    """Return whether `name` is a format of whole files, of a log or of a database."""
    return name in _of_kind(Log) or name in _of_kind(Store)


def rows_of_file(name: str, path: str, lines: Lines) -> Iterator[PlacedRow]:
    """Yield the records of a file of the format `name`, each with the line where it begins, or with its number in a
    database. Raise DataRefused for a damaged database."""
    if name in _of_kind(Log):
        yield from _of_kind(Log)[name].rows(lines)
        return
    with contextlib.closing(open_to_read(path)) as database:
        try:
            yield from _of_kind(Store)[name].rows(database)
        except sqlite3.Error as error:
            raise DataRefused(f"{spelled(path)} is damaged: {error}", hint="get the file again") from None


# Of records.


@cache
def _batch_mark() -> re.Pattern[bytes]:
    """Return a pattern that matches all records that contain rows."""
    keys = {key for form in _of_kind(Batch).values() for need in form.needs for key in need.split("|")}
    keys |= {form.mark for form in _of_kind(Format).values() if form.mark}
    return re.compile(b'"(?:%s)"' % "|".join(map(re.escape, sorted(keys))).encode())


def rows_inside(payload: bytes) -> list[bytes] | None:
    """Return the rows that a record contains, in order; None if the record is itself a row, or is not JSON."""
    # Parsing each row a second time would take longer than this search, which most rows end.
    if payload[:1] != b"{" or _batch_mark().search(payload) is None:
        return None
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    batches = () if "messages" in record else _of_kind(Batch).values()
    found = (list(form.rows(record)) for form in batches if has_needs(form.needs, record))
    rows = [row for part in next(filter(None, found), [record]) for row in _days_in(part)]
    return None if rows and rows[0] is record else [json.dumps(row).encode() for row in rows]


def _days_in(record: Row) -> list[Row]:
    """Return the rows of a record that contains one for each day; any other record alone."""
    forms: Iterable[Format] = _of_kind(Format).values()
    for form in forms:
        if form.days and has_needs(form.needs, record) and (days := form.days(record)) is not None:
            return days
    return [record]


def read_conversation(row: Row) -> Conversation:
    """Return the conversation of `row`. Raise RowRefused: unknown-layout, or the problem with the row."""
    named, row = row, plain_row(row)
    if SESSION in row:
        return read_session(row)
    if row.get("chosen") not in (None, "", []) and row.get("rejected") not in (None, "", []):
        hint = "set learn.use: [sft, pairs] to learn from both, or learn the better one: --columns completion=chosen"
        raise RowRefused("preference-row", hint)
    for form in formats_with(tuple(row)):
        if (conversation := form.read(row)) is not None:
            return conversation
    if "custom_id" in row:
        hint = "the row is a request or a response of a batch alone: join each request's `body` with its `response`"
        raise RowRefused("unknown-layout", hint)
    speaker = next((name for name in _SPEAKERS if isinstance(row.get(name), str)), None)
    spoken = next((name for name in SPOKEN if isinstance(row.get(name), str | list)), None)
    if speaker and spoken:
        line = f"--columns session=COLUMN,role={speaker},text={spoken}"
        raise RowRefused("unknown-layout", f"the row is one message; if a column names its conversation: {line}")
    own = [name[:_MAX_CHARS] for name in named if name != ASSISTANT]
    names = ", ".join(own[:_MAX_NAMED]) or "none"
    turns = next((name for name, value in row.items() if objects(parsed(value))), None)
    line = f"messages={turns},role=...,text=...,assistant=NAME (turns), or rows={turns}[],"
    line = f"{line if turns else ''}prompt=...,completion=..."
    hint = f"no prompt or answer column recognised among {names}; map yours: --columns {line}"
    raise RowRefused("unknown-layout", hint)

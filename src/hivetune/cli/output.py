"""The output of the command line: data on stdout, messages on stderr, one JSON document under `--json`.

A command passes its result to `answer` once. Text and JSON come from the same document: `facts` prints entries as `key:
value` lines and `Table` a list of objects; the suffix of a key determines the unit (`value_text`). All text passes
`clean`, since names of files, messages and answers come from outside. `explain` turns an exception into a HivetuneError
with a message and a hint.

Modules that `--help` does not need are imported where they are used, so it takes 0.1 s, without rich and SQLite.
"""

import codecs
import contextlib
import errno
import io
import json
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from hivetune.base.typed import to_plain
from hivetune.base.units import duration as duration
from hivetune.base.units import number as number
from hivetune.base.units import size as size
from hivetune.base.units import step_time
from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, UsageError

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_LINE_EVERY_S = 10.0
PLAIN_WIDTH = 120  # columns where there is no terminal

# Characters that a terminal acts on: C0 but tab and newline, DEL, C1, and marks that change the direction of text
# (CVE-2021-42574). A lone surrogate stands for a byte of a file name that is not UTF-8.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass
class Mode:
    """The mode of output. main() sets `json` once."""

    json: bool = False
    is_done: bool = False  # the document is printed, and the command goes on until it is stopped


MODE = Mode()


def clean(text: str) -> str:
    """Return `text` with characters that a terminal acts on escaped, such as \\x1b."""
    return OBEYED.sub(lambda match: ascii(match[0])[1:-1], text)


def set_encodings() -> None:
    """Set the encodings of the standard streams."""
    if sys.stdin is None:  # the parent process closed it
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # JSON is UTF-8; so is text where the locale knows only ASCII (LC_ALL=C in cron and containers).
            ascii_alone = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(
                encoding="utf-8" if ascii_alone or MODE.json else None,
                errors="replace" if stream is sys.stdin else "backslashreplace",  # \u2502 for what it lacks
            )


# From a document to text.

TIMES = frozenset({"created", "revoked", "opened", "closed", "time", "begun"})
PLAIN_NUMBERS = frozenset({"pid", "seed", "version"})
SUFFIXES = ("_bytes", "_seconds", "_s")  # units, which follow the value


def short(text: str, chars: int = 160) -> str:
    """Return `text` on one line of at most `chars` characters."""
    return textwrap.shorten(text, chars, placeholder=" ...")


def moment(seconds: float) -> str:
    """Return a point in time in local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def parts(value: object, names: str) -> dict[str, Any]:
    """Return those attributes of `value` that `names` lists (separated by blanks), as a JSON object."""
    return {name: getattr(value, name) for name in names.split()}


def unit_of(key: str) -> str:
    """Return the unit suffix of a key, such as "_bytes", or "" if it has none."""
    return next((suffix for suffix in SUFFIXES if key.endswith(suffix)), "")


def title_of(key: str) -> str:
    """Return a key as a title for people: without its unit, its words separated by blanks."""
    return key.removesuffix(unit_of(key)).replace("_", " ")


def value_text(key: str, value: Any) -> str:
    """Return a value as text in the unit that its key names; "-" for None."""
    if value is None or value in ("", (), [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        unit = unit_of(key)  # that of all values
        texts = {title_of(name): value_text(name + unit, each) for name, each in value.items()}
        return ", ".join(f"{title} {text}" for title, text in texts.items() if text != "-") or "-"
    if isinstance(value, list | tuple):
        return ", ".join(value_text(key, each) for each in value)
    if isinstance(value, os.PathLike):
        from hivetune.base.paths import spelled

        return spelled(value)
    if not isinstance(value, int | float):
        return str(value)
    if key in TIMES:
        return moment(value)
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith(SUFFIXES):
        return step_time(value) if value < 90 else duration(value)
    if key.endswith(("_success", "_share")):
        return f"{value:.0%}"
    if isinstance(value, int):
        return str(value) if key in PLAIN_NUMBERS else f"{value:,}"
    return number(value, 0 if abs(value) >= 100 else 3)


def facts(document: Mapping[str, Any], names: str = "") -> str:
    """Return the entries `names` as aligned `key: value` lines; by default all. Those without a value are left out."""
    kept = [(title_of(name), value_text(name, document[name])) for name in names.split() or document]
    kept = [(title, text) for title, text in kept if text != "-"]
    width = max((len(title) for title, _ in kept), default=0) + 1
    return "\n".join(f"{title + ':':{width}} {text}" for title, text in kept)


@dataclass(frozen=True)
class Table:
    """A table with one row for each of `items`. `columns`: keys or attributes of an item, separated by blanks.

    `title=key` gives a column another title. If an item is a tuple, its values are the cells, in order.
    """

    columns: str
    items: Sequence[Any]
    title: str = ""

    def lines(self) -> list[list[str]]:
        """Return the titles, and below them the cells of each item."""
        named = [column.rpartition("=") for column in self.columns.split()]
        keys = [key for _, _, key in named]
        rows = [[title.replace("_", " ") or title_of(key) for title, _, key in named]]
        for item in self.items:
            values = item if isinstance(item, tuple) else [_field(item, key) for key in keys]
            rows.append([value_text(key, value) for key, value in zip(keys, values, strict=True)])
        return rows


def _field(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key)


class Note(str):
    """A line of an answer that goes to stderr, such as the next step, so that stdout has only data."""


# What is printed.


def answer(document: Any, *blocks: str | Table, error: HivetuneError | None = None) -> None:
    """Print the result of a command: its document under `--json`, else the blocks, one below the other.

    With an error, the document contains it too, so that there is a single document. The command exits with its code.
    """
    present(*blocks)
    if error is not None:
        say(f"hivetune: {error}", style="red")
        document = {**document, "error": error_document(error)}
    emit(document)
    if error is not None:
        raise typer.Exit(error.exit_code)


def present(*blocks: str | Table) -> None:
    """Print lines and non-empty tables on stdout, and notes on stderr; under `--json` only the notes."""
    for block in blocks:
        if isinstance(block, Table):
            if block.items:
                _print_table(block)
        elif block:
            say(block) if isinstance(block, Note) else show(block)


def emit(document: Any) -> None:
    """Print a JSON document on stdout; without `--json` do nothing.

    The document may contain every value that `to_plain` converts: frozen dataclasses, paths, tuples.
    """
    if MODE.json:
        with errors_of_stdout():
            print(as_document(document), flush=True)


def emit_until_stopped(document: Any) -> None:
    """Print the document of a command that runs until it is stopped; no second document is printed when it stops."""
    MODE.is_done = True  # first: who reads the document may stop the command at once
    emit(document)


def as_document(document: Any) -> str:
    """Return one line of JSON with its `schema`."""
    # What a terminal would obey is escaped: a document is often printed on one.
    text = json.dumps({"schema": 1, **to_plain(document)}, ensure_ascii=False, allow_nan=False)
    return OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def error_document(error: HivetuneError) -> dict[str, str]:
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


@contextlib.contextmanager
def errors_of_stdout() -> Iterator[None]:
    """Add the name "standard output" to an OSError of the block."""
    try:
        yield
    except OSError as error:  # it concerns no file that the user named
        error.filename = "standard output"
        raise


def say(text: str = "", style: str = "") -> None:
    """Print a line on stderr."""
    try:
        console(stderr=True).print(clean(text), markup=False, style=style)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # on a full disk the line is lost, and the command continues
            raise


def show(text: str) -> None:
    """Print a line of the answer on stdout; under `--json` do nothing, since the document has the same content."""
    if not MODE.json:
        with errors_of_stdout():
            console().print(clean(text), markup=False)


def write(text: str) -> None:
    """Write a piece of a model's answer on stdout, cleaned if it is a terminal."""
    with errors_of_stdout():
        sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def _print_table(table: Table) -> None:
    """Print a table on stdout. A pipe or a file gets lines separated by tabs, for `cut`, `sort` and spreadsheets."""
    if MODE.json:
        return
    screen, (titles, *rows) = console(), table.lines()
    if not screen.is_terminal:
        if table.title:
            say(table.title)
        for cells in (titles, *rows):
            print(clean("\t".join(" ".join(cell.split()) for cell in cells)))  # rich would replace tabs by spaces
        return
    from rich.table import Table as Grid
    from rich.text import Text

    title = Text(clean(table.title)) if table.title else None
    grid = Grid(title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(titles):
        of_numbers = all(re.match(r"[-+]?\d|-?$", row[place]) for row in rows)
        grid.add_column(column, justify="right" if of_numbers else "left", overflow="fold", header_style="bold")
    for row in rows:
        grid.add_row(*(Text(clean(cell)) for cell in row))
    screen.print(grid)


class Report(Protocol):
    """A progress callback; `note`, such as the loss, is shown after the bar."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


@contextlib.contextmanager
def progress(label: str, unit: str = "") -> Iterator[Report]:
    """Show progress: a bar on a terminal, otherwise a line about every ten seconds. Without `unit` nothing is counted.

    A total of None is unknown. A total that becomes None means that all items are read, and that a slower step follows.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield plain_progress(label, unit)
        return
    from rich import progress as rich

    counted = (rich.MofNCompleteColumn(), rich.TextColumn(unit)) if unit else ()
    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), *counted)
    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    noted = rich.TextColumn("{task.fields[note]}", markup=False)
    with rich.Progress(*columns, *times, noted, console=screen, transient=True) as bar:
        task = bar.add_task(clean(label), total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


def plain_progress(label: str, unit: str) -> Report:
    """Return a callback that prints a line about every ten seconds."""
    started = last = time.monotonic()
    first = (started, 0, -1)  # when an item of this total was first done, since models are loaded before; items, total

    def report(done: int, total: int | None, note: str = "") -> None:
        nonlocal last, first
        now = time.monotonic()
        if done and total and total != first[2]:
            first = (now, done, total)
        is_due = now - last >= PLAIN_LINE_EVERY_S or done == total
        if not is_due or now - started < PLAIN_LINE_EVERY_S / 2:  # a short work needs no line
            return
        last = now
        told = [f"{done:,}{f' of {total:,}' if total else ''} {unit}" if unit else f"{duration(now - started)} so far"]
        if total and first[1] < done < total and first[2] == total:
            told.append(f"{duration((now - first[0]) / (done - first[1]) * (total - done))} left")
        say(f"{label}: {', '.join([*told, *filter(None, [note])])}")

    return report


# From an exception to words: an OSError says file and cause itself, and what people really met has a hint of its own.

# Packages of the extra `serve`, which a command imports when it is loaded.
OF_SERVE = frozenset({"starlette", "uvicorn", "httpx2", "prometheus_client"})
FREE_SPACE = "free some space, then run the same command again"


def explain(error: Exception) -> HivetuneError:
    """Return an exception as a HivetuneError with message and hint; the traceback of an unknown one goes to a file."""
    from sqlite3 import DatabaseError

    from hivetune.base.disk import FULL_DISK, home
    from hivetune.base.paths import install_command, path_hint, real_path

    if isinstance(error, ModuleNotFoundError) and error.name in OF_SERVE:
        return MachineNotFit(f"the package {error.name} is not installed", hint=install_command("serve"))
    if isinstance(error, MemoryError):
        return DoesNotFit("out of memory", hint="free some memory, then run the same command again")
    if isinstance(error, DatabaseError):
        return _database_error(str(error), home())
    if not isinstance(error, OSError) or error.errno is None:
        return report_bug(error)
    if error.errno == errno.ENOENT and error.filename is None:  # of os.getcwd
        return UsageError("the working directory was deleted", hint="change to a folder that exists")
    message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if error.errno in FULL_DISK:
        return DoesNotFit(f"the disk is full: {message}", hint=FREE_SPACE)
    if not error.filename or error.errno == errno.EIO:  # no path that another one could replace
        return HivetuneError(message)
    # A home that can't be made is refused by name, or by that of a folder above it.
    path, own = real_path(str(error.filename)), home()
    of_home = path.is_relative_to(own) or own.is_relative_to(path)
    is_closed = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    other = "; or keep everything elsewhere: export HIVETUNE_HOME=FOLDER" if of_home and is_closed else ""
    return UsageError(message, hint=path_hint(error) + other)


def _database_error(text: str, home: Path) -> HivetuneError:
    """Return an SQLite error as a HivetuneError about the store. Its I/O error is nearly always a disk without room for
    a log or for shared memory (sqlite.org/wal.html, 8)."""
    if "full" in text or "disk I/O error" in text:
        return DoesNotFit(f"the disk of {home} is full, or failing: {text}", hint=FREE_SPACE)
    if "locked" in text:
        return Busy(f"the store is in use: {text}", hint="try again when the other command has ended")
    hint = "restore hive.db, or the snapshot, from a backup; or set HIVETUNE_HOME to a folder that you can write to"
    return UsageError(f"a database is damaged, or cannot be written: {text}", hint=hint)


def report_bug(error: Exception) -> HivetuneError:
    """Return the error for a bug; its traceback is written to a file of the home, or is in the message."""
    from hivetune.base.disk import home

    text = "".join(traceback.format_exception(error))
    message = f"this is a bug in Hivetune: {type(error).__name__}: {error}"
    path = home() / "bugs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as unwritten:
        hint = f"please report it with these lines ({path}: {unwritten.strerror})"
        return HivetuneError(f"{message}\n{text}", hint=hint)
    return HivetuneError(message, hint=f"please report it with {path}; check it first, since it may quote your rows")

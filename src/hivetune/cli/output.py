"""The output of the command line: data on stdout, messages on stderr, one JSON document under `--json`.

A command hands its result to `answer` once, with the lines and tables that people read. A terminal gets tables and
progress bars, anything else plain lines. All text passes `clean`, since names of files, messages and answers come from
outside.
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
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import typer

from hivetune.base.typed import to_plain
from hivetune.base.units import duration as duration
from hivetune.base.units import number as number
from hivetune.base.units import size as size
from hivetune.errors import HivetuneError

if TYPE_CHECKING:  # `hivetune --help` waits for no rich
    from rich.console import Console

PLAIN_LINE_EVERY_S = 10.0
AFTER_ROWS = "all read, looking for duplicates"
PLAIN_WIDTH = 120  # columns of a table where there is no terminal

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


def settle_encodings() -> None:
    """Set the encodings of the standard streams.

    JSON is UTF-8. Text is too where the locale knows only ASCII (LC_ALL=C in cron and containers). Characters that
    another encoding lacks are escaped, such as \\u2502.
    """
    if sys.stdin is None:  # the parent process closed it
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_alone = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(
                encoding="utf-8" if ascii_alone or MODE.json else None,
                errors="replace" if stream is sys.stdin else "backslashreplace",
            )


# Texts of values.


def short(text: str, chars: int = 160) -> str:
    """Return `text` on one line of at most `chars` characters."""
    return textwrap.shorten(text, chars, placeholder=" ...")


def moment(seconds: float | None) -> str:
    """Return a point in time in local time, to the minute."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def parts(value: object, names: str) -> dict[str, Any]:
    """Return the attributes `names`, which blanks separate, for a document."""
    return {name: getattr(value, name) for name in names.split()}


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "time": moment,
    "size": size,
    "duration": duration,
    "count": "{:,}".format,
    "percent": "{:.0%}".format,
    **{str(digits): partial(number, digits=digits) for digits in range(4)},
}


@dataclass(frozen=True)
class Table:
    """`items` below `columns`, such as "run=run.name, state, loss|3".

    A column has a title, the field that it shows (else that of its title) and one of FORMATS. A field is a key or an
    attribute of the item; the cells of a tuple are taken in order. What is not there is shown as "-".
    """

    columns: str
    items: Sequence[Any]
    title: str = ""

    def lines(self) -> list[list[str]]:
        """Return the titles, and below them the cells of each item."""
        columns = [re.split("[|=]", column.strip())[0] for column in self.columns.split(",")]
        specs = [column.partition("|") for column in self.columns.split(",")]
        fields = [named.strip().rpartition("=")[2].replace(" ", "_") for named, _, _ in specs]
        forms = [form for _, _, form in specs]
        rows = []
        for item in self.items:
            values = item if isinstance(item, tuple) else [_field(item, field) for field in fields]
            rows.append([_cell(value, form) for value, form in zip(values, forms, strict=True)])
        return [columns, *rows]


def _field(item: Any, path: str) -> Any:
    for name in path.split("."):
        item = item[name] if isinstance(item, Mapping) else getattr(item, name)
    return item


def _cell(value: Any, form: str) -> str:
    if value is None or value == () or value == []:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return FORMATS[form](value) if form else str(value)


class Note(str):
    """A line of an answer that belongs to stderr: what to do next, or what a reader of the data has no use for."""


# What is printed.


def answer(document: Any, *blocks: str | Table, error: HivetuneError | None = None) -> None:
    """Print the result of a command: its document under `--json`, else the blocks, one below the other.

    With an error the document names it too, so that there is one document, and the command ends with its code.
    """
    present(*blocks)
    if error is not None:
        say(f"hivetune: {error}", style="red")
        document = {**document, "error": error_document(error)}
    emit(document)
    if error is not None:
        raise typer.Exit(error.exit_code)


def present(*blocks: str | Table) -> None:
    """Print lines and tables, one below the other; under `--json` only notes, which go to stderr."""
    for block in blocks:
        if isinstance(block, Table):
            _print_table(block)
        elif isinstance(block, Note):
            say(block)
        elif block:
            show(block)


def emit(document: Any) -> None:
    """Print a JSON document on stdout; without `--json` do nothing.

    It may hold whatever `to_plain` knows: frozen dataclasses, paths, tuples.
    """
    if MODE.json:
        with errors_of_stdout():
            print(as_document(document), flush=True)


def emit_until_stopped(document: Any) -> None:
    """Print the document of a command that goes on until it is stopped: a stop adds no second one."""
    MODE.is_done = True  # first: who reads the document may stop the command at once
    emit(document)


def as_document(document: Any) -> str:
    """Return one line of JSON with its `schema`, control characters escaped."""
    text = json.dumps({"schema": 1, **to_plain(document)}, ensure_ascii=False, allow_nan=False)
    return OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def error_document(error: HivetuneError) -> dict[str, str]:
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


@contextlib.contextmanager
def errors_of_stdout() -> Iterator[None]:
    """Name standard output in an OSError of the block, which concerns no file that the user named."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


def say(text: str = "", style: str = "") -> None:
    """Print a line on stderr. On a full disk the line is lost and the command continues."""
    try:
        console(stderr=True).print(clean(text), markup=False, style=style)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def show(text: str, style: str = "") -> None:
    """Print a line of the answer on stdout, in a style of rich; under `--json` the document holds it instead."""
    if not MODE.json:
        with errors_of_stdout():
            console().print(clean(text), markup=False, style=style)


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
    """Print a table on stdout. A column of numbers is aligned to the right.

    A pipe or a file gets lines separated by tabs, for `cut`, `sort` and spreadsheets.
    """
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


def open_in_browser(address: str) -> bool:
    """Return whether a browser was started. Without a screen `webbrowser` would start a program in the terminal."""
    screen = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    return screen and webbrowser.open(address)


def show_unit(text: str, name: str, **more: Any) -> None:
    """Show a systemd user unit, and how to install it under a name."""
    install = f"save it as ~/.config/systemd/user/{name}.service, then: systemctl --user enable --now {name}"
    answer({**more, "unit": text}, text, Note(install))


class Report(Protocol):
    """A progress callback; `note`, such as the loss, is shown after the bar."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


@contextlib.contextmanager
def progress(label: str, unit: str = "", after: str = "") -> Iterator[Report]:
    """Show progress: a bar on a terminal, otherwise a line about every ten seconds.

    Without `unit` nothing is counted. `after` names the work that follows the last item.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield plain_progress(label, unit, after)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    counted = (MofNCompleteColumn(), TextColumn(unit)) if unit else ()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counted, TimeElapsedColumn())
    noted = TextColumn("{task.fields[note]}", markup=False)
    with Progress(*columns, TimeRemainingColumn(), noted, console=screen, transient=True) as bar:
        task, counting = bar.add_task(clean(label), total=None, note=""), True

        def report(done: int, total: int | None, note: str = "") -> None:
            nonlocal task, counting
            if counting and after and done and total is None:  # rich cannot remove a total, so another bar starts
                bar.remove_task(task)
                task, counting = bar.add_task(clean(f"{label}: {after}"), total=None, note=""), False
            bar.update(task, completed=done, total=total, note=note)

        yield report


def plain_progress(label: str, unit: str, after: str = "") -> Report:
    """Return a callback that prints a line about every ten seconds.

    The time left is counted from the first item, since models are loaded before it.
    """
    started = last = time.monotonic()
    first = (started, 0, -1)  # time of the first report with this total, items done by then, and the total

    def report(done: int, total: int | None, note: str = "") -> None:
        nonlocal last, first
        now = time.monotonic()
        if done and total and total != first[2]:
            first = (now, done, total)
        is_after = bool(after and done and total is None)
        is_due = now - last >= PLAIN_LINE_EVERY_S or done == total or is_after
        if not is_due or now - started < PLAIN_LINE_EVERY_S / 2:
            return
        last = now
        told = [f"{done:,}{f' of {total:,}' if total else ''} {unit}" if unit else f"{duration(now - started)} so far"]
        new = done - first[1]
        if total and 0 < new < total - first[1]:
            told.append(f"{duration((now - first[0]) / new * (total - done))} left")
        told += [note or after] if note or is_after else []
        say(f"{label}: {', '.join(told)}")

    return report

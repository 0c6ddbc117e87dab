"""The output of the command line: data on stdout, messages on stderr, one JSON document under `--json`.

A terminal gets tables and progress bars, anything else plain lines. All text passes `clean`, since names of files,
messages and answers come from outside.
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
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

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


class Report(Protocol):
    """A progress callback; `note`, such as the loss, is shown after the bar."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


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


def short(text: str, chars: int = 160) -> str:
    """Return `text` on one line of at most `chars` characters."""
    return textwrap.shorten(text, chars, placeholder=" ...")


def moment(seconds: float | None) -> str:
    """Return a point in time in local time, to the minute."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def err() -> "Console":
    return _console(stderr=True)


def out() -> "Console":
    return _console(stderr=False)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


@contextlib.contextmanager
def errors_of_stdout() -> Iterator[None]:
    """Name standard output in an OSError of the block, which concerns no file that the user named."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


def emit(document: Any) -> None:
    """Print the JSON document of a command on stdout; without `--json` do nothing.

    It may hold whatever `to_plain` knows: frozen dataclasses, paths, tuples.
    """
    if MODE.json:
        with errors_of_stdout():
            print(as_document(document), flush=True)


def emit_until_stopped(document: Any) -> None:
    """Print the document of a command that goes on until it is stopped: a stop adds no second one."""
    MODE.is_done = True  # first: who reads the document may stop the command at once
    emit(document)


def emit_failed(document: Mapping[str, Any], error: HivetuneError) -> NoReturn:
    """Print the error, and with `--json` the document with it: one document, so the error is not raised. Exit."""
    say(f"hivetune: {error}", style="red")
    emit({**document, "error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}})
    raise typer.Exit(error.exit_code)


def as_document(document: Any) -> str:
    """Return one line of JSON with its `schema`, control characters escaped."""
    text = json.dumps({"schema": 1, **to_plain(document)}, ensure_ascii=False, allow_nan=False)
    return OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parts(value: object, *names: str) -> dict[str, Any]:
    """Return these attributes of a value, for a document."""
    return {name: getattr(value, name) for name in names}


def say(text: str = "", style: str = "") -> None:
    """Print a line on stderr. On a full disk the line is lost and the command continues."""
    try:
        err().print(clean(text), markup=False, style=style)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def show(text: str, style: str = "") -> None:
    """Print a line of the answer on stdout, in a style of rich; under `--json` the document holds it instead."""
    if not MODE.json:
        with errors_of_stdout():
            out().print(clean(text), markup=False, style=style)


def write(text: str) -> None:
    """Write a piece of a model's answer on stdout, cleaned if it is a terminal."""
    with errors_of_stdout():
        sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


# The title of each column, and what its cell shows of an item: a key, an attribute, or what a function returns.
Columns = Mapping[str, str | Callable[[Any], object]]


@dataclass(frozen=True)
class Table:
    """`items` below columns. A column is aligned to the right where each of its cells begins as a number does."""

    columns: Columns
    items: Sequence[Any]
    title: str = ""

    def cells(self) -> list[tuple[object, ...]]:
        """Return the cells of each row."""
        return [tuple(_cell(item, shown) for shown in self.columns.values()) for item in self.items]


def _cell(item: Any, shown: str | Callable[[Any], object]) -> object:
    if callable(shown):
        return shown(item)
    return item[shown] if isinstance(item, Mapping) else getattr(item, shown)


def answer(document: Any, *blocks: str | Table) -> None:
    """Print the result of a command: its document under `--json`, else the blocks, one below the other."""
    for block in blocks:
        if isinstance(block, Table):
            table(block.title, tuple(block.columns), block.cells())
        else:
            show(block)
    emit(document)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stdout. A column of numbers is aligned to the right.

    A pipe or a file gets lines separated by tabs, for `cut`, `sort` and spreadsheets.
    """
    if MODE.json:
        return
    console = out()
    if not console.is_terminal:
        if title:
            say(title)
        for cells in (columns, *rows):
            print(clean("\t".join(" ".join(str(cell).split()) for cell in cells)))  # rich would replace tabs by spaces
        return
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(title=Text(clean(title)) if title else None, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        of_numbers = all(_NUMBER.match(str(row[index])) for row in rows)
        grid.add_column(column, justify="right" if of_numbers else "left", overflow="fold", header_style="bold")
    for row in rows:
        grid.add_row(*(Text(clean(str(cell))) for cell in row))
    console.print(grid)


_NUMBER = re.compile(r"[-+]?\d|-?$")


def open_in_browser(address: str) -> bool:
    """Return whether a browser was started. Without a screen `webbrowser` would start a program in the terminal."""
    screen = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    return screen and webbrowser.open(address)


def show_unit(text: str, name: str, **more: Any) -> None:
    """Show a systemd user unit, and how to install it under a name."""
    show(text)
    say(f"save it as ~/.config/systemd/user/{name}.service, then: systemctl --user enable --now {name}")
    emit({**more, "unit": text})


@contextlib.contextmanager
def progress(label: str, unit: str = "", after: str = "") -> Iterator[Report]:
    """Show progress: a bar on a terminal, otherwise a line about every ten seconds.

    Without `unit` nothing is counted. `after` names the work that follows the last item.
    """
    console = err()
    if not console.is_terminal:
        yield plain_progress(label, unit, after)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    counted = (MofNCompleteColumn(), TextColumn(unit)) if unit else ()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counted)
    noted = TextColumn("{task.fields[note]}", markup=False)
    with Progress(*columns, TimeElapsedColumn(), Remaining(), noted, console=console, transient=True) as bar:
        task, counting = bar.add_task(clean(label), total=None, note=""), True

        def report(done: int, total: int | None, note: str = "") -> None:
            nonlocal task, counting
            if counting and after and done and total is None:  # rich cannot remove a total, so another bar starts
                bar.remove_task(task)
                task, counting = bar.add_task(clean(f"{label}: {after}"), total=None, note=""), False
            bar.update(task, completed=done, total=total, note=note)

        yield report


def plain_progress(label: str, unit: str, after: str = "") -> Report:
    """Return a callback that prints a line about every ten seconds, with the time left since the first item: models
    are loaded before it.
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
        told += [text for text in (note or (after if is_after else ""),) if text]
        say(f"{label}: {', '.join(told)}")

    return report

"""How the command line speaks: data to stdout, everything else to stderr, one JSON document under `--json`.

On a terminal: rich tables and progress bars with the time left. Elsewhere: plain lines, one per event. Whatever is said
goes through `clean`: names of files and columns, messages and answers are other people's text.
"""

import codecs
import contextlib
import errno
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hivetune.base.units import duration as duration
from hivetune.base.units import number as number
from hivetune.base.units import size as size

PLAIN_LINE_EVERY_S = 10.0
AFTER_ROWS = "all read, comparing them"
PLAIN_WIDTH = 120  # columns of a table where there is no terminal

# What a terminal obeys instead of showing it: C0 but tab and newline, DEL, C1, and the marks that turn the direction of
# writing (CVE-2021-42574). A lone surrogate is a byte of a file name that is no UTF-8, which no terminal can be sent.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class _Report(Protocol):
    """Tells how far it is; `note` stands behind the bar, such as the loss."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


@dataclass
class Mode:
    """Set once by main() from the command line."""

    json: bool = False


MODE = Mode()


def clean(text: str) -> str:
    """`text` as a terminal may be sent it: what it would obey is spelled out, such as \\x1b."""
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def settle_encodings() -> None:
    """Documents are UTF-8 everywhere; so is text where the locale knows ASCII alone (LC_ALL=C: cron, containers), since
    no terminal does. What another encoding can't hold is spelled out, such as \\u2502.
    """
    if sys.stdin is None:  # closed by whoever started this process: there is nothing to read
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (as long as the process lives)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_alone = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(
                encoding="utf-8" if ascii_alone or MODE.json else None,
                errors="replace" if stream is sys.stdin else "backslashreplace",
            )


def err() -> Console:
    return _console(stderr=True)


def out() -> Console:
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


@contextlib.contextmanager
def errors_of_stdout() -> Iterator[None]:
    """An OSError of the block says where the output went: it is about no file that a person has named."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


def emit(document: dict[str, Any]) -> None:
    """The one JSON document of a command, on stdout; nothing without `--json`."""
    if MODE.json:
        with errors_of_stdout():
            print(as_document(document), flush=True)


def as_document(document: dict[str, Any]) -> str:
    """One line of JSON with its `schema`, what a terminal would obey escaped."""
    text = json.dumps({"schema": 1, **document}, ensure_ascii=False, allow_nan=False)
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str = "", style: str = "") -> None:
    """One line for people, on stderr. A log on a full disk loses it, and nothing else goes wrong by that."""
    try:
        err().print(clean(text), markup=False, style=style)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def show(text: str, style: str = "") -> None:
    """What a person asked for, on stdout; nothing under `--json`, where the document holds it. `style`: of rich, for a
    terminal that has colours and is not told NO_COLOR."""
    if not MODE.json:
        with errors_of_stdout():
            out().print(clean(text), markup=False, style=style)


def write(text: str) -> None:
    """A piece of a model's answer, on stdout: as it is for a program that reads it, cleaned for a terminal."""
    with errors_of_stdout():
        sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, numeric: Sequence[str] = ()) -> None:
    """A table of text cells where `show` writes; columns named in `numeric` are right-aligned.

    Into a pipe or a file: a line of names and a line a row, divided by tabs, for `cut`, `sort` and spreadsheets.
    """
    if MODE.json:
        return
    console = out()
    if not console.is_terminal:
        if title:
            say(title)
        for cells in (columns, *rows):
            print(clean("\t".join(" ".join(str(cell).split()) for cell in cells)))  # rich would make spaces of tabs
        return
    grid = Table(
        title=Text(clean(title)) if title else None, title_justify="left", title_style="bold", header_style="bold"
    )
    for column in columns:
        grid.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(clean(str(cell))) for cell in row))
    console.print(grid)


@contextlib.contextmanager
def progress(label: str, unit: str = "", after: str = "") -> Iterator[_Report]:
    """How far it is: a bar on a terminal, else a plain line about every ten seconds. No `unit`: nothing is counted.

    `after`: what goes on when items are done and there is no total any more, so that no bar stands at its end.
    """
    console = err()
    if not console.is_terminal:
        yield plain_progress(label, unit, after)
        return
    counted = (MofNCompleteColumn(), TextColumn(unit)) if unit else ()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counted)
    noted = TextColumn("{task.fields[note]}", markup=False)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), noted, console=console, transient=True) as bar:
        task, counting = bar.add_task(clean(label), total=None, note=""), True

        def report(done: int, total: int | None, note: str = "") -> None:
            nonlocal task, counting
            if counting and after and done and total is None:  # a bar's total can't be taken away: another one
                bar.remove_task(task)
                task, counting = bar.add_task(clean(f"{label}: {after}"), total=None, note=""), False
            bar.update(task, completed=done, total=total, note=note)

        yield report


def plain_progress(label: str, unit: str, after: str = "") -> _Report:
    """The time left is told by what was done since the first item: before that one, models are loaded."""
    started = last = time.monotonic()
    first = (started, 0, -1)  # when the first items of this total were done, how many they were, and the total

    def report(done: int, total: int | None, note: str = "") -> None:
        nonlocal last, first
        now = time.monotonic()
        if done and total and total != first[2]:
            first = (now, done, total)
        done_counting = bool(after and done and total is None)
        if now - last < PLAIN_LINE_EVERY_S and done != total and not done_counting:
            return
        if now - started < PLAIN_LINE_EVERY_S / 2:
            return
        last = now
        new = done - first[1]
        left = (
            f", {duration((now - first[0]) / new * (total - done))} left"
            if total and 0 < new < total - first[1]
            else ""
        )
        counted = (
            f" {done:,}{f' of {total:,}' if total else ''} {unit}" if unit else f" {duration(now - started)} so far"
        )
        told = note or (after if done_counting else "")
        say(f"{label}:{counted}{left}{f', {told}' if told else ''}")

    return report

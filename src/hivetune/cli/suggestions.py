"""Mappings that are suggested for rows of no named layout: shown with what they would read, and confirmed once."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hivetune.base.paths import spelled
from hivetune.cli.output import say, show
from hivetune.config import RunConfig
from hivetune.data.mapping import check_columns, parse_columns
from hivetune.data.prepare.understand import suggested_for

QUESTION = "Read the rows so? [Y/n/2/3/edit]"


def show_suggestion(line: Mapping[str, Any]) -> None:
    """A mapping with the rows that it would read, and what it leaves out."""
    left_out = f"   left out: {', '.join(line['left_out'])}" if line["left_out"] else ""
    show(f"  {line['line']}{left_out}")
    for row in line["shown"]:
        show(f"    asked: {row['question']}\n    answered: {row['answer']}")


def confirm_columns(settings: RunConfig) -> tuple[dict[str, str] | None, bool]:
    """(the mapping for the rows, whether a person confirmed it). None: the rows need none, or nobody knows one, or the
    person said no. Without a terminal nobody is asked.
    """
    if settings.data.columns:
        return None, False
    name, lines = next(iter(suggested_for(settings.data.path, settings.data.encoding).items()), ("", []))
    if not lines:
        return None, False
    show(f"{spelled(name)}: its layout has no name; it may be read as follows:")
    for number, line in enumerate(lines, 1):
        show(f" {number}.")
        show_suggestion(line)
    if not sys.stdin.isatty():
        say("nobody is here to ask: the suggestion is written as a comment")
        return dict(lines[0]["columns"]), False
    return _answer(lines)


def _answer(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str] | None, bool]:
    said = typer.prompt(QUESTION, default="Y", show_default=False).strip().lower()
    if said in ("y", "yes", "1"):
        return dict(lines[0]["columns"]), True
    if said.isdecimal() and 1 < int(said) <= len(lines):
        return dict(lines[int(said) - 1]["columns"]), True
    if said in ("e", "edit"):
        text = typer.prompt("--columns", default=",".join(f"{a}={b}" for a, b in lines[0]["columns"].items()))
        columns = parse_columns(text)
        check_columns(columns)
        return columns, True
    return None, False

"""A page of documentation after parsing: its summary, its entries and its prose."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

EntryKind = Literal["option", "directive", "function"]

# An option wherever it stands in a text: -n, --lines, -Wall; not a range (a-z), a number (-1) or a ruler (---).
_OPTION = re.compile(r"(?<![\w/.+@-])(--[A-Za-z0-9][\w.-]*\w|--[A-Za-z]|-[A-Za-z?#@][\w-]*)")


class NotUnderstood(Exception):
    """Raised, with the reason, for a page from which no question can be made."""


@dataclass(frozen=True, slots=True)
class DocEntry:
    """An option, command, setting, function or class that a page documents."""

    kind: EntryKind
    names: tuple[str, ...]  # "-n", "--lines"
    usage: str  # as it is written there
    text: str
    section: str


@dataclass(frozen=True, slots=True)
class DocPassage:
    """The prose below a heading of a document, or of a module."""

    heading: str
    text: str


@dataclass(frozen=True)
class DocPage:
    """A parsed page of documentation."""

    label: str  # how it is cited, as systemctl(1)
    path: Path
    command: str | None = None  # what is typed to run what it documents, if it is a command
    summary: str = ""
    entries: tuple[DocEntry, ...] = ()
    passages: tuple[DocPassage, ...] = ()
    has_commands: bool = False  # what is typed may need one of its sub-commands
    text: str = field(default="", repr=False)  # all that it says, for the checks

    @property
    def called(self) -> str:
        """Return the name by which a question refers to the page: the command, else the page's name."""
        return self.command or re.sub(r"\([18]\w*\)$", "", self.label)

    @cached_property
    def options(self) -> frozenset[str]:
        """Return every option that is named anywhere on the page."""
        return options_in(self.text) | {name for e in self.entries if e.kind == "option" for name in e.names}


def options_in(text: str) -> frozenset[str]:
    """Return the options in a text, without the values after `=`."""
    return frozenset(option.rstrip(".-") if len(option) > 2 else option for option in _OPTION.findall(text))

"""A source of interactions, and the parsing of each delivery into rows: a line, the cells of a table, an entry of a
stream.
"""

import codecs
import contextlib
import difflib
import json
import sqlite3
import urllib.parse
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from hivetune.data.formats import rows_inside
from hivetune.data.intake.interactions import Batch, Delivery
from hivetune.data.pieces.turns import is_conversation
from hivetune.data.pieces.values import objects
from hivetune.data.read import parse_row, refuse_constant, refuse_session_line
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

# Names of a cell that holds the row, beside its facts, as programs that log to a queue or a table call it. Where a row
# is in another one, field= names it.
WRAPPERS = ("data", "json", "payload", "event", "body")
Batches = Generator[Batch | None, None, None]


class Reader:
    """A source. `name` and `notes` are for people and never contain a password. `waiting`: the places of incomplete
    rows. `retrying`: the source can't be reached at the moment.
    """

    def __init__(self, name: str):
        self.name = name
        self.notes: list[str] = []
        self.waiting: list[str] = []
        self.retrying = False

    def note(self, text: str) -> None:
        """Add a note, unless it was added before."""
        if text not in self.notes:
            self.notes.append(text)

    def batches(self, database: sqlite3.Connection, follow: bool) -> Batches:
        """Yield the rows after the stored position, and None when there are no more at the moment.

        The caller makes each batch durable before it requests the next. With `follow`, rows that arrive later are
        yielded too. Raise UsageError, DataRefused, MachineNotFit, Busy.
        """
        raise NotImplementedError


def delivered(
    origin: str, place: str, given: Any, rows: Callable[[Any], Sequence[Mapping[str, Any]]], time: float | None = None
) -> list[Delivery]:
    """Return the deliveries of the rows at one place (a line or named cells), or one delivery with the reason of their
    refusal.
    """
    try:
        return [Delivery(origin, place, row, time=time) for row in rows(given)]
    except RowRefused as refused:
        raw = given if isinstance(given, bytes) else repr(given).encode("utf-8", "replace")
        return [Delivery(origin, place, refused, raw=raw)]


def rows_of_text(text: bytes) -> list[dict[str, Any]]:
    """Return the row in a JSON text, or the rows nested in it. Raise RowRefused."""
    # A log that was truncated under its writer has zeros in front of its next line.
    text = text.lstrip(b"\0").strip().removeprefix(codecs.BOM_UTF8)
    rows = [dict(parse_row(payload)) for payload in rows_inside(text) or [text]]
    for row in rows:
        refuse_session_line(row)
    return rows


def rows_of_cells(cells: Mapping[str, Any], field: str | None) -> list[dict[str, Any]]:
    """Return the rows in named cells, usually one. Raise RowRefused.

    The row is the JSON in `field`, else in one of WRAPPERS (together with the other cells), else the cells themselves,
    in which JSON objects and arrays are parsed.
    """
    # With nothing beside it, what is wrong with the wrapper's JSON is the reason to tell.
    only = next(iter(cells)) if len(cells) == 1 else ""
    if field is None and only in WRAPPERS:
        field = only
    if field is not None:
        if cells.get(field) is None:
            raise RowRefused("bad-json", f"the entry has no {field}: correct field= in the source's address")
        return _rows_of_document(cells[field])
    row = {name: _parsed(name, value) for name, value in cells.items()}
    wrapper = next((name for name in WRAPPERS if isinstance(row.get(name), dict)), None)
    if wrapper is not None:
        row |= row.pop(wrapper)
    inside = rows_inside(json.dumps(row).encode())
    return [row] if inside is None else [dict(parse_row(payload)) for payload in inside]


def _rows_of_document(text: str | bytes) -> list[dict[str, Any]]:
    payload = text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")
    with contextlib.suppress(ValueError, RecursionError):  # `rows_of_text` says what is wrong
        value = json.loads(payload)
        if isinstance(value, list) and (items := objects(value)) and not is_conversation(value):
            return [row for item in items for row in rows_of_text(json.dumps(item).encode())]
    return rows_of_text(payload)


def _parsed(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            hint = "store it as text; of a table, collect a view without it: ?table=VIEW&cursor=COLUMN"
            raise RowRefused("bad-characters", f"{name} contains bytes that are not text: {hint}") from None
    if isinstance(value, str) and value.startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):  # a text like others
            return json.loads(value, parse_constant=refuse_constant)
    return value


def parse_options(query: str, names: Sequence[str], source: str, *, strict: bool) -> dict[str, str]:
    """Return those parameters of a URL's query that are ours. Raise UsageError for other parameters; if not `strict`,
    only for those whose names are similar to ours."""
    # Of a URL the others belong to the client. No password is shown.
    shown = source.partition("?")[0].rpartition("@")[2]
    options: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        near = difflib.get_close_matches(name, names, 1)
        if name in names:
            options[name] = value
        elif strict or near:
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise UsageError(f"{shown}: unknown option {name}", hint=hint)
    return options

"""The reader of tables in other programs' SQLite files, page by page, without blocking their writers."""

import contextlib
import difflib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from hivetune.base.database import open_to_read
from hivetune.base.paths import spelled
from hivetune.data.intake.interactions import Batch, Delivery, read_cursor
from hivetune.data.intake.reader import Batches, Reader, delivered, parse_options, rows_of_cells
from hivetune.errors import Busy, UsageError

PAGE_ROWS = 1000
OPTIONS = ("table", "cursor", "field")
Cells = dict[str, Any]


class SqliteReader(Reader):
    """The Reader of one table or view, of sqlite:PATH?table=NAME. `cursor=` names a column whose values only grow;
    without it the position is the rowid. Raise UsageError.
    """

    def __init__(self, source: str):
        path, _, query = source.removeprefix("sqlite:").partition("?")
        options = parse_options(query, OPTIONS, source, strict=True)
        if "table" not in options:
            raise UsageError(f"{source} names no table", hint="write sqlite:PATH?table=NAME")
        self._path, self._table = os.path.realpath(os.path.expanduser(path)), options["table"]
        super().__init__(f"{self._path}#{self._table}")
        self._column, field = options.get("cursor"), options.get("field")
        self._rows = partial(rows_of_cells, field=field)
        self._named = [name for name in (self._column, field) if name]
        self._cursor = ""  # the column of the position as SQL has it
        self._rowid = ""  # the name of the rowid, if the table has one that no column hides
        self._connection: sqlite3.Connection

    def batches(self, database: sqlite3.Connection, follow: bool) -> Batches:
        if not os.path.isfile(self._path):
            hint = "give the path of a SQLite file: sqlite:PATH?table=NAME"
            raise UsageError(f"{spelled(self._path)} does not exist", hint=hint)
        key = f"sqlite:{self.name}#{self._column or 'rowid'}"
        # The value of the cursor in the last rows that were read, and a hash of these, which shows rows that come late
        # with the newest value, and a rowid that was deleted and is used again.
        value, known = json.loads(read_cursor(database, key) or "[null, null]")
        self._connection = open_to_read(self._path)
        self._connection.text_factory = _decode
        with contextlib.closing(self._connection), self._explained():
            self._check_table()
            while True:
                page = self._page(value)
                if known == _hash_of_last(page, value):
                    page = [cells for cells in page if cells["#cursor"] != value]
                elif known is not None and self._column is None:
                    # Rows at the end were deleted, and others may have their rowids: all is read again.
                    value = known = None
                    continue
                if not page:
                    yield None
                    continue
                value = page[-1]["#cursor"]
                known = _hash_of_last(page, value)
                deliveries = list[Delivery]()
                for cells in page:
                    place = f"{self.name}:{cells['#rowid'] if self._rowid else cells['#cursor']}"
                    columns = {name: cell for name, cell in cells.items() if not name.startswith("#")}
                    deliveries += delivered(self.name, place, columns, self._rows)
                yield Batch(self.name, deliveries, (key, json.dumps([value, known])))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Busy(f"{self._path} is locked by its writer for more than 30 s", hint="try again later") from None
            hint = "is it a whole SQLite file, and may it be read?"
            raise UsageError(f"{spelled(self._path)}: {error}", hint=hint) from None

    def _check_table(self) -> None:
        """Find the cursor column. Raise UsageError that names the missing table or column and the existing ones."""
        tables = self._query("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')")
        kinds = {row["name"]: row["type"] for row in tables}
        if self._table not in kinds:
            tables_there = ", ".join(sorted(kinds)) or "none"
            raise UsageError(f"{spelled(self._path)} has no table {self._table}", hint=f"its tables: {tables_there}")
        columns = [row["name"] for row in self._query("SELECT name FROM pragma_table_info(?)", self._table)]
        for column in self._named:
            if column not in columns:
                near = difflib.get_close_matches(column, columns, 1)
                hint = f"did you mean {near[0]}?" if near else f"its columns: {', '.join(columns)}"
                raise UsageError(f"{self._table} has no column {column}", hint=hint)
        self._rowid = self._name_of_rowid(kinds[self._table], columns)
        self._cursor = _quote(self._column) if self._column else self._rowid
        if not self._cursor:
            raise UsageError(
                f"{self._table} has no rowid (a view, WITHOUT ROWID, or hidden by columns)",
                hint="name a column whose values only grow: &cursor=COLUMN",
            )
        unread = self._query(f"SELECT count(*) AS n FROM {_quote(self._table)} WHERE NOT ({self._usable})")[0]["n"]
        if unread:
            self.note(f"{self.name}: {unread} rows without a usable {self._column} are not read")

    @property
    def _usable(self) -> str:
        return f"{self._cursor} IS NOT NULL AND typeof({self._cursor}) != 'blob'" if self._column else "TRUE"

    def _name_of_rowid(self, kind: str, columns: Sequence[str]) -> str:
        """Return a name of the rowid that is not a column's; "" for views and tables WITHOUT ROWID, which have none."""
        # The values of a column that is called rowid come in any order, and may be missing.
        free = [name for name in ("rowid", "_rowid_", "oid") if name not in {column.lower() for column in columns}]
        if kind == "table" and free:
            with contextlib.suppress(sqlite3.OperationalError):
                self._query(f"SELECT {free[0]} FROM {_quote(self._table)} LIMIT 1")
                return free[0]
        return ""

    def _page(self, value: int | float | str | None) -> list[Cells]:
        """Return the rows whose cursor has `value`, and the next PAGE_ROWS in order, extended by all rows with the last
        one's value.
        """
        cursor, rows = self._cursor, f"FROM {_quote(self._table)} WHERE {self._usable} AND {self._cursor}"
        at, behind = ("IS NOT ?", "IS NOT ?") if value is None else (">= ?", "> ?")
        query = f"SELECT {cursor} AS value {rows} {behind} ORDER BY {cursor} LIMIT 1 OFFSET {PAGE_ROWS - 1}"
        last = [row["value"] for row in self._query(query, value)]
        query = f'SELECT *, {cursor} AS "#cursor", {self._rowid or "NULL"} AS "#rowid" {rows} {at}'
        query += f" AND {cursor} <= ?" if last else ""
        query += f" ORDER BY {cursor}" + (f", {self._rowid}" if self._rowid else "")
        return self._query(query, value, *last)

    def _query(self, query: str, *values: object) -> list[Cells]:
        # All at once, so that no read lock outlives the call: SQLite can't reset a WAL that is being read.
        cursor = self._connection.execute(query, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _decode(text: bytes) -> str | bytes:
    # An error here would end the query; bytes refuse only their row.
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _hash_of_last(page: Sequence[Cells], value: int | float | str | None) -> str | None:
    """Return a hash of the rows whose cursor has this value; None if there are none."""
    # Sorted: SQLite may give rows with equal values in any order.
    rows = sorted(repr(cells) for cells in page if cells["#cursor"] == value)
    return hashlib.blake2b(repr(rows).encode("utf-8", "replace"), digest_size=12).hexdigest() if rows else None

"""The reader of tables in other programs' SQLite files, page by page without blocking their writers."""

import contextlib
import difflib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hivetune.base.database import open_to_read
from hivetune.base.paths import spelled
from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursor
from hivetune.data.intake.sources.delivered import Batches, Reader, divided, from_columns, parse_line, rename
from hivetune.data.reasons import RowRefused
from hivetune.errors import Busy, UsageError

PAGE_ROWS = 1000
OWN_TABLE = "interactions"
OWN_COLUMNS = {"id", "content_id", "source", "row"}
Cells = dict[str, Any]


class SqliteReader(Reader):
    """The Reader of one table or view.

    `cursor` is a column that only grows, None for the rowid. `column_map` maps our names to columns. Without `table`
    the file is another Hivetune's store, which keeps its rows, sources and ids.
    """

    def __init__(self, path: str, table: str | None, column_map: Mapping[str, str], cursor: str | None):
        self._path = os.path.realpath(os.path.expanduser(path))
        self._is_own_database = table is None
        self._table = table or OWN_TABLE
        super().__init__(self._path if self._is_own_database else f"{self._path}#{self._table}")
        self._map = dict(column_map)
        self._column = cursor
        self._rowid = ""  # the name of the rowid, if the table has one that no column hides
        self._connection: sqlite3.Connection

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        if not os.path.isfile(self._path):
            hint = "give the path of a SQLite file: sqlite:PATH?table=NAME"
            raise UsageError(f"{spelled(self._path)} does not exist", hint=hint)
        key = f"sqlite:{self.name}#{self._column or 'rowid'}"
        # The value of the cursor in the last rows that were read, and a hash of all rows that had it. Rows with this
        # value are read again if they changed; those that were stored are duplicates by their content.
        value, known = json.loads(read_cursor(database, key) or "[null, null]")
        self._connection = open_to_read(self._path)
        self._connection.text_factory = _decode
        with contextlib.closing(self._connection), self._explained():
            self._check_table()
            while True:
                page = self._page(value)
                if known is not None and _hash(cells for cells in page if cells["#cursor"] == value) == known:
                    page = [cells for cells in page if cells["#cursor"] != value]
                elif known is not None and self._column is None:  # rows were deleted, and rowids may be used again
                    value = known = None
                    continue
                if not page:
                    yield None
                    continue
                last = page[-1]["#cursor"]
                value, known = last, _hash(cells for cells in page if cells["#cursor"] == last)
                deliveries = [delivery for cells in page for delivery in self._deliveries(cells)]
                yield Batch(self.name, deliveries, Cursor(key, json.dumps([value, known])))

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
        """Raise UsageError that names what is missing and what is there."""
        kinds = {
            row["name"]: row["type"]
            for row in self._query("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')")
        }
        if self._table not in kinds:
            tables = ", ".join(sorted(kinds)) or "none"
            raise UsageError(f"{spelled(self._path)} has no table {self._table}", hint=f"its tables: {tables}")
        columns = [row["name"] for row in self._query("SELECT name FROM pragma_table_info(?)", self._table)]
        if self._is_own_database and not set(columns) >= OWN_COLUMNS:
            hint = f"name a table: sqlite:{self._path}?table=..."
            raise UsageError(f"{spelled(self._path)} is not a Hivetune store", hint=hint)
        for column in (*self._map.values(), *([self._column] if self._column else [])):
            if column not in columns:
                near = difflib.get_close_matches(column, columns, 1)
                hint = f"did you mean {near[0]}?" if near else f"its columns: {', '.join(columns)}"
                raise UsageError(f"{self._table} has no column {column}", hint=hint)
        self._rowid = self._name_of_rowid(kinds[self._table], columns)
        if self._column is None and not self._rowid:
            raise UsageError(
                f"{self._table} has no rowid (a view, WITHOUT ROWID, or hidden by columns)",
                hint="name a column whose values only grow: &cursor=COLUMN",
            )
        if self._column:
            condition = f"{_quote(self._column)} IS NULL OR typeof({_quote(self._column)}) = 'blob'"
            unread = self._query(f"SELECT count(*) AS n FROM {_quote(self._table)} WHERE {condition}")[0]["n"]
            if unread:
                self.note(f"{self.name}: {unread} rows without a usable {self._column} are not read")

    def _name_of_rowid(self, kind: str, columns: Sequence[str]) -> str:
        """Return a name of the rowid that no column has: the values of such a column come in any order, and may be
        missing. Views and tables WITHOUT ROWID have none.
        """
        free = [name for name in ("rowid", "_rowid_", "oid") if name not in {column.lower() for column in columns}]
        if kind == "table" and free:
            with contextlib.suppress(sqlite3.OperationalError):
                self._query(f"SELECT {free[0]} FROM {_quote(self._table)} LIMIT 1")
                return free[0]
        return ""

    def _page(self, value: int | float | str | None) -> list[Cells]:
        """Return the next rows in the cursor's order, from those with `value` on. Rows with the same value are on one
        page, which has no more than PAGE_ROWS of other values.
        """
        cursor = _quote(self._column) if self._column else self._rowid
        extra = f'{cursor} AS "#cursor"' + (f', {self._rowid} AS "#rowid"' if self._rowid else "")
        order = f"{cursor}, {self._rowid}" if self._rowid else cursor
        where = f"{cursor} IS NOT NULL" if value is None else f"{cursor} >= ?"
        where += f" AND typeof({cursor}) != 'blob'" if self._column else ""
        query = f"SELECT *, {extra} FROM {_quote(self._table)} WHERE {where} ORDER BY {order} LIMIT {2 * PAGE_ROWS + 1}"
        rows = self._query(query, *(() if value is None else (value,)))
        if len(rows) <= 2 * PAGE_ROWS:
            return rows
        last = rows[-1]["#cursor"]
        whole = [cells for cells in rows if cells["#cursor"] != last]
        if all(cells["#cursor"] == value for cells in whole):
            raise UsageError(
                f"{self._table}.{self._column} has more than {PAGE_ROWS} rows with the value {last!r}",
                hint="choose a finer column for cursor=, or leave it out to use the rowid",
            )
        return whole

    def _query(self, query: str, *values: object) -> list[Cells]:
        """Return all rows at once, so that no read lock outlives the call."""
        cursor = self._connection.execute(query, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def _deliveries(self, cells: Cells) -> list[Delivery]:
        place = f"{self._path}#{self._table}:{cells['#rowid'] if self._rowid else cells['#cursor']}"
        columns = {name: value for name, value in cells.items() if not name.startswith("#")}
        try:
            if not self._is_own_database:
                rows = divided(rename(from_columns(columns), self._map))
                return [Delivery(self.name, place, row) for row in rows]
            row = parse_line(str(columns["row"]).encode("utf-8", "surrogatepass"))
        except RowRefused as refused:
            return [Delivery(self.name, place, refused, raw=repr(cells).encode("utf-8", "replace"))]
        source = str(columns["source"])
        return [Delivery(source.rpartition(":")[0], source, row, str(columns["id"]))]


def _decode(text: bytes) -> str | bytes:
    """Return text that is not UTF-8 as bytes, so that only its row is refused."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _hash(rows: Iterator[Cells]) -> str:
    """Return a hash of rows whatever their order."""
    return hashlib.blake2b(repr(sorted(map(repr, rows))).encode("utf-8", "replace"), digest_size=12).hexdigest()

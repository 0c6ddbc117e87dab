"""The reader of tables in other programs' SQLite files, page by page without blocking their writers."""

import contextlib
import difflib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hivetune.base.database import open_to_read
from hivetune.base.paths import spelled
from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursor
from hivetune.data.intake.sources.delivered import Batches, divided, from_columns, parse_line, rename
from hivetune.data.reasons import RowRefused
from hivetune.errors import Busy, UsageError

PAGE_ROWS = 1000
OWN_TABLE = "interactions"
OWN_COLUMNS = {"id", "content_id", "source", "row"}


class SqliteReader:
    """The Reader of one table or view.

    `cursor` is a column that only grows, None for the rowid. `column_map` maps our names to columns. Without `table`
    the file is another Hivetune's store, which keeps its rows, sources and ids.
    """

    def __init__(self, path: str, table: str | None, column_map: Mapping[str, str], cursor: str | None):
        self.poll_s = 0.5
        self.notes: list[str] = []
        self.waiting: list[str] = []
        self._path = os.path.realpath(os.path.expanduser(path))
        self._is_own_database = table is None
        self._table = table or OWN_TABLE
        self.name = self._path if self._is_own_database else f"{self._path}#{self._table}"
        self._map = dict(column_map)
        self._column = cursor
        self._rowid = ""  # the name of the rowid, if the table has one that no column hides
        self._connection: sqlite3.Connection

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        if not os.path.isfile(self._path):
            hint = "give the path of a SQLite file: sqlite:PATH?table=NAME"
            raise UsageError(f"{spelled(self._path)} does not exist", hint=hint)
        key = f"sqlite:{self.name}#{self._column or 'rowid'}"
        stored = read_cursor(database, key)
        # The position: the value of the cursor column, and fingerprints of all rows with it.
        position = json.loads(stored) if stored is not None else {"value": None, "ties": []}
        self._connection = open_to_read(self._path)
        self._connection.text_factory = _decode
        with contextlib.closing(self._connection), self._explained():
            self._check_table()
            page: list[dict[str, Any]] = []
            while not stop.is_set():
                value, ties = position["value"], position["ties"]
                # Start again if the last row has changed: rows were deleted, and rowids may be reused. Unchanged rows
                # have the same ids, so nothing is stored twice.
                looks_back = not page and self._column is None and ties
                if looks_back and list(map(_fingerprint, self._select("= ?", 1, value))) != ties:
                    value, ties = None, []
                page = self._page(value, ties)
                if not page:
                    yield None
                    continue
                last = page[-1]["#cursor"]
                new_ties = [_fingerprint(cells) for cells in page if cells["#cursor"] == last]
                position = {"value": last, "ties": [*(ties if last == value else []), *new_ties]}
                after = json.dumps(position)
                deliveries = [delivery for cells in page for delivery in self._deliveries(cells)]
                yield Batch(self.name, deliveries, Cursor(key, after))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Busy(f"{self._path} is locked by its writer for more than 30 s", hint="try again later") from None
            raise UsageError(
                f"{spelled(self._path)}: {error}", hint="is it a whole SQLite file, and may it be read?"
            ) from None

    def _check_table(self) -> None:
        """Raise UsageError that names what is missing and what is there."""
        names = [row["name"] for row in self._query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        if self._table not in names:
            tables = ", ".join(sorted(names)) or "none"
            raise UsageError(f"{spelled(self._path)} has no table {self._table}", hint=f"its tables: {tables}")
        columns = [row["name"] for row in self._query("SELECT name FROM pragma_table_info(?)", self._table)]
        if self._is_own_database and not set(columns) >= OWN_COLUMNS:
            raise UsageError(
                f"{spelled(self._path)} is not a Hivetune store", hint=f"name a table: sqlite:{self._path}?table=..."
            )
        for column in (*self._map.values(), *([self._column] if self._column else [])):
            if column not in columns:
                near = difflib.get_close_matches(column, columns, 1)
                hint = f"did you mean {near[0]}?" if near else f"its columns: {', '.join(columns)}"
                raise UsageError(f"{self._table} has no column {column}", hint=hint)
        # Views and tables WITHOUT ROWID have none. A column of one of its names is not the rowid: its values may come
        # in any order, and be missing.
        kind = self._query("SELECT type FROM sqlite_master WHERE name = ?", self._table)[0]["type"]
        hidden = {column.lower() for column in columns}
        names = [name for name in ("rowid", "_rowid_", "oid") if kind == "table" and name not in hidden]
        with contextlib.suppress(sqlite3.OperationalError):
            for name in names[:1]:
                self._query(f"SELECT {name} FROM {_quote(self._table)} LIMIT 1")
                self._rowid = name
        if self._column is None and not self._rowid:
            raise UsageError(
                f"{self._table} has no rowid (a view, WITHOUT ROWID, or hidden by columns)",
                hint="name a column whose values only grow: &cursor=COLUMN",
            )
        if self._column:
            condition = f"{_quote(self._column)} IS NULL OR typeof({_quote(self._column)}) = 'blob'"
            unread = self._query(f"SELECT count(*) AS n FROM {_quote(self._table)} WHERE {condition}")[0]["n"]
            if unread:
                self.notes.append(f"{self.name}: {unread} rows without a usable {self._column} are not read")

    def _page(self, value: int | float | str | None, known_ties: Collection[str]) -> list[dict[str, Any]]:
        """Return the next rows in the cursor's order. Rows with the same value are on one page."""
        if value is None:
            late, rows = [], self._select("IS NOT NULL", PAGE_ROWS + 1)
        else:
            ties = self._select("= ?", PAGE_ROWS + 1, value) if self._column else []
            late = [cells for cells in ties if _fingerprint(cells) not in known_ties]
            rows = self._select("> ?", PAGE_ROWS + 1, value)
        if len(rows) > PAGE_ROWS:
            last = rows[-1]["#cursor"]
            rows = [cells for cells in rows if cells["#cursor"] != last]
            if not rows:
                raise UsageError(
                    f"{self._table}.{self._column} has more than {PAGE_ROWS} rows with the value {last!r}",
                    hint="choose a finer column for cursor=, or leave it out to use the rowid",
                )
        return late + rows

    def _select(self, condition: str, limit: int, *values: object) -> list[dict[str, Any]]:
        cursor = _quote(self._column) if self._column else self._rowid
        extra = f'{cursor} AS "#cursor"' + (f', {self._rowid} AS "#rowid"' if self._rowid else "")
        order = f"{cursor}, {self._rowid}" if self._rowid else cursor
        where = f"{cursor} {condition}" + (f" AND typeof({cursor}) != 'blob'" if self._column else "")
        query = f"SELECT *, {extra} FROM {_quote(self._table)} WHERE {where} ORDER BY {order} LIMIT {limit}"
        return self._query(query, *values)

    def _query(self, query: str, *values: object) -> list[dict[str, Any]]:
        """Return all rows at once, so that no read lock outlives the call."""
        cursor = self._connection.execute(query, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def _deliveries(self, cells: dict[str, Any]) -> list[Delivery]:
        row_name = self._name_of(cells)
        columns = {name: value for name, value in cells.items() if not name.startswith("#")}
        try:
            if not self._is_own_database:
                rows = divided(rename(from_columns(columns), self._map))
                return [Delivery(self.name, row_name, row) for row in rows]
            row = parse_line(str(columns["row"]).encode("utf-8", "surrogatepass"))
        except RowRefused as refused:
            return [Delivery(self.name, row_name, refused, raw=repr(cells).encode("utf-8", "replace"))]
        source = str(columns["source"])
        return [Delivery(source.rpartition(":")[0], source, row, str(columns["id"]))]

    def _name_of(self, cells: dict[str, Any]) -> str:
        return f"{self._path}#{self._table}:{cells['#rowid'] if self._rowid else cells['#cursor']}"


def _decode(text: bytes) -> str | bytes:
    """Return text that is not UTF-8 as bytes, so that only its row is refused."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _fingerprint(cells: Mapping[str, Any]) -> str:
    return hashlib.blake2b(repr(sorted(cells.items())).encode("utf-8", "replace"), digest_size=12).hexdigest()

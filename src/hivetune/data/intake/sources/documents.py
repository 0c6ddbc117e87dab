"""The reader of files that are written once (CSV, Parquet, JSON, standard input), row by row and resumable."""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from itertools import islice

from hivetune.base.disk import scratch_folder
from hivetune.data.intake.files import plan_inputs
from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursor
from hivetune.data.prepare.understand import NO_COLUMNS, examine_files
from hivetune.data.read import RawRow, parse_row, read_rows
from hivetune.data.reasons import RowRefused

_BATCH_ROWS = 1000


class DocumentReader:
    """The Reader of one file that is not a log, or of standard input ("-").

    A changed file is read again from its start; unchanged rows are recognised by their place.
    """

    def __init__(self, path: str):
        self.name = path
        self.poll_s = 1.0
        self.notes: list[str] = []
        self.waiting: list[str] = []
        self._path = path if path == "-" else os.path.realpath(path)
        self._resources = contextlib.ExitStack()
        self._database: sqlite3.Connection | None = None
        self._state: tuple[int, int] | None = None
        self._rows: Iterator[RawRow] = iter(())
        self._digest, self._num_taken = "", 0
        self._stored: str | None = None
        self._next: tuple[int, str] | None = None

    def open(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> None:
        self._database = database
        self._spill = self._resources.enter_context(scratch_folder())
        self._start(database)

    def read(self) -> Batch | None:
        if self._database is None:
            raise ValueError("read before open")
        rows = list(islice(self._rows, _BATCH_ROWS))
        if not rows:
            if self._path != "-" and self._state != _state(self._path):
                self._start(self._database)
            return None
        deliveries: list[Delivery] = []
        for raw in rows:
            key = f"file:{raw.source}" + (f":{self._digest}" if self._path == "-" else "")
            try:
                if raw.problem:
                    raise raw.problem
                deliveries.append(Delivery(self._path, raw.source, key, parse_row(raw.payload)))
            except RowRefused as refused:
                deliveries.append(Delivery(self._path, raw.source, key, refused, raw=raw.payload))
        num_taken = self._num_taken + len(rows)
        text = f"{self._digest} {num_taken}"
        self._next = num_taken, text
        return Batch(self._path, deliveries, Cursor(self._key, self._stored, text))

    def confirm(self) -> None:
        if self._next:
            self._num_taken, self._stored = self._next
            self._next = None

    def close(self) -> None:
        self._rows = iter(())
        self._resources.close()

    @property
    def _key(self) -> str:
        return f"file:{self._path}"

    def _start(self, database: sqlite3.Connection) -> None:
        """Plan the file again and skip the stored rows. Raise UsageError, MachineNotFit."""
        self._state = _state(self._path)
        inputs = examine_files(plan_inputs(self._path, self._spill), NO_COLUMNS)
        self._digest = inputs.digest
        self._stored = read_cursor(database, self._key)
        digest, _, num_taken = (self._stored or " 0").partition(" ")
        self._num_taken = int(num_taken) if digest == inputs.digest else 0
        self._rows = islice((row for chunk in inputs.chunks for row in read_rows(chunk)), self._num_taken, None)


def _state(path: str) -> tuple[int, int] | None:
    if not os.path.exists(path):
        return None
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns

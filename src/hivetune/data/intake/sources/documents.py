"""The reader of files that are written once (CSV, Parquet, JSON, standard input)."""

import os
import sqlite3
import threading
import time
from itertools import islice

from hivetune.base.disk import scratch_folder
from hivetune.base.paths import spelled
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursor
from hivetune.data.intake.sources.delivered import Batches, Reader
from hivetune.data.prepare.understand import understand
from hivetune.data.raw import RawRow
from hivetune.data.read import parse_row
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, MachineNotFit, UsageError

_BATCH_ROWS = 1000
SETTLED_S = (
    1.0  # who follows reads a file once it stays as it is for so long: a row that is half written may look whole
)


class DocumentReader(Reader):
    """The Reader of one file that is not a log, or of standard input ("-").

    A changed file is read again from its start; unchanged rows are recognised by their content. `came_later`: while
    others were read, so that a file that can't be read is noted and stops nobody.
    """

    def __init__(self, path: str, *, came_later: bool = False):
        super().__init__(path)
        self._came_later = came_later
        self._path = path if path == "-" else os.path.realpath(path)

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        seen: tuple[int, int] | None = None
        done = seen
        since = 0.0
        while True:
            before, seen = seen, _state(self._path)
            if seen != before:
                since = time.monotonic()
            settled = not follow or self._path == "-" or time.monotonic() - since >= SETTLED_S
            if seen is None or seen == done or not settled:
                yield None
                continue
            try:
                yield from self._read(database, stop)
            except (UsageError, DataRefused, MachineNotFit) as error:
                if not self._came_later:
                    raise
                self.note(f"{spelled(self._path)} is not collected: {error.message}; {error.hint}")
            done = seen

    def _read(self, database: sqlite3.Connection, stop: threading.Event) -> Batches:
        key = f"file:{self._path}"
        with scratch_folder() as spill:
            inputs = understand(plan_inputs(self._path, spill)).inputs
            if inputs.digest == read_cursor(database, key):
                return
            rows = inputs.rows()
            while taken := list(islice(rows, _BATCH_ROWS)):
                yield Batch(self._path, [self._delivery(raw) for raw in taken])
                if stop.is_set():
                    return
            yield Batch(self._path, cursor=Cursor(key, inputs.digest))

    def _delivery(self, raw: RawRow) -> Delivery:
        try:
            if raw.problem:
                raise raw.problem
            return Delivery(self._path, raw.source, parse_row(raw.payload))
        except RowRefused as refused:
            return Delivery(self._path, raw.source, refused, raw=raw.payload)


def _state(path: str) -> tuple[int, int] | None:
    """Return what changes when somebody writes the file; None for a file that is gone."""
    if path == "-":
        return 0, 0
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns

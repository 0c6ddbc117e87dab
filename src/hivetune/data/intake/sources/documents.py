"""The reader of files that are written once (CSV, Parquet, JSON, standard input)."""

import os
import sqlite3
import threading
from itertools import islice

from hivetune.base.disk import scratch_folder
from hivetune.base.paths import spelled
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.intake.interactions import Batch, Cursor, Delivery, read_cursor
from hivetune.data.intake.sources.delivered import Batches
from hivetune.data.prepare.understand import understand
from hivetune.data.raw import RawRow
from hivetune.data.read import parse_row
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, MachineNotFit, UsageError

_BATCH_ROWS = 1000


class DocumentReader:
    """The Reader of one file that is not a log, or of standard input ("-").

    A changed file is read again from its start; unchanged rows are recognised by their content. Who follows reads a
    file once it stays as it is for a second, since a row that is half written may look whole. `came_later`: while
    others were read, so that a file that can't be read is noted and stops nobody.
    """

    def __init__(self, path: str, *, came_later: bool = False):
        self.name = path
        self.poll_s = 0.0 if path == "-" else 1.0
        self.notes: list[str] = []
        self.waiting: list[str] = []
        self._came_later = came_later
        self._path = path if path == "-" else os.path.realpath(path)

    def paths(self) -> list[str]:
        """Return the file, without links."""
        return [] if self._path == "-" else [self._path]

    def batches(self, database: sqlite3.Connection, follow: bool, stop: threading.Event) -> Batches:
        path, key = self._path, f"file:{self._path}"
        seen: tuple[int, int] | None = None
        done = seen
        while not stop.is_set():
            before, seen = seen, _state(path)
            if follow and path != "-" and (seen is None or seen != before or seen == done):
                yield None
                continue
            stored = read_cursor(database, key)
            with scratch_folder() as spill:  # only while rows are read: a folder may have thousands of documents
                try:
                    inputs = understand(plan_inputs(path, spill)).inputs
                except (UsageError, DataRefused, MachineNotFit) as error:
                    if not self._came_later:
                        raise
                    self.notes.append(f"{spelled(path)} is not collected: {error.message}; {error.hint}")
                    done = seen
                    yield None
                    continue
                if inputs.digest != stored:
                    rows = inputs.rows()
                    while not stop.is_set() and (taken := list(islice(rows, _BATCH_ROWS))):
                        yield Batch(path, [self._delivery(raw) for raw in taken])
                    if not stop.is_set():
                        yield Batch(path, cursor=Cursor(key, inputs.digest))
            done = seen
            yield None
            if path == "-":
                stop.wait()  # nothing more comes

    def _delivery(self, raw: RawRow) -> Delivery:
        try:
            if raw.problem:
                raise raw.problem
            return Delivery(self._path, raw.source, parse_row(raw.payload))
        except RowRefused as refused:
            return Delivery(self._path, raw.source, refused, raw=raw.payload)


def _state(path: str) -> tuple[int, int] | None:
    if not os.path.exists(path):
        return None
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns

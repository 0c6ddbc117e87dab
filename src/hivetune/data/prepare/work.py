"""One chunk of rows from bytes to tokens: read, check, redact, render, sign; the result is one SQLite file.

Run in this process for small inputs, else in children: `python -m hivetune.data.prepare.work`, a job on the first line
of standard input, then one chunk a line; answers a line: `so_far` now and then, `rows` when a chunk is done. A child
ends when its parent closes the pipe.
"""

import contextlib
import functools
import gc
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hivetune.data.checks.dedupe import sketch
from hivetune.data.intake.files import Chunk
from hivetune.data.prepare.examine.stages import ChunkJob, ExaminedRow, Stages
from hivetune.data.prepare.examine.table import RESULT_SCHEMA, insert, refused_rows, usable_rows
from hivetune.data.prepare.understand import shares_few_labels
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import RawRow, read_rows
from hivetune.data.time_limit import Limit, many_time_limits, row_time_limit

# Rows that go through one stage before the next begins: its code and its tables then stay in the caches. A seventh of
# the time of a row; 16 rows save half of that, 256 no more than 64.
STAGE_ROWS, STAGE_BYTES = 64, 1 << 20
_BATCH_ROWS = 500
# Rows leave few cycles behind; looking for them after every 700 objects costs 6 % of the time.
GC_THRESHOLD = 50_000


class Worker:
    """Examines rows under one job."""

    def __init__(self, job: ChunkJob):
        self._job = job
        self._stages = Stages(job)

    def run(self, chunk: Chunk, out: Path, told: Callable[[int], None] = lambda rows: None) -> int:
        """Examine every row of `chunk` and write `out` (and `out` + .sketches), whole or not at all. `told`: how many
        rows of it are examined, now and then."""
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._stages.few_labels = functools.cache(lambda: shares_few_labels(chunk, self._job.columns))
        database = sqlite3.connect(temporary, isolation_level=None)
        count = 0
        sketches = open(f"{temporary}.sketches", "wb") if self._job.near else contextlib.nullcontext(None)  # noqa: SIM115
        with contextlib.closing(database), sketches as sink, many_time_limits():
            database.executescript(RESULT_SCHEMA)
            rows: list[tuple[Any, ...]] = []
            bodies: list[tuple[Any, ...]] = []
            size_bytes = 0
            for raw, found in self._examined(read_rows(chunk)):
                if isinstance(found, RowRefused):
                    row, body = refused_rows(raw, found)
                else:
                    row, body = usable_rows(found, keep_raw=self._job.keep_raw)
                    if sink is not None:
                        sink.write(sketch(found.example.messages))
                rows.append((count, *row))
                bodies.append((count, *body))
                count += 1
                size_bytes += len(raw.payload)
                if len(rows) >= _BATCH_ROWS or size_bytes >= STAGE_BYTES:
                    insert(database, rows, bodies)
                    size_bytes = 0
                    told(count)
            insert(database, rows, bodies)
        if self._job.near:
            os.rename(f"{temporary}.sketches", f"{out}.sketches")
        os.rename(temporary, out)
        return count

    def _examined(self, rows: Iterable[RawRow]) -> Iterator[tuple[RawRow, ExaminedRow | RowRefused]]:
        """Each row, and what was found out about it or why it is refused, in order."""
        for some in _together(rows):
            found: list[Any] = list(some)
            limits = [row_time_limit() for _ in some]
            for stage in (self._stages.read, self._stages.clean, self._stages.render):
                for i, row in enumerate(found):
                    if not isinstance(row, RowRefused):
                        found[i] = _tried(stage, row, limits[i])
            yield from zip(some, found, strict=True)


def _tried(stage: Callable[[Any], ExaminedRow], row: Any, limit: Limit) -> ExaminedRow | RowRefused:
    try:
        with limit:
            return stage(row)
    except RowRefused as refused:
        return refused
    except RecursionError:  # JSON, Jinja and our own walks all have their limits near each other
        return RowRefused("too-deep")


def _together(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Rows in groups: few large ones, or memory would have to hold them all."""
    some: list[RawRow] = []
    size_bytes = 0
    for raw in rows:
        some.append(raw)
        size_bytes += len(raw.payload)
        if len(some) >= STAGE_ROWS or size_bytes >= STAGE_BYTES:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some


def _serve() -> None:
    """The child: jobs in, answers out, nothing else on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    worker = Worker(ChunkJob(**json.loads(sys.stdin.readline())))

    def tell(answer: dict[str, int]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    for line in sys.stdin:
        task = json.loads(line)
        tell({"rows": worker.run(Chunk(**task["chunk"]), Path(task["out"]), lambda rows: tell({"so_far": rows}))})


if __name__ == "__main__":
    _serve()

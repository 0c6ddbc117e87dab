"""The examination of chunks of rows: read, checked, redacted, rendered and hashed. Each result is one SQLite file.

Small inputs are examined in this process, others in one child process per core, in any order. A chunk whose result
exists is not examined again, so a preparation that was killed goes on where it was.

A child (`python -m hivetune.data.prepare.work`) reads a job from the first line of standard input and then one chunk a
line. It answers with lines: `so_far` now and then, `rows` when a chunk is done. It ends when the pipe closes.
"""

import contextlib
import functools
import gc
import json
import os
import selectors
import sqlite3
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

from hivetune.base.kernel import usable_cores
from hivetune.data.checks.dedupe import sketch
from hivetune.data.checks.lessons import lesson_hashes
from hivetune.data.intake.files import Chunk
from hivetune.data.judged.answers import with_worse
from hivetune.data.prepare.split import group_hash, text_hashes, tie_hashes
from hivetune.data.prepare.stages import ChunkJob, ExaminedRow, Stages, TooLong, is_vouched, num_chars
from hivetune.data.prepare.understand import shares_few_labels
from hivetune.data.read import RawRow, judged_hash, read_rows
from hivetune.data.reasons import RowRefused
from hivetune.data.render.renderer import RenderedView
from hivetune.data.snapshot import messages_json
from hivetune.data.time_limit import Limit, many_time_limits, row_time_limit
from hivetune.errors import HivetuneError
from hivetune.records import Progress

# The result of a chunk: `rows` has a line for each row, `bodies` has the text and tokens of the usable ones.
RESULT_SCHEMA = """
PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-2000;
CREATE TABLE rows (
  n INTEGER PRIMARY KEY, source TEXT NOT NULL, layout TEXT, reason TEXT, hint TEXT, changed TEXT,
  id TEXT, hash64 INTEGER,            -- of the content
  read64 INTEGER, question64 INTEGER, session64 INTEGER, user64 INTEGER,  -- ties to other rows; 0: none
  texts64 BLOB,                       -- of its long texts (array "Q")
  lesson64 INTEGER, earlier BLOB,     -- the hash of its last lesson, and of earlier ones (array "Q"); lessons.py
  length INTEGER,                     -- of its longest view
  num_tokens INTEGER, trained INTEGER,  -- of all its views
  agent TEXT, category TEXT, session TEXT, user TEXT, time REAL, answered_by TEXT,
  maker TEXT,                         -- of a synthetic row
  vouched INTEGER,                    -- 1 if a person or a checker called the answer good
  lesson TEXT, judged64 INTEGER, worse64 INTEGER,  -- of the conversation with its last answer, and with the worse one
  client64 INTEGER,                   -- of the client that asked for the last answer; 0: none
  notes TEXT                          -- the changes as JSON: [[reason, "GitHub token in the answer"], ...]
);
CREATE TABLE bodies (
  n INTEGER PRIMARY KEY, interaction_id TEXT, messages TEXT, tools TEXT, checker TEXT,
  tokens BLOB, mask BLOB,             -- of all its views, concatenated
  views TEXT,                         -- JSON [[tokens, messages, [answers]], ...] if there are several
  worse TEXT, worse_tokens BLOB, worse_mask BLOB,  -- messages, tokens and mask with the worse answer
  raw BLOB
);
"""
ROW_COLUMNS, BODY_COLUMNS = 31, 12
BAD_MARK = 0x5F0BAD5F0BAD5F0B  # makes the hash of a bad answer differ from the same answer called good
TableRow = tuple[Any, ...]


def refused_rows(raw: RawRow, error: RowRefused) -> tuple[TableRow, TableRow]:
    """Return the lines of both tables for a refused row, without its number."""
    length = error.length if isinstance(error, TooLong) else None
    row = (storable(raw.source), None, error.reason, storable(error.hint), *[None] * 10, length, *[None] * 15)
    return row, (*[None] * (BODY_COLUMNS - 2), raw.payload)


def usable_rows(found: ExaminedRow, *, keep_raw: bool) -> tuple[TableRow, TableRow]:
    """Return the lines of both tables for a usable row, without its number."""
    example, rendered = found.example, [view.rendered for view in found.views]
    bad, worse = example.lesson == "failure", with_worse(example)
    lessons = array("Q") if bad else lesson_hashes(example.messages, example.tools)
    hash64 = int(example.id[:16], 16)
    row = (
        storable(example.source),
        found.layout,
        None,
        None,
        ",".join(found.changed) or None,
        example.id,
        _signed(hash64 ^ BAD_MARK if bad else hash64),
        *map(_signed, tie_hashes(example)),
        text_hashes(example.messages).tobytes() or None,
        _signed(lessons[-1]) if lessons else None,
        lessons[:-1].tobytes() if len(lessons) > 1 and "cut" not in found.changed else None,
        max((len(r.tokens) for r in rendered), default=num_chars(example.messages)),
        sum(len(r.tokens) for r in rendered) if rendered else None,
        sum(r.trained.count(1) for r in rendered) if rendered else None,
        example.agent,
        example.category,
        example.session,
        example.user,
        example.time,
        example.answered_by,
        example.maker,
        int(is_vouched(example)),
        example.lesson,
        _signed(judged_hash(example.messages, example.tools)),
        None if worse is None else _signed(judged_hash(worse, example.tools)),
        0 if example.client is None else _signed(group_hash(f"client:{example.client}")),
        _json(found.notes),
    )
    return row, _body(found, keep_raw=keep_raw)


def _body(found: ExaminedRow, *, keep_raw: bool) -> TableRow:
    example, rendered, worse = found.example, [view.rendered for view in found.views], with_worse(found.example)
    return (
        found.raw.interaction_id,
        messages_json(example.messages),
        _json([dict(tool) for tool in example.tools]),
        _json(example.checker),
        b"".join([array("I", r.tokens).tobytes() for r in rendered]) if rendered else None,
        b"".join([r.trained for r in rendered]) if rendered else None,
        _views_json(found.views),
        None if worse is None else messages_json(worse),
        array("I", found.worse.rendered.tokens).tobytes() if found.worse else None,
        found.worse.rendered.trained if found.worse else None,
        found.raw.payload if keep_raw else None,
    )


def _views_json(views: Sequence[RenderedView]) -> str | None:
    """Return the sizes that split the tokens of a row into its views; None if there is one view."""
    if len(views) < 2:
        return None
    return json.dumps([[len(view.rendered.tokens), view.num_messages, view.answers] for view in views])


def _json(value: object) -> str | None:
    return json.dumps(value) if value else None


def storable(text: str) -> str:
    """Return `text` without surrogates: file names and hints may hold bytes that SQLite does not accept."""
    return text.encode("utf-8", "backslashreplace").decode()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def insert(database: sqlite3.Connection, rows: list[tuple[Any, ...]], bodies: list[tuple[Any, ...]]) -> None:
    """Insert both lists into their tables, and empty them."""
    database.execute("BEGIN")
    database.executemany(f"INSERT INTO rows VALUES ({','.join('?' * ROW_COLUMNS)})", rows)
    database.executemany(f"INSERT INTO bodies VALUES ({','.join('?' * BODY_COLUMNS)})", bodies)
    database.execute("COMMIT")
    rows.clear()
    bodies.clear()


# Rows that pass one stage before the next stage begins, so that its code and tables stay in the caches. This saves a
# seventh of the time; 16 rows save half of that, 256 no more than 64.
STAGE_ROWS, STAGE_BYTES = 64, 1 << 20
_BATCH_ROWS = 500
# Rows leave few cycles; a collection after every 700 objects takes 6 % of the time.
GC_THRESHOLD = 50_000


class Worker:
    """The examination of rows under one job."""

    def __init__(self, job: ChunkJob):
        self._job = job
        self._stages = Stages(job)

    def run(self, chunk: Chunk, out: Path, progress: Callable[[int], None] = lambda rows: None) -> int:
        """Examine every row of `chunk`, write `out` and `out`.sketches at once, and return the number of rows.

        `progress` is called with the number of examined rows now and then.
        """
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._stages.few_labels = functools.cache(lambda: shares_few_labels(chunk, self._job.columns))
        database = sqlite3.connect(temporary, isolation_level=None)
        count = 0
        near = self._job.near_duplicates > 0
        sketches = open(f"{temporary}.sketches", "wb") if near else contextlib.nullcontext(None)  # noqa: SIM115
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
                    progress(count)
            insert(database, rows, bodies)
        if near:
            os.rename(f"{temporary}.sketches", f"{out}.sketches")
        os.rename(temporary, out)
        return count

    def _examined(self, rows: Iterable[RawRow]) -> Iterator[tuple[RawRow, ExaminedRow | RowRefused]]:
        """Yield each row with its examination or its refusal, in order."""
        for batch in _batches(rows):
            results: list[Any] = list(batch)
            limits = [row_time_limit() for _ in batch]
            for stage in (self._stages.read, self._stages.clean, self._stages.render):
                for i, row in enumerate(results):
                    if not isinstance(row, RowRefused):
                        results[i] = _run_stage(stage, row, limits[i])
            yield from zip(batch, results, strict=True)


def _run_stage(stage: Callable[[Any], ExaminedRow], row: Any, limit: Limit) -> ExaminedRow | RowRefused:
    try:
        with limit:
            return stage(row)
    except RowRefused as refused:
        return refused
    except RecursionError:  # JSON, Jinja and our own functions reach it at about the same depth
        return RowRefused("too-deep")


def _batches(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Yield the rows in batches that are limited in number and in bytes."""
    batch: list[RawRow] = []
    size_bytes = 0
    for raw in rows:
        batch.append(raw)
        size_bytes += len(raw.payload)
        if len(batch) >= STAGE_ROWS or size_bytes >= STAGE_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


# Below this size the start of a child (0.3 s with a tokenizer) costs more than it saves.
CHILDREN_FROM_BYTES = 1 << 20
MAX_WORKERS = 16  # each holds its own tokenizer, 30 to 150 MB
READ_BYTES = 1 << 16
ENDS_WITHIN_S = 5.0


def num_workers() -> int:
    """Return the number of children: one for each core that this process may use."""
    return min(MAX_WORKERS, usable_cores())


def result_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.sqlite"


def run_chunks(job: ChunkJob, chunks: Sequence[Chunk], folder: Path, progress: Progress, *, workers: int) -> None:
    """Write the result of every chunk into `folder`.

    `progress` counts lines; its total grows if a record has more rows than lines. Raise HivetuneError if a child dies.
    """
    total = sum(chunk.rows for chunk in chunks)
    todo = deque((n, chunk) for n, chunk in enumerate(chunks) if not result_path(folder, n).exists())
    done = total - sum(chunk.rows for _, chunk in todo)
    progress(done, total)
    size_bytes = sum(chunk.end - chunk.start for _, chunk in todo)
    if workers <= 1 or len(todo) <= 1 or size_bytes < CHILDREN_FROM_BYTES:
        worker = Worker(job) if todo else None
        for number, chunk in todo:
            assert worker is not None
            worker.run(chunk, result_path(folder, number), partial(_tell, progress, done, total))
            done += chunk.rows
            progress(done, total)
        return
    with open(os.memfd_create("hivetune-workers"), "w+b") as log:  # in memory, because the disk may be full
        _run_children(job, todo, folder, partial(_tell, progress, done, total), min(workers, len(todo)), log)


def _tell(progress: Progress, before: int, total: int, rows: int) -> None:
    progress(before + rows, max(total, before + rows))


def _run_children(
    job: ChunkJob,
    todo: deque[tuple[int, Chunk]],
    folder: Path,
    progress: Callable[[int], None],
    workers: int,
    log: IO[bytes],
) -> None:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    children = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "hivetune.data.prepare.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which ends them
        )
        for _ in range(workers)
    ]
    running: dict[int, Chunk] = {}
    so_far: dict[int, int] = {}  # rows of the chunk that a child works on
    partial_lines: dict[int, bytes] = {}  # of each child
    rows = 0
    try:
        with selectors.DefaultSelector() as selector:
            for i, child in enumerate(children):
                assert child.stdin and child.stdout
                child.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
                selector.register(child.stdout, selectors.EVENT_READ, i)
                _give(child, i, todo, folder, running)
            while running:
                for key, _ in selector.select():
                    i = key.data
                    read = os.read(key.fd, READ_BYTES)
                    if not read:
                        raise _dead(children[i], running.get(i), log)
                    *lines, partial_lines[i] = (partial_lines.get(i, b"") + read).split(b"\n")
                    for answer in map(json.loads, lines):
                        so_far[i] = answer.get("so_far", 0)
                        if "rows" in answer:
                            rows += running.pop(i).rows
                            _give(children[i], i, todo, folder, running)
                    progress(rows + sum(so_far.values()))
    finally:
        for child in children:
            _end(child)


def _give(
    child: "subprocess.Popen[bytes]", i: int, todo: deque[tuple[int, Chunk]], folder: Path, running: dict[int, Chunk]
) -> None:
    if not todo:
        return
    number, chunk = todo.popleft()
    task = {"chunk": chunk.to_json(), "out": str(result_path(folder, number))}
    assert child.stdin
    with contextlib.suppress(BrokenPipeError):  # it died, which the loop learns from its closed output
        child.stdin.write(json.dumps(task).encode() + b"\n")
        child.stdin.flush()
    running[i] = chunk


def _dead(child: "subprocess.Popen[bytes]", chunk: Chunk | None, log: IO[bytes]) -> HivetuneError:
    try:
        code = child.wait(ENDS_WITHIN_S)  # it closed its output, but may not have ended yet
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    log.seek(0)
    output = log.read().decode("utf-8", "replace").strip()[-2000:]
    where = f"{chunk.name}:{chunk.first}" if chunk else "its start"
    return HivetuneError(f"a data worker died (exit {code}) at {where}\n{output}", hint="run the same command again")


def _end(child: "subprocess.Popen[bytes]") -> None:
    assert child.stdin and child.stdout
    child.kill()
    child.wait()
    child.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # bytes that it never read
        child.stdin.close()


def _serve() -> None:
    """Run as a child: read a job and chunks, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what a library prints is not taken for an answer
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

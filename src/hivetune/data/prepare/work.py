"""The examination of chunks of rows: read, checked, redacted, rendered and hashed. Each result is one SQLite file.

Small inputs are examined in this process, others in one child process per core, in any order. A chunk whose result
exists is not examined again, so a preparation that was killed continues where it was.

A child (`python -m hivetune.data.prepare.work`) reads a job from the first line of standard input and then one chunk a
line. It answers with lines: `so_far` now and then, `done` when a chunk is done. It ends when the pipe closes.
"""

import contextlib
import functools
import gc
import json
import math
import os
import sqlite3
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import IO, Any

from hivetune.base.kernel import usable_cores
from hivetune.data.checks.dedupe import sketch
from hivetune.data.checks.lessons import lesson_hashes
from hivetune.data.chunks import Chunk, Parcel, RawRow, read_rows
from hivetune.data.intake.interactions import storable
from hivetune.data.judged.answers import with_worse
from hivetune.data.prepare.split import group_hash, text_hashes, tie_hashes
from hivetune.data.prepare.stages import ChunkJob, Stages, TooLong, is_vouched, num_chars
from hivetune.data.read import ExaminedRow, judged_hash
from hivetune.data.reasons import RowRefused
from hivetune.data.snapshot import messages_json
from hivetune.data.time_limit import Limit, time_limit
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
  notes TEXT,                         -- the changes as JSON: [[reason, "GitHub token in the answer"], ...]
  missing TEXT                        -- fields of data.columns whose column it lacks, with commas between
);
CREATE TABLE bodies (
  n INTEGER PRIMARY KEY, interaction_id TEXT, messages TEXT, tools TEXT, checker TEXT,
  tokens BLOB, mask BLOB,             -- of all its views, concatenated
  views TEXT,                         -- JSON [[tokens, messages, [answers]], ...] if there are several
  worse TEXT, worse_tokens BLOB, worse_mask BLOB,  -- messages, tokens and mask with the worse answer
  raw BLOB
);
"""
ROW_LIMIT_S = 20.0  # a row of 1 MB takes 0.5 s on a slow core
COPIED = ("source", "id", "agent", "category", "session", "user", "time", "answered_by", "maker", "lesson")
BAD_MARK = 0x5F0BAD5F0BAD5F0B  # makes the hash of a bad answer differ from the same answer called good


def _insert(database: sqlite3.Connection, table: str, values: dict[str, Any]) -> None:
    marks = ", ".join(f":{name}" for name in values)
    database.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", values)


def _row_values(row: ExaminedRow) -> dict[str, Any]:
    """Return the line of a usable row in `rows`, without its number."""
    example, rendered, worse = row.example, row.views, with_worse(row.example)
    is_bad = example.lesson == "failure"
    lessons = array("Q") if is_bad else lesson_hashes(example.messages, example.tools)
    hash64 = int(example.id[:16], 16)
    read64, question64, session64, user64 = tie_hashes(example)
    return {
        **{name: getattr(example, name) for name in COPIED},
        "source": storable(example.source),
        "layout": row.layout,
        "changed": ",".join(row.changed) or None,
        "notes": _json(row.notes),
        "missing": ",".join(row.missing) or None,
        "vouched": int(is_vouched(example)),
        "hash64": _signed(hash64 ^ BAD_MARK if is_bad else hash64),
        "read64": _signed(read64),
        "question64": _signed(question64),
        "session64": _signed(session64),
        "user64": _signed(user64),
        "texts64": text_hashes(example.messages).tobytes() or None,
        "lesson64": _signed(lessons[-1]) if lessons else None,
        "earlier": lessons[:-1].tobytes() if len(lessons) > 1 and "cut" not in row.changed else None,
        "judged64": _signed(judged_hash(example.messages, example.tools)),
        "worse64": None if worse is None else _signed(judged_hash(worse, example.tools)),
        "client64": 0 if example.client is None else _signed(group_hash(f"client:{example.client}")),
        "length": max((len(r.tokens) for r in rendered), default=num_chars(example.messages)),
        "num_tokens": sum(len(r.tokens) for r in rendered) if rendered else None,
        "trained": sum(r.trained.count(1) for r in rendered) if rendered else None,
    }


def _body_values(row: ExaminedRow, *, keep_raw: bool) -> dict[str, Any]:
    """Return the line of a usable row in `bodies`, without its number."""
    example, rendered, worse = row.example, row.views, with_worse(row.example)
    sizes = [[len(view.tokens), view.num_messages, view.answers] for view in row.views]
    return {
        "interaction_id": row.raw.interaction_id,
        "messages": messages_json(example.messages),
        "tools": _json([dict(tool) for tool in example.tools]),
        "checker": _json(example.checker),
        "tokens": b"".join([array("I", r.tokens).tobytes() for r in rendered]) if rendered else None,
        "mask": b"".join([r.trained for r in rendered]) if rendered else None,
        "views": json.dumps(sizes) if len(sizes) > 1 else None,
        "worse": None if worse is None else messages_json(worse),
        "worse_tokens": array("I", row.worse.tokens).tobytes() if row.worse else None,
        "worse_mask": row.worse.trained if row.worse else None,
        "raw": row.raw.payload if keep_raw else None,
    }


def _json(value: object) -> str | None:
    return json.dumps(value) if value else None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# Rows that pass one stage before the next stage begins, so that its code and tables stay in the caches. This saves a
# seventh of the time; 16 rows save half of that, 256 no more than 64.
STAGE_ROWS, STAGE_BYTES = 64, 1 << 20
LARGE_ROW_BYTES = STAGE_BYTES // STAGE_ROWS
# Rows leave few cycles; a collection after every 700 objects takes 6 % of the time.
GC_THRESHOLD = 50_000


def examine(stages: Stages, parcel: Parcel, out: Path, progress: Callable[[int], None]) -> None:
    """Examine every row of `parcel`, and write `out` and `out`.sketches at once.

    `progress` is called with the number of examined rows now and then.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    database = sqlite3.connect(temporary, isolation_level=None)
    count = 0
    near = stages.job.near_duplicates > 0
    sketches = open(f"{temporary}.sketches", "wb") if near else contextlib.nullcontext(None)  # noqa: SIM115
    with contextlib.closing(database), sketches as sink, many_time_limits():
        database.executescript(RESULT_SCHEMA)
        database.execute("BEGIN")
        for raw, row in _examined(stages, chain.from_iterable(map(read_rows, parcel))):
            if isinstance(row, RowRefused):
                length = row.length if isinstance(row, TooLong) else None
                refusal = {"source": storable(raw.source), "reason": row.reason, "hint": storable(row.hint)}
                _insert(database, "rows", {"n": count, **refusal, "length": length})
                _insert(database, "bodies", {"n": count, "raw": raw.payload})
            else:
                _insert(database, "rows", {"n": count, **_row_values(row)})
                _insert(database, "bodies", {"n": count, **_body_values(row, keep_raw=stages.job.keep_raw)})
                if sink is not None:
                    sink.write(sketch(row.example.messages))
            count += 1
            if count % STAGE_ROWS == 0 or len(raw.payload) > LARGE_ROW_BYTES:
                progress(count)
        database.execute("COMMIT")
    if near:
        os.rename(f"{temporary}.sketches", f"{out}.sketches")
    os.rename(temporary, out)


def row_time_limit() -> Limit:
    """Return the limit of one row, which raises RowRefused("too-slow"). It is a safeguard: rules and checks take linear
    time.
    """
    return time_limit(ROW_LIMIT_S, _too_slow)


def many_time_limits() -> Limit:
    """Return a context in which the timer runs on between limits."""
    return time_limit(math.inf, _too_slow)


_too_slow = functools.partial(RowRefused, "too-slow")


def _examined(stages: Stages, rows: Iterable[RawRow]) -> Iterator[tuple[RawRow, ExaminedRow | RowRefused]]:
    """Yield each row with its examination or its refusal, in order."""
    for batch in _batches(rows):
        results: list[Any] = list(batch)
        limits = [row_time_limit() for _ in batch]
        for stage in (stages.read, stages.clean, stages.render):
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
PROGRESS_EVERY_S = 0.1
ENDS_WITHIN_S = 5.0


def num_workers() -> int:
    """Return the number of children: one for each core that this process may use."""
    return min(MAX_WORKERS, usable_cores())


def run_parcels(
    job: ChunkJob, parcels: Sequence[Parcel], folder: Path, progress: Progress, *, workers: int
) -> list[Path]:
    """Write the result of every parcel into `folder`, and return them in order.

    `progress` counts lines; its total grows if a record has more rows than lines. Raise HivetuneError if a child dies.
    """
    total = sum(map(num_lines, parcels))
    results = {folder / f"{number:06d}.sqlite": parcel for number, parcel in enumerate(parcels)}
    todo = [(out, parcel) for out, parcel in results.items() if not out.exists()]
    num_done = total - sum(num_lines(parcel) for _, parcel in todo)
    progress(num_done, total)

    def report(rows: int) -> None:
        progress(num_done + rows, max(total, num_done + rows))

    size_bytes = sum(chunk.end - chunk.start for _, parcel in todo for chunk in parcel)
    if workers <= 1 or len(todo) <= 1 or size_bytes < CHILDREN_FROM_BYTES:
        stages = Stages(job) if todo else None
        for out, parcel in todo:
            assert stages is not None
            examine(stages, parcel, out, report)
            num_done += num_lines(parcel)
            report(0)
    else:
        with open(os.memfd_create("hivetune-workers"), "w+b") as log:  # in memory, because the disk may be full
            _run_children(job, todo, report, min(workers, len(todo)), log)
    return list(results)


def num_lines(parcel: Parcel) -> int:
    return sum(chunk.rows for chunk in parcel)


def _run_children(
    job: ChunkJob, todo: Sequence[tuple[Path, Parcel]], report: Callable[[int], None], workers: int, log: IO[bytes]
) -> None:
    waiting = iter(todo)  # each thread takes its next parcel from here
    rows: dict[Path, int] = {}  # examined rows of each result

    def serve(child: "subprocess.Popen[str]") -> None:
        """Give one child the job and parcel after parcel."""
        assert child.stdin and child.stdout
        lines = [asdict(job)]
        try:
            for out, parcel in waiting:
                lines.append({"parcel": [asdict(chunk) for chunk in parcel], "out": str(out)})
                with contextlib.suppress(BrokenPipeError):  # it died, which its closed output tells
                    child.stdin.writelines(json.dumps(line) + "\n" for line in lines)
                lines = []
                for answer in map(json.loads, child.stdout):
                    rows[out] = answer.get("so_far", num_lines(parcel))
                    if "done" in answer:
                        break
                else:
                    raise _dead(child, parcel[0], log)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(BrokenPipeError):  # bytes that it never read
                    pipe.close()

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        running = set()
        for _ in range(workers):
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "hivetune.data.prepare.work"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # so that Ctrl-C reaches only this process, which ends them
                text=True,
                bufsize=1,
            )
            stack.callback(child.kill)
            running.add(pool.submit(serve, child))
        while running:
            finished, running = wait(running, PROGRESS_EVERY_S, FIRST_COMPLETED)
            for future in finished:
                future.result()
            report(sum(rows.copy().values()))


def _dead(child: "subprocess.Popen[str]", chunk: Chunk, log: IO[bytes]) -> HivetuneError:
    try:
        code = child.wait(ENDS_WITHIN_S)  # it closed its output, but may not have ended yet
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    log.seek(0)
    output = log.read().decode("utf-8", "replace").strip()[-2000:]
    return HivetuneError(
        f"a data worker died (exit {code}) at {chunk.name}:{chunk.first}\n{output}", hint="run the same command again"
    )


def _serve() -> None:
    """Run as a child: read a job and parcels, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that what a library prints is not taken for an answer
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    stages = Stages(ChunkJob(**json.loads(sys.stdin.readline())))
    for task in map(json.loads, sys.stdin):
        parcel, out = [Chunk(**chunk) for chunk in task["parcel"]], Path(task["out"])
        examine(stages, parcel, out, lambda rows: answers.writelines([json.dumps({"so_far": rows}), "\n"]))
        answers.write(json.dumps({"done": True}) + "\n")


if __name__ == "__main__":
    _serve()

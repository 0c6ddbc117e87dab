"""The examination of rows: read, checked, redacted, rendered and hashed, here or in one child process per core.

A child (`python -m hivetune.data.prepare.pool`) reads the settings and then batches of rows from its standard input and
answers each with its results; both are pickled, since they come from this program alone. It ends when the pipe closes.
"""

import contextlib
import functools
import gc
import json
import math
import os
import pickle
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from hivetune.base.kernel import usable_cores
from hivetune.data.checks.lessons import lesson_hashes
from hivetune.data.intake.interactions import storable
from hivetune.data.judged.answers import with_worse
from hivetune.data.prepare.keys import NONE, group_hash, question, read_hash
from hivetune.data.prepare.near import sketch
from hivetune.data.prepare.stages import RowSettings, Stages, TooLong, is_vouched, num_chars
from hivetune.data.raw import RawRow
from hivetune.data.read import ExaminedRow, judged_hash
from hivetune.data.reasons import RowRefused
from hivetune.data.snapshot import messages_json
from hivetune.data.time_limit import Limit, time_limit
from hivetune.errors import HivetuneError

ROW_LIMIT_S = 20.0  # of processor time; a row of 1 MB takes 0.5 s on a slow core
BAD_MARK = 0x5F0BAD5F0BAD5F0B  # makes the hash of a bad answer differ from the same answer called good
# Rows that pass one stage before the next stage begins, so that its code and tables stay in the caches. This saves a
# seventh of the time; 16 rows save half of that, 256 no more than 64.
# Its results take several times the bytes of a batch, and WAITING batches of each child are in memory at once.
BATCH_ROWS, BATCH_BYTES = 64, 1 << 18
# Below this size the start of a child (0.3 s with a tokenizer) costs more than it saves.
CHILDREN_FROM_BYTES = 1 << 20
MAX_WORKERS = 16  # each holds its own tokenizer, 30 to 150 MB
WAITING = 4  # batches a child, so that none waits for its next one
# Rows leave few cycles; a collection after every 700 objects takes 6 % of the time.
GC_THRESHOLD = 50_000
ENDS_WITHIN_S = 5.0


class Examined(NamedTuple):
    """The results of one row: columns of `rows` and of `bodies` (prepare/work.py), and what finds it among others.

    A refused row has no `body` and no `sketch`. `earlier` has the hashes of the lessons before its last one.
    """

    row: dict[str, Any]
    body: dict[str, Any] | None = None
    earlier: Sequence[int] = ()
    sketch: bytes = b""


def num_workers() -> int:
    """Return the number of children: one for each core that this process may use."""
    return min(MAX_WORKERS, usable_cores())


def examined(settings: RowSettings, rows: Iterable[RawRow], *, workers: int) -> Iterator[tuple[RawRow, Examined]]:
    """Yield each row with its results, in order. Raise HivetuneError if a child dies."""
    batches = _batches(rows)
    first = list(_up_to(CHILDREN_FROM_BYTES, batches))
    is_small = sum(len(raw.payload) for batch in first for raw in batch) < CHILDREN_FROM_BYTES
    everything = chain(first, batches)
    if workers <= 1 or is_small:
        stages = Stages(settings)
        with many_time_limits():
            for batch in everything:
                yield from zip(batch, examine_batch(stages, batch), strict=True)
    else:
        yield from _in_children(settings, everything, workers)


def _batches(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Yield the rows in batches that are limited in number and in bytes."""
    batch: list[RawRow] = []
    size_bytes = 0
    for raw in rows:
        batch.append(raw)
        size_bytes += len(raw.payload)
        if len(batch) >= BATCH_ROWS or size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _up_to(size_bytes: int, batches: Iterator[list[RawRow]]) -> Iterator[list[RawRow]]:
    """Yield batches until they have `size_bytes`."""
    left = size_bytes
    while left > 0 and (batch := next(batches, None)) is not None:
        yield batch
        left -= sum(len(raw.payload) for raw in batch)


def examine_batch(stages: Stages, batch: Sequence[RawRow]) -> list[Examined]:
    """Return the results of rows, in order."""
    results: list[Any] = list(batch)
    limits = [row_time_limit() for _ in batch]
    for stage in (stages.read, stages.clean, stages.render):
        for i, row in enumerate(results):
            if not isinstance(row, RowRefused):
                results[i] = _run_stage(stage, row, limits[i])
    near = stages.settings.near_duplicates > 0
    return [_result(raw, row, near=near) for raw, row in zip(batch, results, strict=True)]


def row_time_limit() -> Limit:
    """Return the limit of one row, which raises RowRefused("too-slow"). It is a safeguard: rules and checks take linear
    time.
    """
    return time_limit(ROW_LIMIT_S, _too_slow)


def many_time_limits() -> Limit:
    """Return a context in which the timer runs on between limits."""
    return time_limit(math.inf, _too_slow)


_too_slow = functools.partial(RowRefused, "too-slow")


def _run_stage(stage: Callable[[Any], ExaminedRow], row: Any, limit: Limit) -> ExaminedRow | RowRefused:
    try:
        with limit:
            return stage(row)
    except RowRefused as refused:
        return refused
    except RecursionError:  # JSON, Jinja and our own functions reach it at about the same depth
        return RowRefused("too-deep")


def _result(raw: RawRow, row: ExaminedRow | RowRefused, *, near: bool) -> Examined:
    if isinstance(row, RowRefused):
        length = row.length if isinstance(row, TooLong) else None
        return Examined(
            {"source": storable(raw.source), "fate": row.reason, "hint": storable(row.hint), "length": length}
        )
    example, is_bad = row.example, row.example.lesson == "failure"
    lessons = array("Q") if is_bad else lesson_hashes(example.messages, example.tools)
    earlier = [] if "cut" in row.changed else [_signed(lesson) for lesson in lessons[:-1]]
    found = sketch(example.messages) if near else b""
    return Examined(_row_values(row, lessons), _body_values(row), earlier, found)


def _row_values(row: ExaminedRow, lessons: Sequence[int]) -> dict[str, Any]:
    example, rendered, worse = row.example, row.views, with_worse(row.example)
    hash64 = int(example.id[:16], 16)
    owner = f"client:{example.client}" if example.client is not None else f"user:{example.user}" if example.user else ""
    return {
        "source": storable(example.source),
        "fate": "train",
        "layout": row.layout,
        "changed": ",".join(row.changed) or None,
        "notes": _json(row.notes),
        "missing": ",".join(row.missing) or None,
        "id": example.id,
        "agent": example.agent,
        "category": example.category,
        "session": example.session,
        "user": example.user,
        "time": example.time,
        "answered_by": example.answered_by,
        "maker": example.maker,
        "lesson": example.lesson,
        "vouched": int(is_vouched(example)),
        "hash64": _signed(hash64 ^ BAD_MARK if example.lesson == "failure" else hash64),
        "read64": _signed(read_hash(example.messages)),
        "question64": _signed(group_hash("question:" + question(example.messages))),
        "session64": _signed(group_hash(f"session:{example.session}")) if example.session else NONE,
        "owner64": _signed(group_hash(owner)) if owner else NONE,
        "lesson64": _signed(lessons[-1]) if lessons else None,
        "judged64": _signed(judged_hash(example.messages, example.tools)),
        "worse64": None if worse is None else _signed(judged_hash(worse, example.tools)),
        "length": max((len(view.tokens) for view in rendered), default=num_chars(example.messages)),
        "num_tokens": sum(len(view.tokens) for view in rendered) if rendered else None,
        "trained": sum(view.trained.count(1) for view in rendered) if rendered else None,
    }


def _body_values(row: ExaminedRow) -> dict[str, Any]:
    example, rendered, worse = row.example, row.views, with_worse(row.example)
    sizes = [[len(view.tokens), view.num_messages, view.answers] for view in rendered]
    return {
        "interaction_id": row.raw.interaction_id,
        "messages": messages_json(example.messages),
        "tools": _json([dict(tool) for tool in example.tools]),
        "checker": _json(example.checker),
        "tokens": b"".join([array("I", view.tokens).tobytes() for view in rendered]) if rendered else None,
        "mask": b"".join([view.trained for view in rendered]) if rendered else None,
        "views": json.dumps(sizes) if len(sizes) > 1 else None,
        "worse": None if worse is None else messages_json(worse),
        "worse_tokens": array("I", row.worse.tokens).tobytes() if row.worse else None,
        "worse_mask": row.worse.trained if row.worse else None,
    }


def _json(value: object) -> str | None:
    return json.dumps(value) if value else None


def _signed(value: int) -> int:
    """Return 64 bits as SQLite stores them."""
    return value - (1 << 64) if value >= 1 << 63 else value


class _Child:
    """A process that examines batches, one at a time."""

    def __init__(self, settings: RowSettings, log: IO[bytes]):
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hivetune.data.prepare.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # so that Ctrl-C reaches only this process, which ends them
        )
        self._settings: RowSettings | None = settings

    def examine(self, batch: Sequence[RawRow]) -> list[Examined]:
        """Return the results of a batch. Raise HivetuneError if the process died."""
        assert self._process.stdin and self._process.stdout
        try:
            if self._settings is not None:
                pickle.dump(self._settings, self._process.stdin)
                self._settings = None
            pickle.dump(batch, self._process.stdin)
            self._process.stdin.flush()
            results: list[Examined] = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            raise self._died(batch[0].source) from None
        return results

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):  # bytes that it never read
                pipe.close()

    def _died(self, place: str) -> HivetuneError:
        try:
            code = self._process.wait(ENDS_WITHIN_S)  # it closed its output, but may not have ended yet
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._log.seek(0)
        output = self._log.read().decode("utf-8", "replace").strip()[-2000:]
        return HivetuneError(
            f"a data worker died (exit {code}) at {place}\n{output}", hint="run the same command again"
        )


def _in_children(
    settings: RowSettings, batches: Iterable[list[RawRow]], workers: int
) -> Iterator[tuple[RawRow, Examined]]:
    idle: SimpleQueue[_Child] = SimpleQueue()

    def examine(batch: list[RawRow]) -> list[Examined]:
        child = idle.get()
        try:
            return child.examine(batch)
        finally:
            idle.put(child)

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))  # left last, when its threads wait for nobody
        log = stack.enter_context(open(os.memfd_create("hivetune-workers"), "w+b"))  # in memory: the disk may be full
        for _ in range(workers):
            child = _Child(settings, log)
            stack.callback(child.end)
            idle.put(child)
        waiting: deque[tuple[list[RawRow], Future[list[Examined]]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(examine, batch)))
            if len(waiting) > WAITING * workers:
                done, results = waiting.popleft()
                yield from zip(done, results.result(), strict=True)
        for done, results in waiting:
            yield from zip(done, results.result(), strict=True)


def serve() -> None:
    """Run as a child: read settings and batches, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that what a library prints is not taken for an answer
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    asked = os.fdopen(0, "rb")
    stages = Stages(pickle.load(asked))
    with many_time_limits():
        while asked.peek(1):
            pickle.dump(examine_batch(stages, pickle.load(asked)), answers)
            answers.flush()


if __name__ == "__main__":
    from hivetune.data.prepare import pool  # under its own name, so that what it pickles is found

    pool.serve()

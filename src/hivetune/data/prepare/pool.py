"""The examination of all rows, here or in one child process per core.

A child (`python -m hivetune.data.prepare.pool`) reads the settings and then batches of rows from its standard input and
answers each with its results; both are pickled, since they come from this program alone. It ends when the pipe closes,
as it does when its parent is killed: children of multiprocessing would wait for ever, since each holds the others'
pipes.
"""

import contextlib
import gc
import os
import pickle
import secrets
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO

from hivetune.base.kernel import usable_cores
from hivetune.data.prepare.examine import Examiner, Results, RowSettings
from hivetune.data.raw import RawRow
from hivetune.errors import HivetuneError

# The results take several times the bytes of a batch, and WAITING batches of each child are in memory at once, so that
# none waits for its next one.
BATCH_ROWS, BATCH_BYTES = 128, 1 << 18
WAITING = 2
MAX_WORKERS = 16  # each holds its own tokenizer, 30 to 150 MB
# Memory that loading a tokenizer took goes back to the system: a child with SmolLM2's has 62 MB instead of 84.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_TRIM_THRESHOLD_": "65536"}
GC_THRESHOLD = 50_000  # rows leave few cycles; a collection after every 700 objects takes 6 % of the time
ENDS_WITHIN_S = 5.0
Batch = tuple[int, list[RawRow]]  # the number of its first row, and its rows
Examinations = Iterator[tuple[Batch, Results]]


def num_workers() -> int:
    """Return the number of children: one for each core that this process may use."""
    return min(MAX_WORKERS, usable_cores())


def examined(settings: RowSettings, rows: Iterable[RawRow], *, workers: int) -> Examinations:
    """Yield batches of the rows with their results, in order. Raise HivetuneError if a child dies."""
    if workers > 1:
        yield from _in_children(settings, _batches(rows), workers)
        return
    examiner = Examiner(settings)
    for first, batch in _batches(rows):
        yield (first, batch), examiner.examine(batch, first)


def _batches(rows: Iterable[RawRow]) -> Iterator[Batch]:
    batch: list[RawRow] = []
    first = size_bytes = 0
    for raw in rows:
        batch.append(raw)
        size_bytes += len(raw.payload)
        if len(batch) >= BATCH_ROWS or size_bytes >= BATCH_BYTES:
            yield first, batch
            first, batch, size_bytes = first + len(batch), [], 0
    if batch:
        yield first, batch


class _Child:
    """A process that examines batches, one at a time."""

    def __init__(self, settings: RowSettings, log: IO[bytes], seed: int):
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hivetune.data.prepare.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": str(seed)},
            start_new_session=True,  # so that Ctrl-C reaches only this process, which ends them
        )
        self._greeting = [settings]

    def examine(self, batch: Batch) -> Results:
        """Return the results of a batch. Raise HivetuneError if the process died."""
        assert self._process.stdin and self._process.stdout
        try:
            while self._greeting:
                pickle.dump(self._greeting.pop(), self._process.stdin)
            pickle.dump(batch, self._process.stdin)
            self._process.stdin.flush()
            results: Results = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its output without ending
                self._process.wait(ENDS_WITHIN_S)
            self._process.kill()
            code = self._process.wait()
            self._log.seek(0)
            output = self._log.read().decode("utf-8", "replace").strip()[-2000:]
            raise HivetuneError(
                f"a data worker died (exit {code}) at {batch[1][0].source}\n{output}", hint="run the same command again"
            ) from None
        return results

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):  # bytes that it never read
                pipe.close()


def _in_children(settings: RowSettings, batches: Iterable[Batch], workers: int) -> Examinations:
    idle: SimpleQueue[_Child] = SimpleQueue()

    def examine(batch: Batch) -> tuple[Batch, Results]:
        child = idle.get()
        try:
            return batch, child.examine(batch)
        finally:
            idle.put(child)

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))  # left last, when its threads wait for nobody
        log = stack.enter_context(open(os.memfd_create("hivetune-workers"), "w+b"))  # in memory: the disk may be full
        seed = secrets.randbelow(1 << 32)  # one for all, since their hashes of texts are compared
        for _ in range(workers):
            child = _Child(settings, log, seed)
            stack.callback(child.end)
            idle.put(child)
        waiting: deque[Future[tuple[Batch, Results]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(examine, batch))
            if len(waiting) > WAITING * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def serve() -> None:
    """Run as a child: read settings and batches, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that what a library prints is not taken for an answer
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    asked = os.fdopen(0, "rb")
    examiner = Examiner(pickle.load(asked))
    while asked.peek(1):
        first, batch = pickle.load(asked)
        pickle.dump(examiner.examine(batch, first), answers)
        answers.flush()


if __name__ == "__main__":
    from hivetune.data.prepare import pool  # under its own name, so that what it pickles is found

    pool.serve()

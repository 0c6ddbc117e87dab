"""Runs a job over all chunks: in this process when they are few, else in one child per core, in any order.

A chunk whose result is there already is not done again, so a preparation that was killed goes on where it was.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO

from hivetune.base.kernel import usable_cores
from hivetune.data.intake.files import Chunk
from hivetune.data.prepare.examine.stages import ChunkJob
from hivetune.data.prepare.work import Worker
from hivetune.errors import HivetuneError
from hivetune.records import Progress

# Below this a child's start (0.3 s with a tokenizer) costs more than it saves.
CHILDREN_FROM_BYTES = 1 << 20
MAX_WORKERS = 16  # each holds its own tokenizer, 30 to 150 MB
READ_BYTES = 1 << 16
ENDS_WITHIN_S = 5.0


def num_workers() -> int:
    """One for each core that this process may use."""
    return min(MAX_WORKERS, usable_cores())


def result_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.sqlite"


def run_chunks(job: ChunkJob, chunks: Sequence[Chunk], folder: Path, progress: Progress, *, workers: int) -> None:
    """Write the result of every chunk into `folder`. `progress` counts lines, or rows where records hold more of them
    than the file has lines: then the total grows with them.

    Raises HivetuneError when a child dies, and whatever the room's functions raise for a missing model.
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
    with open(os.memfd_create("hivetune-workers"), "w+b") as log:  # in memory: the disk may be what is full
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
            start_new_session=True,  # Ctrl-C reaches this process, which ends them
        )
        for _ in range(workers)
    ]
    running: dict[int, Chunk] = {}
    so_far: dict[int, int] = {}  # rows of the chunk that a child works on
    said: dict[int, bytes] = {}  # by a child, without the end of the line
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
                    *lines, said[i] = (said.get(i, b"") + read).split(b"\n")
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
    with contextlib.suppress(BrokenPipeError):  # it died: its closed output says so to the loop
        child.stdin.write(json.dumps(task).encode() + b"\n")
        child.stdin.flush()
    running[i] = chunk


def _dead(child: "subprocess.Popen[bytes]", chunk: Chunk | None, log: IO[bytes]) -> HivetuneError:
    try:
        code = child.wait(ENDS_WITHIN_S)  # it has closed its output, and may not have said yet how it ends
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    log.seek(0)
    said = log.read().decode("utf-8", "replace").strip()[-2000:]
    where = f"{chunk.name}:{chunk.first}" if chunk else "its start"
    return HivetuneError(f"a data worker died (exit {code}) at {where}\n{said}", hint="give the same command again")


def _end(child: "subprocess.Popen[bytes]") -> None:
    assert child.stdin and child.stdout
    child.kill()
    child.wait()
    child.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # bytes that it never read
        child.stdin.close()

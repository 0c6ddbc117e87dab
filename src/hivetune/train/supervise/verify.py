"""`hivetune verify-resume`: a short run killed by SIGKILL and resumed equals one that was not killed.

It is a proof on the user's own machine and config. Both runs go through the ordinary supervisor. Compared are weights,
optimizer, progress and adapter, byte for byte.
"""

from __future__ import annotations  # array[float] is no type at run time before Python 3.12

import json
import math
import os
import random
import shutil
import signal
import sqlite3
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import write_atomic, write_manifest
from hivetune.base.journal import read_journal
from hivetune.base.paths import quoted
from hivetune.config import RunConfig, parse_config
from hivetune.data.snapshot import ROWS_FILE, Snapshot, open_snapshot
from hivetune.errors import HivetuneError, Stopped
from hivetune.records import Progress, silent
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.run.folder import ADAPTER, EVENTS, METRICS, read_resolved, write_resolved
from hivetune.train.open import plan_of
from hivetune.train.plan.steps import write_plan
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.supervisor import supervise_run

STEPS, BATCH, VALIDATION_ROWS = 6, 4, 4
# Shorter runs are over before they can be killed in the middle.
MIN_TRAINING_S = 4.0
MAX_STEPS = 400
KILLS = 2
# Kernels of a card may add in another order each time; a wrong resume is off by the size of an update, far above this.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Compared:
    """One file of both runs. `difference`: the largest, relative to the largest value; None if not of tensors."""

    file: str
    identical: bool
    difference: float | None


@dataclass(frozen=True)
class Verification:
    """The result of the proof. `resumed_from`: the steps at which the killed run resumed."""

    files: tuple[Compared, ...]
    steps: int
    kills: int
    resumed_from: tuple[int, ...]
    device: str
    seconds: float

    @property
    def identical(self) -> bool:
        return all(file.identical for file in self.files)

    @property
    def passed(self) -> bool:
        """Return whether the runs are equal: bit for bit, on a card the tensors within rounding.

        A card's kernels may not be deterministic.
        """
        if self.device == "cpu":
            return self.identical
        return all(file.identical or file.difference is None or file.difference <= ROUNDING for file in self.files)


def verify_resume(
    config: RunConfig,
    model: Path,
    snapshot: Snapshot,
    folder: Path,
    progress: Progress = silent,
    *,
    worker: str | None = None,
) -> Verification:
    """Train a few steps of `config` twice below `folder`, once undisturbed and once killed KILLS times.

    Raises HivetuneError when a run does not come to its end, or was over before it could be killed.
    """
    started = time.monotonic()
    train, validation = snapshot.rows("train")[: BATCH * MAX_STEPS], snapshot.rows("validation")[:VALIDATION_ROWS]
    bad = snapshot.bad_rows()[: BATCH * BATCH] if config.learn.stage == 2 else []
    judged = [row for answer in bad for row in (answer.better, answer.row) if row is not None]
    excerpt = excerpt_of(snapshot, [*dict.fromkeys([*train, *validation, *judged])], folder / "snapshot")
    calm, killed = folder / "calm", folder / "killed"

    def train_to_end(run: Path, steps: int, on_step: Callable[[int], None], choices: Choices = NO_CHOICES) -> None:
        short = _make_run(run, config, excerpt, steps, choices)
        outcome = supervise_run(run, short, model=model, snapshot=excerpt.folder, worker=worker, terms=Terms(on_step))
        try:
            outcome.check()
        except Stopped as error:  # its words are of a run that can be resumed; this one is deleted by who asked for it
            raise Stopped("stopped before both runs could be compared", signal_number=error.signal_number) from None
        except HivetuneError as error:
            error.hint = error.hint.replace(f"hivetune resume {quoted(run)}", "hivetune verify-resume CONFIG")
            raise

    steps = STEPS
    train_to_end(calm, steps, lambda step: progress(step, 2 * steps))
    step_s = statistics.median(e["seconds"] for e in read_journal(calm / METRICS) if e["event"] == "step")
    if step_s * steps < MIN_TRAINING_S:
        steps = min(MAX_STEPS, math.ceil(MIN_TRAINING_S / max(step_s, 1e-3)))
        shutil.rmtree(calm)
        train_to_end(calm, steps, lambda step: progress(step, 2 * steps))
    at = [max(1, steps * (number + 1) // (KILLS + 1)) for number in range(KILLS)]
    kills = 0

    def kill_on_time(step: int) -> None:
        """End the worker by SIGKILL, once at each of `at` finished steps, up to a step's time later."""
        nonlocal kills
        progress(steps + step, 2 * steps)
        attempts = [entry for entry in read_journal(killed / EVENTS) if entry["event"] == "attempt"]
        if kills < min(len(at), len(attempts)) and step >= at[kills]:
            time.sleep(random.random() * min(step_s, 2.0))
            os.kill(attempts[-1]["pid"], signal.SIGKILL)
            kills += 1

    train_to_end(killed, steps, kill_on_time, read_resolved(calm)[1])  # what was measured once holds for both
    if not kills:
        raise HivetuneError(f"the run of {steps} steps ended before it was killed", hint="run verify-resume again")
    return Verification(
        files=tuple(compare_runs(calm, killed)),
        steps=steps,
        kills=kills,
        resumed_from=tuple(e["durable"] for e in read_journal(killed / EVENTS) if e["event"] == "failure"),
        device=read_resolved(calm)[1].device or "cpu",
        seconds=round(time.monotonic() - started, 3),
    )


def compare_runs(run_a: Path, other_run: Path) -> list[Compared]:
    """Compare the newest checkpoints and the adapters of two runs."""
    newest = [checkpoints.newest_good(run).folder for run in (run_a, other_run)]
    if newest[0] is None or newest[1] is None or newest[0].name != newest[1].name:
        return [Compared("newest checkpoint", False, None)]
    pairs = [(name, newest[0] / name, newest[1] / name) for name in (TENSORS, STATE)]
    pairs.append((ADAPTER, run_a / ADAPTER, other_run / ADAPTER))
    files = [(name, a.read_bytes(), b.read_bytes()) for name, a, b in pairs]
    return [
        Compared(name, file_a == file_b, _difference(file_a, file_b) if name.endswith(".safetensors") else None)
        for name, file_a, file_b in files
    ]


def excerpt_of(snapshot: Snapshot, rows: Sequence[int], folder: Path) -> Snapshot:
    """Write a small snapshot of some rows of another, renumbered; its hash is that of its tokens."""
    folder.mkdir(parents=True)
    offsets, tokens, trained = array("Q", [0]), bytearray(), bytearray()
    for row in rows:
        tokens += snapshot.tokens(row).cast("B")
        trained += snapshot.trained(row)
        offsets.append(len(trained))
    for name, data in (("tokens.u32", tokens), ("trained.u8", trained), ("offsets.u64", offsets.tobytes())):
        write_atomic(folder / name, bytes(data))
    with closing(sqlite3.connect(folder / ROWS_FILE)) as database:
        database.execute("ATTACH ? AS whole", (str(snapshot.folder / ROWS_FILE),))
        database.execute("CREATE TABLE rows AS SELECT * FROM whole.rows LIMIT 0")
        for number, row in enumerate(rows):
            database.execute("INSERT INTO rows SELECT * FROM whole.rows WHERE row = ?", (row,))
            database.execute("UPDATE rows SET row = ? WHERE rowid = last_insert_rowid()", (number,))
        if snapshot.num_bad:
            database.execute("CREATE TEMP TABLE places (number INTEGER, row INTEGER PRIMARY KEY)")
            database.executemany("INSERT INTO places VALUES (?, ?)", enumerate(rows))
            database.execute("UPDATE rows SET better = (SELECT number FROM places WHERE places.row = rows.better)")
        database.commit()
    counts = {"num_rows": len(rows), "num_bad": snapshot.num_bad}
    write_manifest(folder, {"kind": "snapshot", "hash": f"{snapshot.hash}-excerpt", **counts})
    return open_snapshot(folder)


def _make_run(run: Path, config: RunConfig, snapshot: Snapshot, steps: int, choices: Choices = NO_CHOICES) -> RunConfig:
    """Make a run folder of `steps` small steps with two validations, and a checkpoint whenever one can be written."""
    num_rows = len(snapshot.rows("train"))
    batch_size = min(config.batch_size, BATCH)
    short = parse_config(
        {
            **config.model_dump(mode="json"),
            "batch_size": batch_size,
            "max_steps": steps,
            "epochs": max(1, math.ceil(steps * batch_size / num_rows)),
            "validate_every": max(1, steps // 2),
            "patience": None,
            "supervise": {**config.supervise.model_dump(mode="json"), "checkpoint_every_s": 0.01, "chunk_rows": None},
        }
    )
    run.mkdir(parents=True)
    write_resolved(run, short, choices)
    write_plan(run, plan_of(short, snapshot, "verify-resume"))
    return short


def _difference(a: bytes, b: bytes) -> float | None:
    """Return the largest difference of two files of fp32 tensors, relative to the largest value.

    None: they do not hold the same tensors.
    """
    heads, values = [], []
    for data in (a, b):
        start = 8 + int.from_bytes(data[:8], "little")
        heads.append(json.loads(data[8:start]))
        values.append(array("f", data[start:]))
    if heads[0] != heads[1]:
        return None
    largest = max(map(abs, values[0]), default=0.0)
    return max((abs(x - y) for x, y in zip(*values, strict=True)), default=0.0) / (largest or 1.0)

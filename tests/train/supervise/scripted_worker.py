"""A worker without torch that trains nothing but keeps every rule of the real one, and dies as RUN/script.json says.

Its state is a chain of hashes over the rows of the steps, so that two runs ended alike only if they did the same steps.
As a replay child (the task is a `Replay`) it dies of the same rows. A scripted fault is
    {"do": ABORT TEXT or what below, and when: "step", "row", "tokens_above", "rank_above", "chance" (a share),
     "rung": it goes away while this holds of the choices or the environment, "device": and on the processor,
     "times": at most so often}
"""

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import sha256_bytes
from hivetune.base.journal import Journal, read_journal
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import HivetuneError
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Replay, Train
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS
from hivetune.run.choices import Choices
from hivetune.train.plan.steps import read_plan


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class StepNotFinite(HivetuneError):
    """Named as the engine's."""


def applies(
    fault: Mapping[str, Any],
    met: int,
    settings: Mapping[str, Any],
    step: int | None,
    rows: Sequence[int],
    tokens: int,
    rank: int = 0,
    draw: Callable[[], float] = random.random,
) -> bool:
    """Return whether a fault that was `met` so often happens under these choices and variables."""
    cure = fault.get("rung", {})
    if met >= fault.get("times", 1 << 30) or (
        cure and all(settings.get(name) == value for name, value in cure.items())
    ):
        return False
    if fault.get("device") and settings.get("device") == "cpu":
        return False
    if "chance" in fault:
        return draw() < fault["chance"]
    if rank and rank <= fault.get("rank_above", -1):
        return False
    if tokens <= fault.get("tokens_above", -1) or ("row" in fault and fault["row"] not in rows):
        return False
    return "step" not in fault or step == fault["step"]


class Script:
    """The faults of a run and how often each has happened, over all of its workers."""

    def __init__(self, run: Path, choices: Choices):
        self.path, self.choices = run / "script.done", choices
        self.faults = json.loads((run / "script.json").read_text())
        self.rank = yaml.safe_load((run / "config.resolved.yaml").read_text())["config"]["lora"]["r"]

    def meet(self, step: int | None, rows: Sequence[int], tokens: int) -> None:
        """Die here, if a fault says so."""
        settings = {**os.environ, **self.choices.as_dict()}
        for number, fault in enumerate(self.faults):
            met = self.path.read_text().split().count(str(number)) if self.path.exists() else 0
            if "pace_s" in fault:
                time.sleep(fault["pace_s"])
            elif applies(fault, met, settings, step, rows, tokens, self.rank):
                with open(self.path, "a") as file:
                    file.write(f"{number}\n")
                self._do(fault, step, rows)

    def _do(self, fault: Mapping[str, Any], step: int | None, rows: Sequence[int]) -> None:
        match fault["do"]:
            case "segv":
                ctypes.string_at(1)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold the GIL":
                while True:  # a signal cuts a sleep short
                    ctypes.PyDLL(None).sleep(3600)
            case "out of memory":
                raise OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")
            case "nan":
                raise StepNotFinite(f"step {step}: the loss is nan; it is rows {rows} together, none of them alone")
            case "raise":
                raise RuntimeError(fault["text"])
            case text:
                print(text, file=sys.stderr, flush=True)
                os.abort()


def main(task: Train | Replay, heartbeat: Heartbeat) -> dict[str, Any]:
    run, choices = task.run, task.changes
    script = Script(run, choices)
    if isinstance(task, Replay):
        return replay(task, heartbeat, script)
    heartbeat.beat(Beat.PREPARING)
    script.meet(-1, (), 0)
    plan, snapshot = read_plan(run), open_snapshot(task.snapshot)
    found = checkpoints.newest_good(run)
    state = (found.folder / TENSORS).read_bytes() if found.folder else b"start"
    metrics = run / "metrics.jsonl"
    kept = [line for line in read_journal(metrics) if line["step"] <= found.step]
    journal = Journal(metrics)
    journal.replace(kept)
    journal.append("started", step=found.step, pid=os.getpid())
    for step in range(found.step, len(plan.steps)):
        rows = plan.steps[step].rows
        lengths = [snapshot.length(row) for row in rows]
        size = max(1, -(-len(rows) // 2 ** (choices.halvings or 0)))
        tokens = max(sum(lengths[start : start + size]) for start in range(0, max(1, len(rows)), size))
        started = time.perf_counter()
        script.meet(step, rows, tokens)
        state = sha256_bytes(state + json.dumps([step, rows]).encode()).encode()
        seconds = max(time.perf_counter() - started, 1e-4)
        journal.append("step", step=step + 1, loss=1.0, seconds=seconds)
        heartbeat.beat(Beat.ITEM)
        files = {TENSORS: state, STATE: json.dumps({"step": step + 1, "best": None}).encode()}
        checkpoints.commit_within(run, step + 1, files)
        if heartbeat.stop_requested:
            return {"status": "stopped", "steps": step + 1}
    seconds = sum(line["seconds"] for line in read_journal(metrics) if line["event"] == "step")
    return {"steps": len(plan.steps), "state": state.decode(), "train_seconds": seconds}


def replay(task: Replay, heartbeat: Heartbeat, script: Script) -> dict[str, Any]:
    with Journal(task.journal) as journal:
        journal.append("ready")
        for item in task.items:
            script.meet(None, item.rows, 0)
            journal.append("item", finite=True)
            heartbeat.beat(Beat.ITEM)
    return {}

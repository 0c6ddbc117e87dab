"""A queue of whole runs, one device each: started in turn, asked to pause, ended when this process ends.

Each is `hivetune resume RUN` in a process of its own, with a supervisor of its own, so a run here is what it is
anywhere else. A pause is the clean end that Ctrl-C asks for; continuing is a resume, bit for bit.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.private import open_plain
from hivetune.config import RunConfig
from hivetune.machine.inventory import Card, Machine
from hivetune.process.detach import resume_command
from hivetune.run.folder import SUPERVISOR_LOG
from hivetune.run.status import run_status, stop_run

QUEUE_LOOK_S = 0.5
# A run that was asked to stop finishes a step and writes a checkpoint; then it is killed.
PAUSE_TIMEOUT_S = 900.0
STOP_CODES = {130, 143, -signal.SIGINT, -signal.SIGTERM}


@dataclass(frozen=True)
class Going:
    """One run of the queue. It may pause when `far_enough()` is true; None: it runs to its end."""

    run: Path
    far_enough: Callable[[], bool] | None = None


def visible_devices(cards: Sequence[Card], device: str, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each place in the queue: one card each, or one place for the processor.

    `device` is the setting; a card that it names is the only one.
    """
    if device in ("auto", "cuda") and cards:
        environments = []
        for position in range(len(cards)):
            name = "HIP_VISIBLE_DEVICES" if cards[position].kind == "rocm" else "CUDA_VISIBLE_DEVICES"
            visible = [entry.strip() for entry in environment.get(name, "").split(",") if entry.strip()]
            environments.append({name: visible[position] if position < len(visible) else str(position)})
        return environments
    return [{}]


def slots_of(config: RunConfig, machine: Machine) -> list[dict[str, str]]:
    """Return where runs of a config may train at the same time. A run with workers of its own takes all cards."""
    if config.workers is not None:
        return [{}]
    return visible_devices(machine.cards, config.device, os.environ)


def failure_text(run: Path, code: int) -> str:
    """Return in words how a run ended that exited with `code`."""
    status = run_status(run)
    return f"its run ended with exit code {code}" + (f": {status.last_fault}" if status.last_fault else f"; see {run}")


def run_queue(
    queue: Sequence[Going],
    slots: Sequence[Mapping[str, str]],
    on_look: Callable[[], None],
    options: Sequence[str] = (),
) -> dict[Path, int]:
    """Run the queue, as many runs at once as there are places.

    Return the exit code of each, 0 for one that paused or is done.

    `options` are passed to `hivetune resume`, such as the cluster whose devices continue the runs; a place is then one
    of them. `on_look` is called twice a second. When it raises, the runs are asked to stop and waited for.
    """
    waiting, codes = list(queue), dict[Path, int]()
    running: dict[int, tuple[Going, subprocess.Popen[bytes], bool]] = {}
    try:
        while waiting or running:
            for slot, environment in enumerate(slots):
                if slot not in running and waiting:
                    going = waiting.pop(0)
                    running[slot] = (going, _start(going.run, environment, options), False)
            for slot, (going, process, stopping) in list(running.items()):
                code = process.poll()
                if code is not None:
                    codes[going.run] = 0 if stopping and code in STOP_CODES else code
                    del running[slot]
                elif not stopping and going.far_enough is not None and going.far_enough():
                    process.terminate()
                    running[slot] = (going, process, True)
            on_look()
            time.sleep(QUEUE_LOOK_S if running else 0.0)
    finally:
        _end([process for _, process, _ in running.values()])
    return codes


def _start(run: Path, environment: Mapping[str, str], options: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a run. One that still trains, since this process was killed, is asked to end first.

    Raises Busy if it does not.
    """
    stop_run(run, PAUSE_TIMEOUT_S)
    with open(open_plain(run / SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
        return subprocess.Popen(
            [*resume_command(run), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            process.terminate()
    deadline = time.monotonic() + PAUSE_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()

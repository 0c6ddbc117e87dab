"""The child's side of a task: guards, the task file, the heartbeat, and `outcome.json` written last.

A worker module has a `main(task, heartbeat) -> dict`, whose first annotation names its classes of tasks
(process/protocol.py). process/parent.py is the other side. This module does not import torch, so that the guards are
set before torch is loaded, and so that a module that can't be imported still has an outcome.
"""

import contextlib
import faulthandler
import importlib
import os
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, get_args, get_type_hints

from hivetune.base.disk import FULL_DISK, read_json, write_json
from hivetune.base.paths import install_command
from hivetune.base.private import keep_private
from hivetune.errors import HivetuneError, MachineNotFit
from hivetune.process.protocol import EXIT_FULL_DISK, SAVES_WHEN_STOPPED, Beat, task_in
from hivetune.process.sandbox import die_with_parent
from hivetune.run.folder import OUTCOME

# When memory runs out the kernel kills the process with the highest score: the worker, never the desktop.
OOM_SCORE = 500
EXIT_ORPHANED = 70


class Heartbeat:
    """The heartbeat: one byte per beat on the inherited pipe.

    After SIGTERM `stop_requested` is set; tasks that can save check it, save and return.
    """

    def __init__(self, handle: int | None):
        self._handle = handle
        self.stop_requested = False
        if handle is not None:
            os.set_blocking(handle, False)

    def beat(self, beat: Beat) -> None:
        """Send a beat: a sign that some work has ended or is about to begin. It never blocks.

        If the pipe is full because the supervisor does not read it, the beat is dropped; the bytes in the pipe are
        enough.
        """
        if self._handle is None:
            return
        try:
            os.write(self._handle, beat.value)
        except BlockingIOError:
            return
        except BrokenPipeError:
            os._exit(EXIT_ORPHANED)

    def request_stop(self, signal_number: int, frame: FrameType | None) -> None:
        self.stop_requested = True


def guard() -> None:
    """Set the guards before large modules are imported: created files are private, the process is killed when its
    parent dies, writes no core file, and is the first to be killed when memory is short.

    A parent's death is noticed even by a stopped process and by one that holds the GIL. The stacks at a fatal error and
    at SIGUSR1 are written to standard error by C code, which does not need the GIL.
    """
    keep_private()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_with_parent()
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(OOM_SCORE))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def limit_memory(limit_bytes: int | None) -> None:
    """Make allocations above this much private memory fail, before the machine freezes.

    It is not used for graphics cards, whose drivers map address space without memory.
    """
    if limit_bytes is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = limit_bytes if most == resource.RLIM_INFINITY else min(limit_bytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def run_child(module: str, task_file: str, pipe: str | None = None) -> NoReturn:
    """Run the `main` of a module (dotted name, or the path of a script) on a task, write `outcome.json`, and end this
    process.

    `pipe` is the handle of the heartbeat, which only the first of a run's ranks has. `main` returns its result, with
    `"status": "stopped"` after an early end by `stop_requested`. The process ends with `os._exit`, since after a device
    fault a normal exit may hang.
    """
    guard()
    sys.argv = [module, task_file]  # as of a program: rank 0 starts the others by it (train/worker/ranks.py)
    document, folder = read_json(Path(task_file)), Path(task_file).resolve().parent
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    heartbeat = Heartbeat(int(pipe) if pipe else None)
    if document["kind"] in {kind.__name__ for kind in SAVES_WHEN_STOPPED}:
        signal.signal(signal.SIGTERM, heartbeat.request_stop)
    heartbeat.beat(Beat.STARTING)
    try:
        main = _main_of(module)
        kinds = get_type_hints(main)["task"]
        limit_memory(document["memory_limit_bytes"])
        result = main(task_in(document, *(get_args(kinds) or (kinds,))), heartbeat)
        write_json(folder / OUTCOME, {"schema": 1, "status": "done", "error": None, **result})
        code = 0
    except BaseException as error:  # noqa: BLE001 (the last frame of the process reports every error)
        code = report_failure(folder, error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the last lines of the log, on a full disk
            stream.flush()
    os._exit(code)


def _main_of(module: str) -> Callable[[Any, Heartbeat], dict[str, Any]]:
    """Return the `main` of a module. Raise MachineNotFit for a package that is not installed."""
    try:
        is_script = module.endswith(".py")
        found = runpy.run_path(module) if is_script else vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        hint = install_command("train")
        raise MachineNotFit(f"the package {error.name} is not installed", hint=hint) from error
    main: Callable[[Any, Heartbeat], dict[str, Any]] = found["main"]
    return main


def report_failure(folder: Path, error: BaseException) -> int:
    """Print the traceback, write a failed `outcome.json`, and return the exit code (EXIT_FULL_DISK if it can't be
    written)."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # the log may be on the full disk
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (standard error is the task's log)
    message, hint, code = str(error), "", 1
    if isinstance(error, HivetuneError):
        message, hint, code = error.message, error.hint, error.exit_code
    kind = type(error).__name__
    described = {"type": kind, "message": message, "hint": hint, "exit_code": code}
    try:
        write_json(folder / OUTCOME, {"schema": 1, "status": "failed", "error": described})
    except OSError as problem:
        if problem.errno not in FULL_DISK:
            raise
        return EXIT_FULL_DISK
    return code

"""`python -m hivetune.process MODULE TASK.json`: one engine module with the guards up before torch is imported.

With the number of a socket instead of both it is a child that was started ahead: it imports, then waits to be told
them. A module that can't be imported (no torch here) still ends with an `outcome.json` that says so.
"""

import os
import runpy
import sys
from pathlib import Path

from hivetune.process.child import guard, missing_package, report_failure, wait_for_task
from hivetune.process.protocol import read_task

# All that a probe and a training worker import but 0.03 s of 1.7 s: torch, and the engine without a module that is run.
IMPORTED_AHEAD = "hivetune.train.worker.crew"


def launch(module: str, task_file: str) -> None:
    """Run `module` (dotted name, or the path of a script) as `__main__` with the task file as its argument."""
    sys.argv = [module, task_file]
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        os._exit(report_failure(read_task(Path(task_file)).folder, missing_package(error)))
    except Exception as error:  # noqa: BLE001 (an import of torch can fail in any way; the parent must read which)
        os._exit(report_failure(read_task(Path(task_file)).folder, error))


if __name__ == "__main__":
    guard()
    launch(*(sys.argv[1:] if len(sys.argv) > 2 else wait_for_task(int(sys.argv[1]), IMPORTED_AHEAD)))

"""`python -m hivetune.process MODULE TASK.json`: run a module with the guards set before torch is imported.

With `fork` and the number of a socket it is a fork server: each of its forks gets a module and a task. Modules that are
named behind are imported first.
A module that can't be imported, for example without torch, still writes its `outcome.json`.
"""

import os
import runpy
import sys
from pathlib import Path

from hivetune.process.child import guard, missing_package, report_failure
from hivetune.process.forkserver import FORK, serve_forks
from hivetune.process.protocol import read_task


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
    except Exception as error:  # noqa: BLE001 (an import of torch can fail in any way, which the parent must learn)
        os._exit(report_failure(read_task(Path(task_file)).folder, error))


if __name__ == "__main__":
    guard()
    first, *rest = sys.argv[1:]
    if first == FORK:
        launch(*serve_forks(int(rest[0]), rest[1:]))
    else:
        launch(first, *rest)

"""`python -m hivetune.process MODULE TASK.json`: run a module with the guards set before torch is imported.

With the number of a socket instead it is a child that was started ahead: it imports and then waits for module and task.
With `fork` and the number of a socket it is a fork server: each of its forks gets a module and a task.
A module that can't be imported, for example without torch, still writes its `outcome.json`.
"""

import os
import runpy
import sys
from pathlib import Path

from hivetune.process.child import guard, missing_package, report_failure, wait_for_task
from hivetune.process.forkserver import serve_forks
from hivetune.process.protocol import FORK, read_task

# It imports torch and the engine: all but 0.03 s of the 1.7 s of imports of a probe or training worker.
IMPORTED_AHEAD = "hivetune.train.worker.exchange.exchange"


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
        launch(*serve_forks(int(*rest)))
    else:
        launch(*((first, *rest) if rest else wait_for_task(int(first), IMPORTED_AHEAD)))

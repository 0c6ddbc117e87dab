"""`python -m hivetune.process MODULE TASK.json [HEARTBEAT]`: run a module, with the guards set before it imports torch.

A module that can't be imported, for example without torch, still writes its `outcome.json`.
"""

import os
import runpy
import sys
from pathlib import Path

from hivetune.process.child import guard, missing_package, report_failure
from hivetune.process.protocol import read_task


def run_module(module: str, *arguments: str) -> None:
    """Run `module` (dotted name, or the path of a script) as `__main__` with these arguments, the task file first."""
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:  # noqa: BLE001 (an import of torch can fail in any way, which the parent must learn)
        shown = missing_package(error) if isinstance(error, ModuleNotFoundError) else error
        os._exit(report_failure(read_task(Path(arguments[0])).folder, shown))


if __name__ == "__main__":
    guard()
    run_module(*sys.argv[1:])

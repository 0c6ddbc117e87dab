"""`python -m hivetune.process MODULE TASK.json [HEARTBEAT]`: run a task (process/child.py)."""

import sys

from hivetune.process.child import run_child

if __name__ == "__main__":
    run_child(*sys.argv[1:])

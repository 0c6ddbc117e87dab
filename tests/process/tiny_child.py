"""A child without torch for the tests of tasks: does what `task["do"]` says."""

import ctypes
import os
import signal
import sys
import time

from hivetune.errors import DoesNotFit
from hivetune.process.child import Heartbeat, Task, run_child


def main(task: Task, heartbeat: Heartbeat) -> dict[str, object]:
    match task["do"]:
        case "items":
            for _ in range(task["items"]):
                heartbeat.beat(b"t")
            return {"items": task["items"]}
        case "refuse":
            raise DoesNotFit("needs 9 GiB", hint="use a smaller model")
        case "crash":
            raise ValueError("no good")
        case "abort":
            print("Memory access fault by GPU node-1 on address (nil). Reason: Unknown.", file=sys.stderr, flush=True)
            os.abort()
        case "exit":
            os._exit(3)
        case "stop_itself":
            heartbeat.beat(b"t")
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold_gil":
            heartbeat.beat(b"t")
            ctypes.PyDLL(None).sleep(3600)
        case "until_stopped":
            heartbeat.beat(b"t")
            while not heartbeat.stop_requested:
                time.sleep(0.01)
            return {"status": "stopped", "saved": True}
        case "environment":
            return {"environment": dict(os.environ), "oom": open("/proc/self/oom_score_adj").read().strip()}
        case "allocate":
            return {"bytes": len(bytearray(1 << 30))}
        case "write":
            os.write(task["handle"], b"hello")
    return {}


if __name__ == "__main__":
    run_child(main)

"""A child without torch for the tests of tasks: does what `Play.do` says; "trains" until it is asked to stop."""

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hivetune.errors import DoesNotFit
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Train


@dataclass(frozen=True)
class Play:
    do: str
    items: int = 0


def main(task: Play | Train, heartbeat: Heartbeat) -> dict[str, object]:
    if isinstance(task, Train):
        heartbeat.beat(Beat.ITEM)
        while not heartbeat.stop_requested:
            time.sleep(0.01)
        return {"status": "stopped", "saved": True}
    match task.do:
        case "items":
            for _ in range(task.items):
                heartbeat.beat(Beat.ITEM)
            return {"items": task.items}
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
            heartbeat.beat(Beat.ITEM)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold_gil":
            heartbeat.beat(Beat.ITEM)
            ctypes.PyDLL(None).sleep(3600)
        case "work_on":
            heartbeat.beat(Beat.ITEM)
            while True:
                time.sleep(0.01)
        case "environment":
            score = Path("/proc/self/oom_score_adj").read_text().strip()
            return {"environment": dict(os.environ), "folder": os.getcwd(), "oom": score}
        case "allocate":
            return {"bytes": len(bytearray(1 << 30))}
    return {}

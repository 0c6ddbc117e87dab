"""A worker without torch: it beats, and ends as the name of its model's folder says."""

import os
import signal
import time
from typing import Any

from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, ComputePacks


def main(task: ComputePacks, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.ITEM)
    if task.model.name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while task.model.name == "waits":
        heartbeat.beat(Beat.WAITING)
        time.sleep(0.05)
    return {"device": task.device, "threads": os.environ.get("OMP_NUM_THREADS")}


if __name__ == "__main__":
    run_child(main, ComputePacks)

"""A worker beside a run's own that is three times as slow as its processor: after each pack it stands still for twice
the time that it computed. `bench/workers.py` starts it."""

import time
from typing import Any

from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import ComputePacks
from hivetune.train.worker.exchange import group, worker
from hivetune.train.worker.exchange.work import Work, WorkResult
from hivetune.train.worker.model.protocol import LoraModel

TIMES_AS_SLOW = 3.0
_compute = group.compute


def compute_slowly(model: LoraModel, work: Work) -> WorkResult:
    started = time.perf_counter()
    result = _compute(model, work)
    time.sleep((TIMES_AS_SLOW - 1) * (time.perf_counter() - started))
    return result


def main(task: ComputePacks, heartbeat: Heartbeat) -> dict[str, Any]:
    group.compute = compute_slowly
    return worker.main(task, heartbeat)


if __name__ == "__main__":
    run_child(main, ComputePacks)

"""In the place of a machine's Python: what `hivetune resume` does to a run, without torch. `-m MODULE RUN AGENT`.

It writes a step now and then until a file `finish` lies beside its machine's home, or it is told to stop.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_manifest
from hivetune.base.journal import Journal, read_journal
from hivetune.run.checkpoints import STATE, TENSORS, commit
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG, EVENTS, METRICS, read_record, write_record

STEPS = 40


def main(run: Path) -> int:
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    home = Path(os.environ["HIVETUNE_HOME"])
    if (home / "refuses").exists():
        return int((home / "refuses").read_text())
    done = max((entry["step"] for entry in read_journal(run / METRICS) if entry["event"] == "step"), default=0)
    with Journal(run / METRICS) as metrics, Journal(run / EVENTS) as events:
        events.append("supervisor_started", host=home.name, fingerprint="same")
        for step in range(done + 1, STEPS + 1):
            time.sleep(0.01)
            metrics.append("step", step=step, loss=1.0 / step, seconds=0.01, tokens=9)
            if step == STEPS // 2:
                commit(run, step, {TENSORS: b"tensors", STATE: b"{}"})
                while not stop and not (home / "finish").exists():
                    time.sleep(0.01)
            if stop:
                print("the run was stopped", flush=True)
                events.append("supervisor_ended", status="stopped", steps=step, restarts=0, why="a signal")
                return 143
        events.append("supervisor_ended", status="done", steps=STEPS, restarts=0, why="")
    (run / ADAPTER).write_bytes(b"trained")
    (run / ADAPTER_CONFIG).write_text("{}")
    numbers = dict.fromkeys(("loss_first", "loss_last", "tokens_per_second", "train_seconds"), 1.0)
    counts = dict.fromkeys(("adapter_step", "peak_memory_bytes", "restarts"), 1)
    result: dict[str, Any] = {"run": str(run), "steps": STEPS, "rows": {}, "quarantined": [], **numbers, **counts}
    write_record(run, {**read_record(run), "status": "done", "result": result})
    write_manifest(run, {"kind": "run"})
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[3])))

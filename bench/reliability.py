"""How much of a run's time is useful although its worker is killed again and again.

    python bench/reliability.py --out docs/measured/useful_time.json        about 4 minutes, on a quiet machine

The real worker on SmolLM2-135M is killed four times. What one kill costs (noticing, loading, steps made twice) gives
the share at one fault per ten minutes.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_json
from hivetune.base.journal import read_journal
from hivetune.config import parse_config
from hivetune.errors import HivetuneError
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.synth.demo import write_demo_data
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms

KILLS, BETWEEN_S = 4, 25.0
TEN_MINUTES_S = 600.0


def useful() -> dict[str, Any]:
    """The real worker, killed KILLS times; what each kill cost beyond the steps that count."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_demo_data(Path(folder) / "rows.jsonl", 1200)
        config = parse_config(
            {
                "model": "smollm2-135m",
                "data": {"path": str(data)},
                "epochs": 20,
                "batch_size": 8,
                "max_length": 512,
                "validate_every": 100_000,
                "output": f"{folder}/run",
            }
        )
        run = open_run(config, "reliability")
        lost, stopped = [], False
        last_kill = time.monotonic()

        def on_step(done: int) -> None:
            nonlocal last_kill, stopped
            if time.monotonic() - last_kill < BETWEEN_S or stopped:
                return
            if len(lost) == KILLS:
                stopped = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            pid = [e["pid"] for e in read_journal(run.folder / "events.jsonl") if e["event"] == "attempt"][-1]
            lost.append({"killed_at": time.time(), "step": done})
            last_kill = time.monotonic()
            os.kill(pid, signal.SIGKILL)

        started = time.time()
        try:
            train_run(run, Terms(on_step))
        except HivetuneError as error:
            print(error, file=sys.stderr)
        return _report(run.folder, started, lost)


def _report(run: Path, started: float, lost: list[dict[str, Any]]) -> dict[str, Any]:
    """From the run's own journals: when it was back at the step it was killed in."""
    steps = {e["step"]: e for e in read_journal(run / "metrics.jsonl") if e["event"] == "step"}
    saves = [e for e in read_journal(run / "metrics.jsonl") if e["event"] == "saved"]
    events = list(read_journal(run / "events.jsonl"))
    ends = [e for e in events if e["event"] == "failure"]
    for kill, end in zip(lost, ends, strict=True):
        kill["noticed_s"] = round(end["time"] - kill["killed_at"], 3)
        kill["steps_made_twice"] = end["step"] - end["durable"]
        kill["cost_s"] = round(
            steps[end["step"] + 1]["time"] - steps[end["step"] + 1]["seconds"] - kill["killed_at"], 3
        )
    step_s = statistics.median(e["seconds"] for e in steps.values())
    wall_s = max(e["time"] for e in steps.values()) - started
    cost_s = statistics.mean(kill["cost_s"] for kill in lost)
    blocking = sum(e["blocking_s"] for e in saves) / wall_s
    return {
        "schema": 1,
        "claim": "share of the wall time in steps that count, SmolLM2-135M, real SIGKILLs of the worker",
        "machine": describe_machine(read_machine()),
        "step_s": round(step_s, 3),
        "kills": [{name: value for name, value in kill.items() if name != "killed_at"} for kill in lost],
        "cost_of_a_kill_s": round(cost_s, 3),
        "blocking_of_saves": round(blocking, 5),
        "useful_share_measured": round(sum(e["seconds"] for e in steps.values()) / wall_s, 4),
        "one_fault_every_s_measured": round(wall_s / len(lost), 1),
        "useful_share_at_one_fault_per_ten_minutes": round((1 - blocking) * (1 - cost_s / TEN_MINUTES_S), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    result = useful()
    if (out := parser.parse_args().out) is not None:
        write_json(out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

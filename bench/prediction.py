"""Does the plan's prediction hold? Whole runs of the demo's kind, each probed anew, predicted against actual.

python bench/prediction.py --out docs/measured/prediction_cpu.json        about 1 minute a run on 2 cores

A run is void when its canary product moved by more than 5 % between the probe and the steps that are compared: then
something else used the machine. Void runs are listed and not counted.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hivetune.config import RunConfig, parse_config
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.models.fetch import fetch_model
from hivetune.synth.demo import SYSTEM_PROMPTS, write_demo_data
from hivetune.train.probe import probe_run
from hivetune.train.start import open_run, train_run

RUNS = 3
STEPS = 52
# The first shares system prompts, the second nothing, the third computes in another precision.
KINDS: dict[str, dict[str, Any]] = {
    "agents": {"data": {"system_prompts": SYSTEM_PROMPTS}},
    "short": {},
    "float32": {"data": {"system_prompts": SYSTEM_PROMPTS}, "dtype": "float32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    arguments = parser.parse_args()
    started = time.perf_counter()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_demo_data(Path(folder) / "interactions.jsonl")
        for number in range(arguments.runs):
            for kind in arguments.kinds.split(","):
                runs.append({"kind": kind, **one_run(data, Path(folder) / f"{kind}-{number}", KINDS[kind])})
                print(line(runs[-1]), flush=True)
    counted = [run for run in runs if not run["void"]]
    document = {
        "schema": 1,
        "command": " ".join(["python", "bench/prediction.py", *sys.argv[1:]]),
        "machine": describe_machine(read_machine()),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "runs": len(runs),
        "void": len(runs) - len(counted),
        "buckets": sum(len(run["buckets"]) for run in counted),
        "buckets_within_ten_percent": sum(abs(b["off"]) <= 0.1 for run in counted for b in run["buckets"]),
        "peaks_within_ten_percent": sum(abs(run["peak"]["off"]) <= 0.1 for run in runs),
        "results": runs,
    }
    print({key: value for key, value in document.items() if key != "results"})
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")


def one_run(data: Path, output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Probed and trained as `hivetune train` does it."""
    config: RunConfig = parse_config(
        {
            **settings,
            "model": "smollm2-135m",
            "data": {"path": str(data), **settings.get("data", {})},
            "max_steps": STEPS,
            "validate_every": STEPS // 2,
            "output": str(output),
        },
        "bench/prediction.py",
    )
    fetch_model(config.model)
    run = open_run(config, output.name)
    probe_run(run)
    found: dict[str, Any] = train_run(run)["prediction"]
    return found


def line(run: dict[str, Any]) -> str:
    buckets = ", ".join(
        f"{b['steps']} steps to {b['tokens']} tokens {b['predicted_s']:.3f} | {b['actual_s']:.3f} s ({b['off']:+.1%})"
        for b in run["buckets"]
    )
    peak = run["peak"]
    size = f"{peak['predicted_bytes'] / 1e9:.2f} | {peak['actual_bytes'] / 1e9:.2f} GB ({peak['off']:+.1%})"
    void = f", void: canary moved {run['canary_moved']:.0%}" if run["void"] else ""
    return f"{run['kind']}: {buckets}; peak {size}{void}"


if __name__ == "__main__":
    main()

"""Everything about one card in one command, for a bare machine without a network: right first, then fast.

    python bench/card.py --minutes 9 --out DIR                      the first card
    python bench/card.py --out DIR --device cpu --sizes tiny        does the tool run?

Carried along: this repository and a Python with torch, transformers, peft and safetensors (and TRL, made beforehand by
`bench/train_step.py` on a machine with a network). Models have true shapes and random weights, rows are random. Each
part is a process of its own; what it prints is in DIR at once, so the results are valid when the whole is cut off at
any moment. Nothing of this was run on a card yet. SIZE.txt says in the column "times ours" which is faster: kernels of
torch.compile or plain torch, fused attention or plain products.

    doctor.json      facts and findings                 correct.json     loss and gradients against float64 on the CPU
    SIZE.json        steps of ours and of the peers     summary.json     how each part ended
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES = ("0.5b", "1.5b", "3b", "7b")
ROWS = "hivetune,plain torch,eager attention,TRL best effort,TRL defaults"
# A part with less time than this is not begun: loading torch takes most of it.
LEAST_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--rows", default=ROWS, help="rows of bench/train_step.py")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * arguments.minutes
    here = ["--device", arguments.device]
    parts = {
        "doctor": ["-m", "hivetune", "doctor", "--json"],
        "correct": [str(HERE / "correct.py"), *here],
        **{
            size: [str(HERE / "train_step.py"), *here, "--random", size, "--sets", "agents", "--rows", arguments.rows]
            for size in arguments.sizes
        },
    }
    summary: dict[str, Any] = {}
    for name, command in parts.items():
        if name in arguments.sizes:
            command = [*command, "--out", str(out / f"{name}.json")]
        summary[name] = run_part(name, command, out, until - time.monotonic())
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(f"{name}: {summary[name]}", flush=True)


def run_part(name: str, command: list[str], out: Path, left_s: float) -> dict[str, Any]:
    """Run a part in a process of its own; return how it ended and after how many seconds."""
    if left_s < LEAST_S:
        return {"status": "not begun"}
    started = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]),
        "HIVETUNE_HOME": str(out / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    printed = out / (f"{name}.txt" if (out / f"{name}.json").exists() or "--out" in command else f"{name}.json")
    with open(printed, "wb") as stdout, open(out / f"{name}.log", "wb") as log:
        try:
            ended = subprocess.run(
                [sys.executable, *command], stdout=stdout, stderr=log, env=environment, timeout=left_s, check=False
            )
            status = "done" if ended.returncode == 0 else f"ended with {ended.returncode}, see {name}.log"
        except subprocess.TimeoutExpired:
            status = "cut off"
    return {"status": status, "seconds": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    main()

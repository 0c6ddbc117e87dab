"""Everything about one card in one command, for a bare machine without a network: right first, then fast.

    python bench/card.py --out DIR                                  the first card
    python bench/card.py --out DIR --device cpu --sizes tiny        does the tool run?

Carried along: this repository and a Python with torch, transformers, peft and safetensors (and TRL, made beforehand by
`bench/train_step.py` on a machine with a network). Models have true shapes and random weights, rows are random. Each
part is a process of its own, which writes its results into DIR when it ends: those stay when the whole is cut off.
Nothing of this was run on a card yet. SIZE.txt says in the column "times ours" which is faster: kernels of
torch.compile or plain torch, fused attention or plain products.

    doctor.json      facts and findings                 correct.json     loss and gradients against float64 on the CPU
    SIZE.json        steps of ours and of the peers     NAME.log         what a part said on standard error
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROWS = "hivetune,plain torch,eager attention,TRL best effort,TRL defaults"  # of bench/train_step.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sizes", nargs="*", default=["0.5b", "1.5b", "3b", "7b"])
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    step = [str(HERE / "train_step.py"), "--device", arguments.device, "--sets", "agents", "--rows", ROWS]
    parts = {
        "doctor.json": ["-m", "hivetune", "doctor", "--json"],
        "correct.json": [str(HERE / "correct.py"), "--device", arguments.device],
        **{f"{size}.txt": [*step, "--random", size, "--out", str(out / f"{size}.json")] for size in arguments.sizes},
    }
    paths = {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]), "HIVETUNE_HOME": str(out / "home")}
    for name, command in parts.items():
        with open(out / name, "wb") as stdout, open(out / f"{Path(name).stem}.log", "wb") as log:
            environment = {**os.environ, **paths, "HF_HUB_OFFLINE": "1"}
            line = [sys.executable, *command]
            ended = subprocess.run(line, stdout=stdout, stderr=log, env=environment, check=False)
        print(f"{name}: ended with {ended.returncode}", flush=True)


if __name__ == "__main__":
    main()

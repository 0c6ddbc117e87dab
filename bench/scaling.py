"""How our step scales: rows in a step, rank, length, and how much it varies. What a user needs to choose settings.

python bench/scaling.py --out docs/proof/scaling_cpu.json        about 3 minutes on 2 cores
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hivetune.process.launch import ENVIRONMENT
from hivetune.run.choices import Choices

os.environ.update(ENVIRONMENT)  # as a run has it; torch's OpenMP reads it when it is loaded

import torch
from train_step import MODEL, prepared_model

from hivetune.config import LoraConfig
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.train.worker.device import complete, peak_memory_bytes, start_with
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel
from hivetune.train.worker.optimizer import AdamW

ROWS = (1, 2, 4, 8, 16, 32)
RANKS = (4, 8, 16, 32, 64)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TOKENS, RANK, BATCH = 128, 8, 8
ROUNDS, REPEATS = 3, 12
TRAINED_SHARE = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file")
    arguments = parser.parse_args()
    settled = complete("cpu", "auto", Choices())
    folder, (_, dtype) = prepared_model(), start_with(settled)
    started = time.perf_counter()
    cases: list[dict[str, Any]] = []
    for rank in RANKS:
        lora = LoraConfig(r=rank, alpha=2 * rank)
        model = load_model(folder, lora, method="lora", dtype=dtype, device=torch.device("cpu"))
        cases.append({"vary": "rank", "rank": rank, **measure(model, BATCH, TOKENS, ROUNDS)})
        if rank == RANK:
            cases += [{"vary": "rows", "rows": rows, **measure(model, rows, TOKENS, ROUNDS)} for rows in ROWS]
            cases += [{"vary": "length", "length": n, **measure(model, 1, n, 2)} for n in LENGTHS]
            cases.append({"vary": "nothing", **measure(model, BATCH, TOKENS, REPEATS)})
        del model
    document = {
        "schema": 1,
        "command": " ".join(["python", "bench/scaling.py", *sys.argv[1:]]),
        "model": MODEL,
        "dtype": settled.dtype,
        "machine": describe_machine(read_machine()),
        "seconds": round(time.perf_counter() - started, 1),
        "cases": cases,
    }
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")
    print("| what | s/step | tokens/s | spread |\n| --- | ---: | ---: | ---: |")
    for case in cases:
        what = f"{case['vary']} {case.get(case['vary'], '')}"
        print(f"| {what} | {case['step_s']:.2f} | {case['tokens_per_s']:,.0f} | {100 * case['spread']:.0f} % |")


def measure(model: LoraModel, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Median seconds of a step on `rows` rows of `tokens` tokens that share nothing, after one that warms up."""
    generator = torch.Generator().manual_seed(rows * 10_000 + tokens)
    trained_L = torch.arange(tokens) >= round(tokens * (1 - TRAINED_SHARE))
    documents = [
        Document(row, torch.randint(3, 40_000, (tokens,), generator=generator), trained_L) for row in range(rows)
    ]
    optimizer = AdamW(model.master_N, weight_decay=0.0, kernels=model.kernels)
    seconds = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        model.grad_N.zero_()
        model.backward(documents, 1 / (rows * tokens * TRAINED_SHARE))
        optimizer.update(model.grad_N, rate=0.0, number=number + 1)
        seconds.append(time.perf_counter() - started)
    step_s = statistics.median(seconds[1:])
    return {
        "step_s": step_s,
        "first_s": seconds[0],
        "tokens_per_s": rows * tokens / step_s,
        "spread": (max(seconds[1:]) - min(seconds[1:])) / step_s,
        "peak_bytes": peak_memory_bytes(torch.device("cpu")),
    }


if __name__ == "__main__":
    main()

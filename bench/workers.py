"""What a second worker is worth on two cores: the same packs, computed in turns by different crews, step by step.

Two processes of one thread against one process of two threads, and a second worker at a third of the speed against what
can be had with whole packs. The turns alternate, so that a slow minute of the machine hits all; what is said are
medians over the rounds. All sums have to be the same bits: the packs of one thread, whoever computes them.

    python bench/workers.py --out docs/proof/workers_cpu.json        about 4 minutes on 2 quiet cores
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivetune.process.launch import ENVIRONMENT
from hivetune.run.choices import Choices

os.environ.update(ENVIRONMENT)  # as a run has it; torch's OpenMP reads it when it is loaded

import torch
from slow_worker import TIMES_AS_SLOW
from train_step import MODEL, prepared_model

from hivetune.base.journal import Journal
from hivetune.base.typed import to_plain
from hivetune.config import LoraConfig
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.process.parent import FixedLimits
from hivetune.train.plan.layout import pack_tokens
from hivetune.train.supervise.workers import Workers
from hivetune.train.worker.device import complete, start_with
from hivetune.train.worker.exchange.exchange import Crew, LocalCrew, Packs
from hivetune.train.worker.exchange.group import GroupCrew, open_store
from hivetune.train.worker.exchange.trust import OWN, hello
from hivetune.train.worker.model.adapter import begin
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel
from hivetune.train.worker.optimizer import AdamW

ROWS, TOKENS, RANK, ROUNDS = 32, 128, 8, 6
TRAINED_SHARE = 0.5
SLOW = str(Path(__file__).with_name("slow_worker.py"))
LOAD_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    folder, started = prepared_model(), time.perf_counter()
    aim = pack_tokens(ROWS * TOKENS, ROWS, ROWS, "cpu")
    choices = replace(complete("cpu", "auto", Choices(threads=1)), pack_tokens=aim)
    _, dtype = start_with(choices)
    lora = LoraConfig(r=RANK, alpha=2 * RANK)
    model = load_model(folder, lora, method="lora", dtype=dtype, device=torch.device("cpu"), choices=choices)
    begin(model.adapter, lora, 1)
    step = Step(model)
    with beside(folder, model, lora, choices) as fast, beside(folder, model, lora, choices, SLOW) as slow:
        alone = LocalCrew(model)
        turns: dict[str, tuple[Crew, int]] = {
            "one process of two threads": (alone, 2),
            "two processes of one thread": (fast, 1),
            "one process of one thread": (alone, 1),
            "and a worker at a third of the speed": (slow, 1),
        }
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(arguments.rounds + 1):
            for name, (crew, threads) in turns.items():
                taken = step.take(crew, threads)
                if number:  # the first warms up, and teaches the workers' paces
                    seconds[name].append(taken)
    document = report(seconds, len(model.micro_batches(step.documents)))
    document |= {
        "schema": 1,
        "command": " ".join(["python", "bench/workers.py", *sys.argv[1:]]),
        "model": MODEL,
        "dtype": choices.dtype,
        "rows": ROWS,
        "tokens": ROWS * TOKENS,
        "sums of one thread with equal bits": len(step.sums) == 1,
        "machine": describe_machine(read_machine()),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")
    for name, value in document.items():
        if name != "machine":
            print(f"{name}: {value}")


class Step:
    """A step on rows that share nothing, half of whose tokens are trained. `sums`: of the steps with one thread."""

    def __init__(self, model: LoraModel):
        generator = torch.Generator().manual_seed(ROWS)
        trained_L = torch.arange(TOKENS) >= round(TOKENS * (1 - TRAINED_SHARE))
        self.documents = [
            Document(row, torch.randint(3, 40_000, (TOKENS,), generator=generator), trained_L) for row in range(ROWS)
        ]
        self.sums: set[bytes] = set()
        self._model, self._optimizer, self._number = model, AdamW(model.master_N, weight_decay=0.0), 0

    def take(self, crew: Crew, threads: int) -> float:
        """Seconds. The rate is 0, so that every step is the same."""
        torch.set_num_threads(threads)
        self._number += 1
        started = time.perf_counter()
        scale = 1 / (ROWS * TOKENS * TRAINED_SHARE)
        Packs(self._model, 0, crew).backward(self.documents, 0, scale=scale, exponent=0)
        self._optimizer.update(self._model.grad_N, rate=0.0, number=self._number)
        taken = time.perf_counter() - started
        if threads == 1:
            self.sums.add(self._model.grad_N.numpy().tobytes())
        return taken


@contextmanager
def beside(
    folder: Path, model: LoraModel, lora: LoraConfig, choices: Choices, module: str | None = None
) -> Iterator[GroupCrew]:
    """This process with one worker beside it, which is there."""
    joined: list[str] = []
    with tempfile.TemporaryDirectory() as run:
        events = Journal(Path(run) / "events.jsonl")
        workers = Workers(Path(run), folder, ("cpu",), events, environment={}, limits=FixedLimits, module=module)
        crew = GroupCrew(
            model,
            open_store(workers.meeting),
            local=True,
            mine=hello(OWN, folder, model),
            welcome={
                "lora": lora.model_dump(mode="json"),
                "method": "lora",
                "memory_share": 0.9,
                "choices": to_plain(choices),
            },
            tell=lambda event, fields: joined.append(event),
        )
        with workers:
            workers.tend()
            _wait(lambda: (crew.run([], 0, torch.zeros(0, dtype=torch.int64)), "worker_joined" in joined)[1])
            yield crew
            crew.close()


def _wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LOAD_S
    while not true():
        if time.monotonic() > deadline:
            sys.exit(f"the worker did not join in {LOAD_S:.0f} s")
        time.sleep(0.1)


def report(seconds: dict[str, list[float]], packs: int) -> dict[str, Any]:
    """Medians; ratios are medians over the rounds, as in bench/train_step.py."""
    two, pair, one, slow = seconds.values()
    # Of a worker at a third of the speed: as many of the packs as it finishes while the other computes the rest.
    share = min(max(packs - few, TIMES_AS_SLOW * few) for few in range(packs + 1)) / packs
    return {
        "packs": packs,
        "step_s": {name: round(statistics.median(each), 3) for name, each in seconds.items()},
        "all_s": {name: [round(value, 3) for value in each] for name, each in seconds.items()},
        "two processes as fast as one of two threads, times": _ratio(two, pair),
        "as long as the ideal, with a worker at a third of the speed, times": _ratio(slow, [share * s for s in one]),
        "as long as the ideal if packs could be divided, times": _ratio(
            slow, [s / (1 + 1 / TIMES_AS_SLOW) for s in one]
        ),
    }


def _ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


if __name__ == "__main__":
    main()

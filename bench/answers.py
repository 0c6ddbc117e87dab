"""Tokens/s of llama.cpp on this machine's cores: by slots, and with threads that spin at a barrier or sleep; with an
adapter beside the model; and of the engine's own way, which `hivetune eval` takes where llama.cpp can't serve a model.

    python bench/answers.py MODEL.gguf [--rounds 3] [--new-tokens 64] [--slots 1,8]    about two minutes on two cores
    python bench/answers.py MODEL.gguf --adapter ADAPTER.gguf --engine MODEL_FOLDER --slots 8

Greedy answers of equal length. A round asks each way once, so that a slow second of the machine hits all; the medians
are printed, as one JSON document. The reason for `_spins` in llama/backend.py. Needs `hivetune[serve]`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.process.launch import child_environment

SPINS = {"sleep": "0", "spin": "50000"}  # what GOMP_SPINCOUNT is set to
ASKED = "Count from {} upwards, one number after the other, and never stop."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--slots", default="1,8")
    parser.add_argument("--adapter", type=Path, help="a GGUF adapter of the model")
    parser.add_argument("--engine", type=Path, help="the prepared folder of the same model")
    parser.add_argument("--own-way", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.own_way:
        print(engine_rate(asked.model, asked.engine, int(asked.slots), asked.new_tokens))
        return
    rates: dict[str, list[float]] = {}
    load = os.getloadavg()[0]
    for _ in range(asked.rounds):
        for slots in map(int, asked.slots.split(",")):
            for name, spins in SPINS.items():
                os.environ["GOMP_SPINCOUNT"] = spins
                rates.setdefault(f"{slots} slots, {name}", []).append(rate(asked.model, slots, asked.new_tokens))
            if asked.adapter:
                beside = rate(asked.model, slots, asked.new_tokens, ((asked.adapter, 1.0),))
                rates.setdefault(f"{slots} slots, spin, adapter", []).append(beside)
            if asked.engine:
                command = [sys.executable, __file__, str(asked.model), "--engine", str(asked.engine), "--own-way"]
                sizes = ["--slots", str(slots), "--new-tokens", str(asked.new_tokens)]
                # Each in a process of its own, with the variables that a child of ours has.
                told = subprocess.run([*command, *sizes], env=child_environment({}), capture_output=True, check=True)
                rates.setdefault(f"{slots} slots, engine", []).append(float(told.stdout.split()[-1]))
    found = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    print(json.dumps({"tokens_per_s": found, "rounds": asked.rounds, "cores": os.cpu_count(), "load_before": load}))


def rate(model: Path, slots: int, new_tokens: int, adapters: tuple[tuple[Path, float], ...] = ()) -> float:
    """Tokens/s of twice as many answers as there are slots."""
    settings = ServerSettings(adapters, slots=slots, context_tokens=512, device="cpu")
    with open_backend(model, settings) as backend, ThreadPoolExecutor(slots) as pool:
        chats = chats_of(slots)
        started = time.monotonic()
        answers = list(pool.map(lambda chat: backend.complete(chat, max_tokens=new_tokens), chats))
        return sum(answer.new_tokens for answer in answers) / (time.monotonic() - started)


def engine_rate(model: Path, folder: Path, slots: int, new_tokens: int) -> float:
    """The same by transformers and the engine's slots, in bfloat16. The first answer of each is not timed."""
    import torch

    from hivetune.judge.worker.answers import answer_prompts, settle_module
    from hivetune.train.worker.device import default_threads
    from hivetune.train.worker.model.general import load_module

    with open_backend(model, ServerSettings(context_tokens=512, device="cpu")) as backend:
        prompts = [backend.prompt_ids(chat) for chat in chats_of(slots)]
    torch.set_num_threads(default_threads())
    module = load_module(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    cached = settle_module(module, prompts)
    finished = []
    ask = {"ends": (), "slots": slots, "cached": cached, "on_answer": finished.append}
    answer_prompts(module, prompts[:slots], new_tokens=2, **ask)
    finished.clear()
    started = time.monotonic()
    answer_prompts(module, prompts, new_tokens=new_tokens, **ask)
    return sum(len(answer.tokens) for answer in finished) / (time.monotonic() - started)


def chats_of(slots: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": ASKED.format(number)}] for number in range(2 * slots)]


if __name__ == "__main__":
    main()

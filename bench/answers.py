"""Tokens/s of llama.cpp on this machine's cores: by slots, and with threads that spin at a barrier or sleep.

    python bench/answers.py MODEL.gguf [--rounds 3] [--new-tokens 64] [--slots 1,8]    about two minutes on two cores

Greedy answers of equal length. A round asks each way once, so that a slow second of the machine hits all; the medians
are printed, as one JSON document. The reason for `_spins` in serve/llama/backend.py. Needs `hivetune[serve]`.
"""

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hivetune.serve.llama.backend import ServerSettings, open_backend

SPINS = {"sleep": "0", "spin": "50000"}  # what GOMP_SPINCOUNT is set to
ASKED = "Count from {} upwards, one number after the other, and never stop."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--slots", default="1,8")
    asked = parser.parse_args()
    rates: dict[str, list[float]] = {}
    load = os.getloadavg()[0]
    for _ in range(asked.rounds):
        for slots in map(int, asked.slots.split(",")):
            for name, spins in SPINS.items():
                os.environ["GOMP_SPINCOUNT"] = spins
                rates.setdefault(f"{slots} slots, {name}", []).append(rate(asked.model, slots, asked.new_tokens))
    found = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    print(json.dumps({"tokens_per_s": found, "rounds": asked.rounds, "cores": os.cpu_count(), "load_before": load}))


def rate(model: Path, slots: int, new_tokens: int) -> float:
    """Tokens/s of twice as many answers as there are slots."""
    with (
        open_backend(model, ServerSettings(slots=slots, context_tokens=512, device="cpu")) as backend,
        ThreadPoolExecutor(slots) as pool,
    ):
        chats = [[{"role": "user", "content": ASKED.format(number)}] for number in range(2 * slots)]
        started = time.monotonic()
        answers = list(pool.map(lambda chat: backend.complete(chat, max_tokens=new_tokens), chats))
        return sum(answer.new_tokens for answer in answers) / (time.monotonic() - started)


if __name__ == "__main__":
    main()

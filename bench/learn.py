"""Stage 2's step against the ordinary one, on SmolLM2-135M: what bad answers cost, and what a pair saves.

    python bench/learn.py --out docs/proof/bench_learn.json      two to five minutes on two cores

Four measurements of one process take turns, so that a slow second of the machine hits all; medians of their ratios in a
round are reported. `judged`: 8 good and 4 bad rows with the loss of stage 2; `plain`: the same 12 rows as good ones.
`pairs`: 4 pairs behind prompts of 300 tokens; `apart`: the same 8 rows without the prompt that two of them share.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step.rows import write_rows

from hivetune.config import LoraConfig
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.models.prepared import find_prepared
from hivetune.run.choices import Choices
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.protocol import Bad, Document

LORA, BETA, WEIGHT = LoraConfig(r=16, alpha=32), 5.0, 0.3
PROMPT_TOKENS, ANSWER_TOKENS, PAIRS = 300, 40, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most-seconds", type=float, default=240.0)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    prepared = find_prepared("smollm2-135m")
    if prepared is None:
        raise SystemExit("smollm2-135m is not prepared: hivetune fetch smollm2-135m")
    dtype = getattr(torch, asked.dtype)

    def load(**choices: Any) -> FastModel:
        made = Choices(budget_tokens=2048, **choices)
        return FastModel(prepared.folder, LORA, dtype=dtype, device=torch.device("cpu"), choices=made)

    shared, apart = load(), load(share_prefixes=False)
    rows = documents(prepared.folder)
    judged = [row._replace(bad=Bad(WEIGHT)) if n >= 8 else row for n, row in enumerate(rows[:12])]
    paired = pairs(rows)
    ways = {
        "plain": lambda: shared.backward(rows[:12], 1.0),
        "judged": lambda: shared.backward_judged(judged, 1.0, BETA),
        "apart": lambda: apart.backward_judged(paired, 1.0, BETA),
        "pairs": lambda: shared.backward_judged(paired, 1.0, BETA),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for number in range(asked.rounds + 1):
        if number > 1 and time.perf_counter() - began > asked.most_seconds:
            break
        for name, step in ways.items():
            started = time.perf_counter()
            float(step().sum())
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    speed = [plain / own for plain, own in zip(seconds["plain"], seconds["judged"], strict=True)]
    cost = [own / two for own, two in zip(seconds["pairs"], seconds["apart"], strict=True)]
    found = {
        "machine": describe_machine(read_machine()),
        "model": "smollm2-135m",
        "dtype": asked.dtype,
        "rounds": len(speed),
        "tokens": {"rows": sum(len(d.tokens_L) for d in rows[:12]), "pairs": sum(len(d.tokens_L) for d in paired)},
        "trained": {"rows": trained(rows[:12]), "pairs": trained(paired)},
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "judged_speed_of_plain": {"median": statistics.median(speed), "all": speed},
        "pair_cost_of_two_rows": {"median": statistics.median(cost), "all": cost},
    }
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


def documents(model: Path) -> list[Document]:
    """Chats of three agents, as bench/train_step.py has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        write_rows(path, model / "tokenizer.json", 4)
        steps = json.loads(path.read_text())["sets"]["agents"]["steps"]
    rows = [row for step in steps for row in step]
    return [
        Document(number, torch.tensor(row["tokens"]), torch.tensor(row["trained"], dtype=torch.bool))
        for number, row in enumerate(rows)
    ]


def pairs(rows: list[Document]) -> list[Document]:
    """Good and bad answers behind long prompts: tokens of the rows above, cut to size."""
    stream = torch.cat([row.tokens_L for row in rows])
    size, found = PROMPT_TOKENS + 2 * ANSWER_TOKENS, []
    for number in range(PAIRS):
        part = stream[number * size :][:size]
        prompt, good, bad = part.split([PROMPT_TOKENS, ANSWER_TOKENS, ANSWER_TOKENS])
        mask = torch.arange(PROMPT_TOKENS + ANSWER_TOKENS) >= PROMPT_TOKENS
        found.append(Document(2 * number, torch.cat([prompt, good]), mask))
        found.append(Document(2 * number + 1, torch.cat([prompt, bad]), mask, Bad(WEIGHT, 2 * number)))
    return found


def trained(rows: list[Document]) -> int:
    return sum(int(row.trained_L.sum()) for row in rows)


if __name__ == "__main__":
    main()

"""A step on a mixture of experts (the Qwen 3 MoE shape, random weights): fast path, general path, and the limit.

The limit is only the matrix products of the frozen weights, forward and input gradient, over the same tokens: of each
expert as many rows as it gets on average. All take turns, step by step, so that a slow minute hits all of them; what is
said of two are medians over the rounds of their ratio in that round, with the quartiles.

    python bench/moe_step.py --out moe_step.json                     about two minutes on 2 cores
    python bench/moe_step.py --rounds 2 --experts 8 --layers 2       whether it works
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step.report import quartiles
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.train.worker.device import default_threads
from hivetune.train.worker.model.adapter import initialise
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.general import load_general
from hivetune.train.worker.model.protocol import Document

LORA = LoraConfig(r=8, alpha=16)
HIDDEN, HEADS, KEY_HEADS, HEAD, VOCABULARY, ACTIVE, WIDTH = 512, 8, 4, 64, 4096, 4, 256


def main() -> None:
    arguments = parse()
    torch.set_num_threads(default_threads())
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments.experts, arguments.layers)
        fast = FastModel(Path(folder), LORA, dtype=torch.float32, device=cpu)
        general = load_general(Path(folder), LORA, method="lora", dtype=torch.float32, device=cpu, why="asked")
    for model in (fast, general):
        initialise(model.adapter, 0)
    steps = [documents(number, arguments.documents) for number in range(arguments.rounds + 1)]
    seconds: dict[str, list[float]] = {"limit": [], "fast": [], "general": []}
    for number, step in enumerate(steps):
        tokens = sum(len(document.tokens_L) - 1 for document in step)
        turns: list[tuple[str, Callable[[], object]]] = [
            ("fast", lambda step=step: fast.backward(step, 1e-3)),
            ("general", lambda step=step: general.backward(step, 1e-3)),
            ("limit", products(tokens, arguments.experts, arguments.layers)),
        ]
        for name, work in turns[number % 3 :] + turns[: number % 3]:
            started = time.perf_counter()
            work()
            if number:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    report(seconds, arguments, sum(len(document.tokens_L) - 1 for document in steps[-1]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--documents", type=int, default=8)
    return parser.parse_args()


def write_model(folder: Path, experts: int, layers: int) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        num_experts=experts,
        num_experts_per_tok=ACTIVE,
        moe_intermediate_size=WIDTH,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def documents(seed: int, count: int) -> list[Document]:
    """Rows of 150 tokens, the last third of them trained."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(row, torch.randint(3, VOCABULARY, (150,), generator=generator), torch.arange(150) >= 100)
        for row in range(count)
    ]


def products(tokens: int, experts: int, layers: int) -> Callable[[], None]:
    """The products of a step, their inputs and results made before the clock runs."""
    queries, keys = HEADS * HEAD, KEY_HEADS * HEAD
    share = max(1, tokens * ACTIVE // experts)
    shapes = [(tokens, HIDDEN, queries + 2 * keys), (tokens, queries, HIDDEN)]
    shapes += [(share, HIDDEN, 2 * WIDTH), (share, WIDTH, HIDDEN)] * experts
    weights = [[torch.randn(outputs, inputs) for _, inputs, outputs in shapes] for _ in range(layers)]
    rows = {(count, width): torch.randn(count, width) for count, *both in shapes for width in both}
    results = {key: torch.empty(key) for key in rows}

    def run() -> None:
        for layer in weights:
            for (count, inputs, outputs), weight_OI in zip(shapes, layer, strict=True):
                torch.mm(rows[count, inputs], weight_OI.t(), out=results[count, outputs])
                torch.mm(rows[count, outputs], weight_OI, out=results[count, inputs])

    return run


def report(seconds: dict[str, list[float]], arguments: argparse.Namespace, tokens: int) -> None:
    def ratio(one: str, other: str) -> list[float]:
        pairs = zip(seconds[one], seconds[other], strict=True)
        return [round(value, 3) for value in quartiles([mine / theirs for mine, theirs in pairs])]

    found: dict[str, Any] = {
        "schema": 1,
        "machine": describe_machine(read_machine()),
        "date": time.strftime("%Y-%m-%d"),
        "model": {"experts": arguments.experts, "active": ACTIVE, "layers": arguments.layers, "hidden": HIDDEN},
        "tokens_a_step": tokens,
        "rounds": arguments.rounds,
        "seconds": {name: [round(value, 4) for value in quartiles(values)] for name, values in seconds.items()},
        "general_over_fast": ratio("general", "fast"),
        "fast_of_limit": ratio("limit", "fast"),
        "general_of_limit": ratio("limit", "general"),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

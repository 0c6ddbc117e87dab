"""Whether a device computes right: small random models of six families against float64 on the CPU.

    python bench/correct.py --device cuda:0

Prints one JSON document: for each family and precision the relative error of the whole adapter gradient, its worst
tensor and the loss. Exit code 1 when an error is above its bound.
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.worker.model.adapter import same_views
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3")
SIZES: dict[str, float] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "initializer_range": 0.1, "pad_token_id": 0}
# Of the whole gradient, relative. Correct backends reach a third of it or less.
BOUND = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.02}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtypes = ["float32", "bfloat16", *(["float16"] if device.type == "cuda" else [])]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            torch.manual_seed(1)
            model = Path(folder) / family
            config = AutoConfig.for_model(family, **SIZES)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
            truth, true_loss = gradients(model, torch.float64, torch.device("cpu"))
            for dtype, attention in itertools.product(dtypes, (None, "eager")):
                views, loss = gradients(model, getattr(torch, dtype), device, Choices(attention=attention))
                pairs = {name: (views[name], truth[name]) for name in truth}
                pairs["whole"] = torch.cat([*views.values()]), torch.cat([*truth.values()])
                each = {name: float((ours - true).norm() / true.norm()) for name, (ours, true) in pairs.items()}
                whole = each.pop("whole")
                worst = max(each, key=lambda name: each[name])
                found[f"{family} {dtype} {attention or 'default'}"] = {
                    "gradient": whole,
                    "right": whole <= BOUND[dtype],
                    "worst_tensor": [worst, each[worst]],
                    "loss": abs(loss / true_loss - 1),
                }
    document = {"schema": 1, "device": arguments.device, "torch": torch.__version__, "found": found}
    print(json.dumps(document, indent=1))
    sys.exit(0 if all(entry["right"] for entry in found.values()) else 1)


def documents() -> list[Document]:
    """Return eight rows of 35 to 49 random ids with a common prefix of 12; the last 20 of each are trained."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(5, 500, (12,), generator=generator)
    rows = []
    for number in range(8):
        tokens = torch.cat([common, torch.randint(5, 500, (23 + 2 * number,), generator=generator)])
        rows.append(Document(number, tokens, torch.arange(len(tokens)) >= len(tokens) - 20))
    return rows


def gradients(
    folder: Path, dtype: torch.dtype, device: torch.device, choices: Choices | None = None
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient of each adapter tensor, flat in float64 on the CPU, and the loss. No adapter is zero."""
    lora = LoraConfig(r=8, alpha=16)
    model = load_model(folder, lora, method="lora", dtype=dtype, device=device, choices=choices or Choices())
    generator = torch.Generator().manual_seed(2)
    for view in model.adapter.values():
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64) * 0.05)
    loss = float(model.backward(documents(), 1 / 100))
    views = same_views(model.grad_N, model.adapter)
    return {name: views[name].flatten().double().cpu() for name in sorted(views)}, loss


if __name__ == "__main__":
    main()

"""What a model says of given tokens: the log-probability of each, and the likeliest ones at its place.

The adapter beside the base, as it was trained, and the base alone. In float32 where the memory allows it, so that what
an export differs by is the export's (release/prove.py).

Shapes: L positions, P places, V vocabulary, K likeliest tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hivetune.machine.inventory import read_machine
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Passage, Tell
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.general import load_general, load_module

# Of the memory that is free, how much weights in float32 may take.
_SHARE_FOR_WEIGHTS = 0.5


def main(task: Tell, heartbeat: Heartbeat) -> dict[str, Any]:
    """{"dtype", "base" or "tuned" -> for each passage, for each of its places: [logprob, [[token, logprob], ...]]}."""
    heartbeat.beat(Beat.PREPARING)
    dtype, device = _dtype(task.model), torch.device("cpu")
    if task.adapter is None:
        module = load_module(task.model, dtype=dtype, device=device)
        return {"dtype": str(dtype), "base": tell_all(module, task.passages, task.top, heartbeat)}
    lora, tensors = read_adapter(task.adapter)
    model = load_general(task.model, lora, method="lora", dtype=dtype, device=device, why="")
    fill(model.adapter, tensors, str(task.adapter))
    tuned = tell_all(model.module, task.passages, task.top, heartbeat)
    model.switch.on = False
    base = tell_all(model.module, task.passages, task.top, heartbeat)
    return {"dtype": str(dtype), "base": base, "tuned": tuned}


@torch.no_grad()
def tell_all(module: nn.Module, passages: Sequence[Passage], top: int, heartbeat: Heartbeat) -> list[list[Any]]:
    found = []
    for passage in passages:
        tokens_1L = torch.tensor([passage.tokens])
        before_P = torch.tensor(passage.places) - 1  # position i predicts token i + 1
        logits_PV = module(input_ids=tokens_1L, use_cache=False).logits[0, before_P].float()
        scores_PV = torch.log_softmax(logits_PV, -1)
        told = scores_PV[torch.arange(len(before_P)), tokens_1L[0, before_P + 1]].tolist()
        likeliest = scores_PV.topk(min(top, scores_PV.shape[1]), dim=-1)
        tops = [
            [list(pair) for pair in zip(tokens, scores, strict=True)]
            for tokens, scores in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        ]
        found.append([list(each) for each in zip(told, tops, strict=True)])
        heartbeat.beat(Beat.ITEM)
    return found


def _dtype(model: Path) -> torch.dtype:
    weights_bytes = 2 * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    fits = weights_bytes <= _SHARE_FOR_WEIGHTS * read_machine().available_bytes
    return torch.float32 if fits else torch.bfloat16


if __name__ == "__main__":
    run_child(main, Tell)

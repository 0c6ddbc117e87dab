"""The training engine's log-probabilities of given tokens, and of the most likely tokens at the same positions.

They are computed with the adapter on its base, as in training, and with the base alone.

Shapes: L positions, P compared positions, V vocabulary, K most likely tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hivetune.machine.inventory import read_machine
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Passage, ScorePassages
from hivetune.release.gguf import weights_bytes
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.general import load_general, load_module

_SHARE_FOR_WEIGHTS = 0.5  # of the installed memory, for weights in float32


def main(task: ScorePassages, heartbeat: Heartbeat) -> dict[str, Any]:
    """Return a document with "dtype", and the `Scores` (release/prove.py) of "base", or of "tuned", or of both."""
    heartbeat.beat(Beat.PREPARING)
    # In float32 where the memory allows it, so that a difference is the export's (release/prove.py).
    fits = 2 * weights_bytes(task.model) <= _SHARE_FOR_WEIGHTS * read_machine().memory_bytes
    dtype, device = torch.float32 if fits else torch.bfloat16, torch.device("cpu")
    if task.adapter is None:
        module = load_module(task.model, dtype=dtype, device=device)
        return {"dtype": str(dtype), "base": score_all(module, task.passages, task.top, heartbeat)}
    lora, tensors = read_adapter(task.adapter)
    model = load_general(task.model, lora, method="lora", dtype=dtype, device=device, why="")
    fill(model.adapter, tensors, str(task.adapter))
    tuned = score_all(model.module, task.passages, task.top, heartbeat)
    model.adapter_state.on = False
    base = score_all(model.module, task.passages, task.top, heartbeat)
    return {"dtype": str(dtype), "base": base, "tuned": tuned}


@torch.no_grad()
def score_all(module: nn.Module, passages: Sequence[Passage], top: int, heartbeat: Heartbeat) -> list[list[Any]]:
    """Return [log-probability, [[token, log-probability], ...]] for each compared position of each passage."""
    scores: list[list[Any]] = []
    for passage in passages:
        tokens_1L = torch.tensor([passage.tokens])
        before_P = torch.tensor(passage.places) - 1  # position i predicts token i + 1
        scores_PV = torch.log_softmax(module(input_ids=tokens_1L, use_cache=False).logits[0, before_P].float(), -1)
        logprobs = scores_PV[torch.arange(len(before_P)), tokens_1L[0, before_P + 1]].tolist()
        likeliest = scores_PV.topk(min(top, scores_PV.shape[1]), dim=-1)
        tops = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        scores.append([[own, list(map(list, zip(*top, strict=True)))] for own, top in zip(logprobs, tops, strict=True)])
        heartbeat.beat(Beat.ITEM)
    return scores

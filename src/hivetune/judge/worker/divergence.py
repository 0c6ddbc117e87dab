"""How far training moved a model: the divergence of the tuned from the base model's next-token probabilities.

KL(tuned || base) on the rows' trained tokens predicts how much of its other abilities a model forgot, better than its
loss does (arXiv 2509.04259). It is reported, and decides nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat
from hivetune.train.worker.model.protocol import Document, LoraModel

# The mean over some thousand tokens is known to a few percent; logits of longer rows would take gigabytes.
MOST_ROWS, LONGEST_ROW = 32, 512


def divergence_from_base(
    model: LoraModel, documents: Sequence[Document], heartbeat: Heartbeat
) -> dict[str, Any] | None:
    """{"nats_per_token", "tokens", "rows"} over the trained tokens of at most MOST_ROWS documents; None where none
    of them can be used. `nats_per_token` is null when it is not finite."""
    short = [one for one in documents if len(one.tokens_L) <= LONGEST_ROW and bool(one.trained_L.any())]
    chosen = short[:: max(1, -(-len(short) // MOST_ROWS))]
    if not chosen:
        return None
    total, tokens = 0.0, 0
    for document in chosen:
        ids, position_M = document.tokens_L.tolist(), document.trained_L.nonzero()[:, 0] - 1
        tuned_MV, base_MV = (_logp(model, ids, position_M, adapter) for adapter in (True, False))
        total += float((tuned_MV.exp() * (tuned_MV - base_MV)).sum())
        tokens += len(position_M)
        heartbeat.beat(Beat.ITEM)
    mean = total / tokens
    return {
        "nats_per_token": mean if torch.isfinite(torch.tensor(mean)) else None,
        "tokens": tokens,
        "rows": len(chosen),
    }


def _logp(model: LoraModel, ids: Sequence[int], position_M: Tensor, adapter: bool) -> Tensor:
    """[M, V] in fp32, of what follows each position."""
    return torch.log_softmax(model.logits(ids, adapter=adapter)[position_M.to(model.device)].float(), -1)

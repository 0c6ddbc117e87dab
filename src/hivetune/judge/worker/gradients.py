"""Is there anything left to learn in a domain? The adapter's gradient on parts of its rows, part against part.

One pass over a few rows and no step: minutes where a training would take hours. What the products say is decided by
specialists/decide.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.judge.worker.score import choices_of
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Gradients
from hivetune.train.worker.device import complete, start_with
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel, read_documents


def main(task: Gradients, heartbeat: Heartbeat) -> dict[str, Any]:
    """Return `products`: for each domain the inner products [parts, parts] of the mean gradients per trained token, or
    null.
    """
    heartbeat.beat(Beat.PREPARING)
    choices = complete(task.device, task.dtype, choices_of(task.adapter))
    device, dtype = start_with(choices)
    snapshot = open_snapshot(task.snapshot)
    lora, tensors = read_adapter(task.adapter)
    settings = lora.model_copy(update={"dropout": 0.0})
    model = load_model(task.model, settings, method="lora", dtype=dtype, device=device, choices=choices)
    fill(model.adapter, tensors, str(task.adapter))
    products = {}
    for domain, parts in task.parts.items():
        means_PN = torch.stack([_mean_gradient(model, snapshot, rows, heartbeat) for rows in parts])
        products_PP = means_PN @ means_PN.T
        products[domain] = products_PP.tolist() if bool(products_PP.isfinite().all()) else None
    return {"products": products, "choices": choices.made()}


def _mean_gradient(model: LoraModel, snapshot: Snapshot, rows: Sequence[int], heartbeat: Heartbeat) -> Tensor:
    """Return the gradient per trained token of `rows`, [N] in float64 on the CPU."""
    documents = read_documents(snapshot, rows)
    tokens = sum(int(document.trained_L.sum()) for document in documents)
    model.grad_N.zero_()
    model.backward(documents, 1.0 / tokens)
    heartbeat.beat(Beat.ITEM)
    return model.grad_N.to("cpu", torch.float64, copy=True)


if __name__ == "__main__":
    run_child(main, Gradients)

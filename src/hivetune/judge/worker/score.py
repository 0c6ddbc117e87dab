"""The loss of base and tuned model on the same rows, computed with the adapter beside the base, as in training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivetune.base.journal import Journal
from hivetune.config import LoraConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.judge.losses import is_scored, side_name
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Score
from hivetune.run.choices import Choices
from hivetune.run.folder import CONFIG, read_resolved
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.fast.build import missing_kernels_reason
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import read_documents
from hivetune.train.worker.settle import apply_choices, complete

# Rows whose loss is computed together: enough for the engine to pack them well, few enough to beat often.
ROWS_TOGETHER = 32


def main(task: Score, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write a line {"model", "row", "nll", "tokens"} for each row and model; nll in nats, null if it is not finite.

    A model whose rows an earlier task scored is left out.
    """
    heartbeat.beat(Beat.PREPARING)
    choices = complete(task.device, task.dtype, choices_of(task.adapter))
    names = {adapter: side_name(adapter) for adapter in (None, task.adapter)}
    path = None
    if missing := [adapter for adapter, name in names.items() if not is_scored(task.scores, name, task.rows)]:
        device, dtype = apply_choices(choices)
        lora, tensors = (LoraConfig(r=1), None) if task.adapter is None else read_adapter(task.adapter)
        model = load_model(task.model, lora, method="lora", dtype=dtype, device=device, choices=choices)
        if tensors is not None:
            fill(model.adapter, tensors, str(task.adapter))
        path = model.path
        snapshot = open_snapshot(task.snapshot)
        with Journal(task.scores) as lines:
            for adapter in missing:
                for start in range(0, len(task.rows), ROWS_TOGETHER):
                    documents = read_documents(snapshot, task.rows[start : start + ROWS_TOGETHER])
                    sums = model.nll(documents, adapter=adapter is not None).tolist()
                    for document, nll in zip(documents, sums, strict=True):
                        tokens, finite = int(document.trained_L.sum()), nll if math.isfinite(nll) else None
                        lines.append("loss", model=names[adapter], row=document.row, nll=finite, tokens=tokens)
                        heartbeat.beat(Beat.ITEM)
    return {"path": path, "choices": choices.as_dict()}


def choices_of(adapter: Path | None) -> Choices:
    """Return the choices of the run that made the adapter."""
    # It is scored in the precision of its training: a base in another one would be better or worse by rounding. Without
    # its kernels the plain ones score; only a training must keep its kernels.
    if adapter is None or not (adapter / CONFIG).is_file():
        return Choices()
    choices = read_resolved(adapter)[1]
    return replace(choices, kernels="torch") if choices.kernels == "native" and missing_kernels_reason() else choices

"""The loss of several adapters, each on its rows: the base is loaded once, and the adapters take turns."""

import math
from typing import Any

from hivetune.base.journal import Journal
from hivetune.data.snapshot import open_snapshot
from hivetune.judge.worker.score import ROWS_TOGETHER, choices_of
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, ScoreAdapters
from hivetune.train.worker.device import complete, start_with
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel, read_documents


def main(task: ScoreAdapters, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write a line {"model", "row", "nll", "tokens"} for each adapter and row; nll in nats, null if not finite."""
    heartbeat.beat(Beat.PREPARING)
    choices = complete(task.device, task.dtype, choices_of(task.like))
    device, dtype = start_with(choices)
    snapshot = open_snapshot(task.snapshot)
    adapters = []
    for name, folder in task.adapters.items():
        lora, tensors = read_adapter(folder)
        adapters.append((lora.model_copy(update={"dropout": 0.0}), tensors, name))
    adapters.sort(key=lambda adapter: adapter[0].model_dump_json())  # one model holds all adapters of one shape
    shape = None
    model: LoraModel | None = None
    with Journal(task.scores) as lines:
        for lora, tensors, name in adapters:
            if model is None or lora != shape:
                model = None  # freed before the next one is loaded
                model = load_model(task.model, lora, method="lora", dtype=dtype, device=device, choices=choices)
                shape = lora
            fill(model.adapter, tensors, str(task.adapters[name]))
            rows = task.rows[name]
            for start in range(0, len(rows), ROWS_TOGETHER):
                documents = read_documents(snapshot, rows[start : start + ROWS_TOGETHER])
                for document, nll in zip(documents, model.nll(documents, adapter=True).tolist(), strict=True):
                    tokens = int(document.trained_L.sum())
                    finite = nll if math.isfinite(nll) else None
                    lines.append("loss", model=name, row=document.row, nll=finite, tokens=tokens)
                    heartbeat.beat(Beat.ITEM)
    return {"models": list(task.adapters), "choices": choices.made()}


if __name__ == "__main__":
    run_child(main, ScoreAdapters)

"""The throw-away child of an isolation: it replays rows of a run in order, so that its death names one.

Each finished item is one line of the task's journal, on its way to the disk before the next one begins.
"""

from typing import Any

from hivetune.base.journal import Journal
from hivetune.data.snapshot import open_snapshot
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Replay
from hivetune.run.folder import read_resolved
from hivetune.train.worker.checkpoint import load_newest_good
from hivetune.train.worker.device import complete, start_with, with_changes
from hivetune.train.worker.model.adapter import begin
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel, read_documents
from hivetune.train.worker.watch import is_finite_step, padded


def main(task: Replay, heartbeat: Heartbeat) -> dict[str, Any]:
    """Replay the items of `task` on the run's model: compute loss and gradient of each item alone.

    Wait for the device after each item, so that a fault belongs to one item.
    """
    heartbeat.beat(Beat.PREPARING)
    model, snapshot = load_as_saved(task), open_snapshot(task.snapshot)
    with Journal(task.journal) as journal:
        journal.append("ready")
        for item in task.items:
            documents = read_documents(snapshot, item.rows)
            if item.padded:
                documents = [padded(document) for document in documents]
            journal.append("item", finite=is_finite_step(model, documents))
            heartbeat.beat(Beat.ITEM)
    return {"items": len(task.items)}


def load_as_saved(task: Replay) -> LoraModel:
    """Return the run's model with the weights of its newest good checkpoint, or those of the start."""
    config, choices = read_resolved(task.run)
    choices = with_changes(config, complete(config.device, config.dtype, choices), task.changes)
    device, dtype = start_with(choices, config.memory_share)
    model = load_model(
        task.model,
        config.lora,
        method=config.method,
        dtype=dtype,
        device=device,
        choices=choices,
    )
    begin(model.adapter, config.lora, config.seed, task.model)
    state, _ = load_newest_good(task.run)
    if state is not None:
        for name, view in model.adapter.items():
            view.copy_(state.param[name])
    return model

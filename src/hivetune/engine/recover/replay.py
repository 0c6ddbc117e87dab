"""The throw-away child of isolation: replays rows of a run one after the other, so that its death names one of them.

Task: {"run", "model", "snapshot", "items": [{"rows": [..], "padded": bool}, ..], "choices": {..} over those of the
run}. Each finished item is one line of `items.jsonl`, on its way to the disk before the next one begins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hivetune.base.journal import Journal
from hivetune.data.snapshot import open_snapshot
from hivetune.engine.device import DTYPES, cap_memory, read_resolved, settle, with_changes
from hivetune.engine.model.adapter import initialise
from hivetune.engine.model.load import load_model
from hivetune.engine.model.protocol import LoraModel
from hivetune.engine.train.checkpoint import load_newest_good
from hivetune.engine.train.feed import read_documents
from hivetune.engine.train.watch import is_finite_step, padded
from hivetune.process.child import Heartbeat, Task, run_child

ITEMS = "items.jsonl"


def main(task: Task, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(b"k")
    return replay(task, heartbeat, load(task))


def load(task: Task) -> LoraModel:
    """The run's model with the weights of its newest good checkpoint, or those of the start."""
    run = Path(task["run"])
    config, choices = read_resolved(run)
    choices = with_changes(config, settle(run, config, choices, write=False), task.get("choices") or {})
    device = torch.device(choices["device"])
    cap_memory(device, config.supervise.memory_share)
    model = load_model(
        Path(task["model"]),
        config.lora,
        method=config.method,
        dtype=DTYPES[choices["dtype"]],
        device=device,
        choices=choices,
    )
    initialise(model.adapter, config.seed)
    state, _ = load_newest_good(run)
    if state is not None:
        for name, view in model.adapter.items():
            view.copy_(state.param[name])
    return model


def replay(task: Task, heartbeat: Heartbeat, model: LoraModel) -> dict[str, Any]:
    """Loss and gradient of each item alone. Waits for the device after each, so that a fault has its item's name."""
    snapshot = open_snapshot(Path(task["snapshot"]))
    finished = 0
    with Journal(task.folder / ITEMS) as journal:
        journal.append("ready")
        for item in task["items"]:
            finite = is_finite_step(model, _documents(snapshot, item))
            journal.append("item", finite=finite)
            finished += 1
            heartbeat.beat(b"t")
    return {"items": finished}


def _documents(snapshot: Any, item: Mapping[str, Any]) -> list[Any]:
    documents = read_documents(snapshot, item["rows"])
    return [padded(document) for document in documents] if item["padded"] else documents


if __name__ == "__main__":
    run_child(main)

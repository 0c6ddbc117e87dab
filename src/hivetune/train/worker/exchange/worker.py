"""A process that computes packs beside a run's own worker: started by the supervisor, or a rank of torchrun above 0.

It holds the base model and nothing that must survive: weights and tokens come with the work.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hivetune.process.child import Heartbeat, Ranks, run_child
from hivetune.process.protocol import Beat, ComputePacks, Train
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.worker.exchange.group import POLL_S, open_store, serve_group
from hivetune.train.worker.exchange.trust import hello
from hivetune.train.worker.model.load import load_welcomed


def main(task: ComputePacks, heartbeat: Heartbeat) -> dict[str, Any]:
    """Compute packs for the run of the supervisor that started this process."""
    changes = task.changes.over(Choices(device=task.device))
    return _serve(open_store(task.meeting), task.model, task.number, changes, heartbeat, local=True)


def serve_as_rank(task: Train, ranks: Ranks, heartbeat: Heartbeat) -> dict[str, Any]:
    """Serve as a rank of torchrun other than 0."""
    card = f"cuda:{ranks.local_rank}"
    return _serve(open_store(None), task.model, ranks.rank, NO_CHOICES, heartbeat, local=False, card=card)


def _serve(
    store: dist.Store,
    folder: Path,
    number: int,
    changes: Choices,
    heartbeat: Heartbeat,
    *,
    local: bool,
    card: str = "",
) -> dict[str, Any]:
    """Load the run's model and compute until the run ends. `card`: for a choice that names no card of its own."""
    while True:
        heartbeat.beat(Beat.PREPARING)
        if store.check(["welcome"]):  # the run's own worker has loaded
            break
        time.sleep(10 * POLL_S)
    welcome = json.loads(store.get("welcome"))
    if card and welcome["choices"]["device"] == "cuda":
        changes = replace(changes, device=card)
    model = load_welcomed(folder, welcome, changes)
    return {"computed": serve_group(model, store, hello(number, folder, model), heartbeat, local=local)}


if __name__ == "__main__":
    run_child(main, ComputePacks)

"""A process that computes packs beside a run's own worker on this machine. The supervisor starts and watches it.

It holds the base model and nothing that must survive: weights and tokens come with the work.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.typed import from_plain
from hivetune.config import LoraConfig
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, ComputePacks
from hivetune.run.choices import Choices
from hivetune.train.worker.device import cap_memory, start_with
from hivetune.train.worker.exchange.group import POLL_S, open_store, serve_group
from hivetune.train.worker.exchange.trust import class_of, hello
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel


def main(task: ComputePacks, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    store = open_store(task.meeting)
    while not store.check(["welcome"]):  # the run's own worker still loads
        heartbeat.beat(Beat.PREPARING)
        time.sleep(10 * POLL_S)
    welcome = json.loads(store.get("welcome"))
    model = load_welcomed(task.model, welcome, task.changes.over(Choices(device=task.device)))
    said = {**hello(task.number, task.model), "class": class_of(model)}
    return {"computed": serve_group(model, store, said, heartbeat, local=True)}


def load_welcomed(folder: Path, welcome: Mapping[str, Any], changes: Choices) -> LoraModel:
    """Return the same model as the run's process has, with this worker's own device and `changes`."""
    choices = changes.over(from_plain(Choices, welcome["choices"]))
    device, dtype = start_with(choices)
    cap_memory(device, welcome["memory_share"])
    lora = LoraConfig(**welcome["lora"])
    return load_model(folder, lora, method=welcome["method"], dtype=dtype, device=device, choices=choices)


if __name__ == "__main__":
    run_child(main, ComputePacks)

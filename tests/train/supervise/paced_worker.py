"""The real worker and the real workers beside it, each pack as long as one of a real model on a card, until a test has
seen what it waits for and touches HURRY in their home."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from hivetune.base.disk import home
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import ComputePacks, Train
from hivetune.train.worker import loop, session
from hivetune.train.worker.exchange import cluster
from hivetune.train.worker.exchange import worker as beside
from hivetune.train.worker.exchange.actor import PackActor
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel

PACE_S = 0.2
HURRY = "hurry"


def pace() -> None:
    if not (home() / HURRY).exists():
        time.sleep(PACE_S)


class Paced:
    def __init__(self, model: LoraModel):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def backward_one(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        pace()
        return self._model.backward_one(documents, scale)


def paced_model(*arguments: Any, **named: Any) -> Any:
    return Paced(load_model(*arguments, **named))


class PacedActor(PackActor):
    def compute(self, *values: Any, **named: Any) -> Any:
        pace()
        return super().compute(*values, **named)


def main(task: Train | ComputePacks, heartbeat: Heartbeat) -> dict[str, Any]:
    cluster.PackActor = PacedActor  # type: ignore[misc]
    session.load_model = beside.load_model = paced_model  # type: ignore[attr-defined]
    return beside.main(task, heartbeat) if isinstance(task, ComputePacks) else loop.main(task, heartbeat)


if __name__ == "__main__":
    run_child(main, Train, ComputePacks)

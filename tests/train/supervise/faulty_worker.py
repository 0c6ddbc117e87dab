"""The real worker with one fault, named in RUN/fault.txt, which is removed when it happens.

canary   the test products come out wrong at the end of the run
diverge  the weights are a thousand times what they should be after step 40
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Train
from hivetune.train.worker import loop as train
from hivetune.train.worker import session
from hivetune.train.worker.check import CanaryFailed, check_products
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel
from hivetune.train.worker.session import AdamW

DIVERGE_AFTER = 40


class Diverging(AdamW):
    """Once wrong."""

    fault: Path

    def __init__(self, master_N: torch.Tensor, grad_N: torch.Tensor, *, weight_decay: float):
        super().__init__(master_N, grad_N, weight_decay=weight_decay)
        self._master_N = master_N

    def update(self, *, rate: float, number: int) -> None:
        super().update(rate=rate, number=number)
        if number == DIVERGE_AFTER + 1 and self.fault.exists():
            self.fault.unlink()
            self._master_N.mul_(1000)


class Loud:
    """Ten times the loss while the weights are absurd."""

    def __init__(self, model: LoraModel):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def backward(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        nll = self._model.backward(documents, scale)
        return nll * 10 if float(self._model.master_N.abs().max()) > 10 else nll


def main(task: Train, heartbeat: Heartbeat) -> dict[str, Any]:
    fault = task.run / "fault.txt"
    kind = fault.read_text() if fault.exists() else ""
    calls = 0

    def fail_the_second(model: LoraModel) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            fault.unlink()
            raise CanaryFailed("canary product m 8 n 412 k 896 in float32 on cpu: 3 of 8 rows are wrong")
        return check_products(model)

    if kind == "canary":
        session.check_products = fail_the_second  # type: ignore[attr-defined]
    if kind == "diverge":
        Diverging.fault = fault
        session.AdamW = Diverging  # type: ignore[attr-defined, misc]
        session.load_model = lambda *given, **named: Loud(load_model(*given, **named))  # type: ignore[attr-defined]
    return train.main(task, heartbeat)

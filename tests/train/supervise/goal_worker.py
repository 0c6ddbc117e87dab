"""The real worker with the real model, and what RUN/goal.json says: one row is not finite, one step meets hipBLASLt.

{"nan_row": row, "failing_row": row}: the gradient of the first is NaN whenever it is computed; a step with the second
dies once of a matrix library, in the words of a real card.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hivetune.base.disk import read_json
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Replay, Train
from hivetune.train.worker import loop as train
from hivetune.train.worker import recover, session
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel

HIPBLASLT = (
    "CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasLtMatmul` with transpose_mat1 1 transpose_mat2 0 "
    "m 8 n 412 k 896"
)


class Scripted:
    """A model with one poisoned row and one bad moment."""

    def __init__(self, model: LoraModel, run: Path):
        self._model, self._script, self._met = model, read_json(run / "goal.json"), run / "goal.met"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def backward(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        rows = {document.row for document in documents}
        if self._script["failing_row"] in rows and not self._met.exists():
            self._met.touch()
            raise RuntimeError(HIPBLASLT)
        nll = self._model.backward(documents, scale)
        if self._script["nan_row"] in rows:
            self._model.grad_N.fill_(torch.nan)
            return nll * torch.nan
        return nll


def main(task: Train | Replay, heartbeat: Heartbeat) -> dict[str, Any]:
    def scripted(*given: Any, **named: Any) -> Any:
        return Scripted(load_model(*given, **named), task.run)

    session.load_model = recover.load_model = scripted  # type: ignore[attr-defined]
    return recover.main(task, heartbeat) if isinstance(task, Replay) else train.main(task, heartbeat)

"""The real worker and replay child on a machine that fails. Other ranks are forks of the first one.

A row with the token KILL ends the process of whoever computes it, always. RUN/spoil.json adds
    {"nan_row": row}      its gradient is NaN whenever it is computed
    {"failing_row": row}  once, a step with it dies of a matrix library, in the words of a real card
    {"canary": true}      once, the test products at the end of the run come out wrong
    {"diverge": true}     once, the weights are a thousand times what they should be, after step 40
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hivetune.base.disk import read_json
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Replay, Train
from hivetune.train.worker import loop as train
from hivetune.train.worker import ranks, recover, session
from hivetune.train.worker.check import CanaryFailed, check_products
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel
from hivetune.train.worker.session import AdamW

KILL = 96
DIVERGE_AFTER = 40
HIPBLASLT = (
    "CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasLtMatmul` with transpose_mat1 1 transpose_mat2 0 "
    "m 8 n 412 k 896"
)


class Script:
    """What RUN/spoil.json says. What happens once leaves the file RUN/spoil.NAME."""

    def __init__(self, run: Path):
        self._run, path = run, run / "spoil.json"
        self._said = read_json(path) if path.exists() else {}

    def row(self, name: str) -> int | None:
        return self._said.get(name)

    def once(self, name: str) -> bool:
        met = self._run / f"spoil.{name}"
        if name not in self._said or met.exists():
            return False
        met.touch()
        return True


class Spoiled:
    """A model that fails in the middle of a backward pass. Its loss is ten times as high while weights are absurd."""

    def __init__(self, model: LoraModel, script: Script):
        self._model, self._script = model, script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def backward(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        self._die(documents)
        rows = {document.row for document in documents}
        if self._script.row("failing_row") in rows and self._script.once("failing_row"):
            raise RuntimeError(HIPBLASLT)
        nll = self._model.backward(documents, scale)
        if self._script.row("nan_row") in rows:
            self._model.grad_N.fill_(torch.nan)
            return nll * torch.nan
        loud = self._script.row("diverge") and float(self._model.master_N.abs().max()) > 10
        return nll * 10 if loud else nll

    def backward_one(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        self._die(documents)
        return self._model.backward_one(documents, scale)

    def _die(self, documents: Sequence[Document]) -> None:
        if any(bool((document.tokens_L == KILL).any()) for document in documents):
            os.abort()


class ForkedRank:
    """As `subprocess.Popen` of a rank, without importing torch again."""

    def __init__(self, command: Sequence[str]):
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            run_child(*command[-2:])

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class Started:
    """What ranks.py starts other ranks by."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(command: Sequence[str], stdin: int) -> ForkedRank:
        return ForkedRank(command)


def main(task: Train | Replay, heartbeat: Heartbeat) -> dict[str, Any]:
    script, tested = Script(task.run), 0

    def spoiled_model(*given: Any, **named: Any) -> Any:
        return Spoiled(load_model(*given, **named), script)

    def test_products(model: LoraModel) -> int:
        nonlocal tested
        tested += 1
        if tested == 2 and script.once("canary"):
            raise CanaryFailed("canary product m 8 n 412 k 896 in float32 on cpu: 3 of 8 rows are wrong")
        return check_products(model)

    class Diverging(AdamW):
        def __init__(self, master_N: torch.Tensor, grad_N: torch.Tensor, *, weight_decay: float):
            super().__init__(master_N, grad_N, weight_decay=weight_decay)
            self._master_N = master_N

        def update(self, *, rate: float, number: int) -> None:
            super().update(rate=rate, number=number)
            if number == DIVERGE_AFTER + 1 and script.once("diverge"):
                self._master_N.mul_(1000)

    session.load_model = recover.load_model = spoiled_model  # type: ignore[attr-defined]
    session.check_products, session.AdamW = test_products, Diverging  # type: ignore[attr-defined, misc]
    ranks.subprocess = Started  # type: ignore[attr-defined]
    return recover.main(task, heartbeat) if isinstance(task, Replay) else train.main(task, heartbeat)

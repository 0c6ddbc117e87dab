"""The real worker and replay child on a card that dies of every row with the token KILL. Other ranks are forks."""

import os
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Replay, Train
from hivetune.train.worker import loop as train
from hivetune.train.worker import ranks, recover, session
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel

KILL = 96


class Poisoned:
    """A model that ends the process in the middle of a backward pass."""

    def __init__(self, model: LoraModel):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def backward(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        if any(bool((document.tokens_L == KILL).any()) for document in documents):
            os.abort()
        return self._model.backward(documents, scale)

    def backward_one(self, documents: Sequence[Document], scale: float) -> torch.Tensor:
        if any(bool((document.tokens_L == KILL).any()) for document in documents):
            os.abort()
        return self._model.backward_one(documents, scale)


def poisoned_model(*arguments: Any, **named: Any) -> Any:
    return Poisoned(load_model(*arguments, **named))


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
    session.load_model = recover.load_model = poisoned_model  # type: ignore[attr-defined]
    ranks.subprocess = Started  # type: ignore[attr-defined]
    return recover.main(task, heartbeat) if isinstance(task, Replay) else train.main(task, heartbeat)

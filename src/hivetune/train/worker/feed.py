"""From rows of a snapshot to documents as tensors, the next step's while this one computes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from hivetune.train.worker.model.protocol import Document


class _Rows(Protocol):
    """What is needed of a snapshot (data/snapshot.py)."""

    def tokens(self, row: int) -> memoryview: ...
    def trained(self, row: int) -> memoryview: ...


def read_documents(snapshot: _Rows, rows: Sequence[int]) -> list[Document]:
    """Copies, so that nothing points into the file while a step runs."""
    documents = []
    for row in rows:
        tokens = torch.frombuffer(bytearray(snapshot.tokens(row).cast("B")), dtype=torch.int32)
        trained = torch.frombuffer(bytearray(snapshot.trained(row).cast("B")), dtype=torch.uint8)
        documents.append(Document(row, tokens.to(torch.int64), trained.bool()))
    return documents


class Feed:
    """`take(step)`, and the step after it is read meanwhile by a thread. Use as a context."""

    def __init__(self, read: Callable[[int], list[Document]], num_steps: int):
        self._read, self._num_steps = read, num_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[list[Document]]] = {}

    def take(self, step: int) -> list[Document]:
        future = self._ahead.pop(step, None) or self._thread.submit(self._read, step)
        self._ahead = {step + 1: self._thread.submit(self._read, step + 1)} if step + 1 < self._num_steps else {}
        return future.result()

    def forget(self) -> None:
        """The plan was amended: what was read ahead may be wrong."""
        self._ahead = {}

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

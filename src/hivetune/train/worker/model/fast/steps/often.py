"""A step in pieces that are replayed where they come often: its begin, each shape of a micro-batch, its end."""

from collections.abc import Callable, Hashable, Iterable

import torch

from hivetune.train.worker.model.fast.kernels.native import NativeOps
from hivetune.train.worker.model.fast.ops import Ops
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.steps.buckets import Uses
from hivetune.train.worker.model.fast.steps.graphs import Graphs
from hivetune.train.worker.model.fast.steps.tables import BatchTables
from hivetune.train.worker.model.fast.workspace import Workspace


def can_replay(spec: ModelSpec, ops: Ops, num_streamed: int) -> bool:
    """Not where the host has to know how many rows an expert gets, or which layer is brought next; not the kernels in
    C++, which read tables of their own."""
    return not isinstance(ops, NativeOps) and not num_streamed and not any(layer.experts for layer in spec.layers)


class Often:
    """The arithmetic is the same whether a piece is replayed or not, so resumed runs may count anew."""

    def __init__(self, device: torch.device, workspace: Workspace):
        self._device, self._uses, self._graphs = device, Uses(), Graphs(device, workspace)
        self._inputs: dict[Hashable, BatchTables] = {}

    def run(
        self,
        micro_batches: Iterable[BatchTables],
        *,
        begin: Callable[[], None],
        each: Callable[[BatchTables], None],
        end: Callable[[], None],
    ) -> None:
        """`micro_batches` on the host, one by one while the device computes the one before."""
        self.piece("begin", begin)
        for tables in micro_batches:
            shape = tables.shape
            if not self._uses.is_often(shape):
                each(tables.on(self._device))
                continue
            if shape not in self._inputs:
                self._inputs[shape] = tables.buffers(self._device)
            inputs = self._inputs[shape]
            inputs.read(tables)
            self._graphs.run(shape, lambda inputs=inputs: each(inputs))  # type: ignore[misc]
        self.piece("end", end)

    def piece(self, name: str, work: Callable[[], None]) -> None:
        """Work without tables."""
        if self._uses.is_often(name):
            self._graphs.run(name, work)
        else:
            work()

    @property
    def shapes(self) -> int:
        return len(self._inputs)

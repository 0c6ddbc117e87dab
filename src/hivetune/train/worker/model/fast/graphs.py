"""Replayed steps: a step's begin, each shape of a micro-batch and its end are recorded where they come often.

A graph holds addresses. So its inputs are written by copy into the same memory each time, its buffers are the
workspace's, and when one of those has moved it is recorded anew. On a processor there is nothing to record: the same
work is done on the same memory, which is how tests know what a card will do.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from hivetune.train.worker.model.fast.kernels.native import NativeOps
from hivetune.train.worker.model.fast.ops import TorchOps
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.tables import BatchTables, Uses
from hivetune.train.worker.model.memory import Workspace


@dataclass(frozen=True)
class _Recorded:
    replay: Callable[[], None]
    moves: int
    """Moves of the workspace's buffers when it was recorded."""


class Graphs:
    """Recorded work by name.

    `work` of `run` must have been done once without a graph, so that its buffers have their size and its kernels are
    chosen: neither may happen while it is recorded.
    """

    def __init__(self, device: torch.device, workspace: Workspace):
        self._device, self._workspace = device, workspace
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """Replay `work`, recorded first if need be.

        It allocates nothing that outlives it and asks the device for nothing.
        """
        recorded = self._recorded.get(name)
        if recorded is None or recorded.moves != self._workspace.moves:
            self._recorded.pop(name, None)
            recorded = _Recorded(self._record(work), self._workspace.moves)
            self._recorded[name] = recorded
        recorded.replay()

    @property
    def recorded(self) -> int:
        return len(self._recorded)

    def _record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`. All graphs take their temporaries from one pool: they run one after the other."""
        if self._device.type != "cuda":
            return work
        graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory for the next step meanwhile, which is nothing that this stream records.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()

        def replay() -> None:
            graph.replay()

        return replay


def can_replay(spec: ModelSpec, ops: TorchOps, num_streamed: int) -> bool:
    """Return whether steps can be replayed.

    Not where the host has to know how many rows an expert gets, or which layer is streamed next; and not the kernels in
    C++, which read tables of their own.
    """
    return not isinstance(ops, NativeOps) and not num_streamed and not any(layer.experts for layer in spec.layers)


class ReplayedStep:
    """A step whose pieces are replayed where they come often.

    The arithmetic is the same whether a piece is replayed or not, so resumed runs may count anew.
    """

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
        """Compute a step from `micro_batches` on the host, one by one while the device computes the one before."""
        self.piece("begin", begin)
        for tables in micro_batches:
            shape = tables.shape
            if not self._uses.is_frequent(shape):
                each(tables.on(self._device))
                continue
            if shape not in self._inputs:
                self._inputs[shape] = tables.buffers(self._device)
            inputs = self._inputs[shape]
            inputs.read(tables)
            self._graphs.run(shape, lambda inputs=inputs: each(inputs))  # type: ignore[misc]
        self.piece("end", end)

    def piece(self, name: str, work: Callable[[], None]) -> None:
        """Do or replay a piece of work without tables."""
        if self._uses.is_frequent(name):
            self._graphs.run(name, work)
        else:
            work()

    @property
    def shapes(self) -> int:
        return len(self._inputs)

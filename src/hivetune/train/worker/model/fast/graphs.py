"""Replayed steps: a step's begin, each shape of a micro-batch and its end are recorded where they come often.

A graph holds addresses. So its inputs are written by copy into the same memory each time, its buffers are the
workspace's, and when one of those has moved it is recorded again. On a processor there is nothing to record: the same
work is done on the same memory, which is how tests know what a card will do.
"""

from collections import Counter
from collections.abc import Callable, Hashable

import torch

from hivetune.train.worker.model.fast.kernels.native import NativeOps
from hivetune.train.worker.model.fast.ops import TorchOps
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.tables import BatchTables
from hivetune.train.worker.model.memory import Workspace

# A graph costs about as much as three steps without one: one to record it, two to make it ready. A shape that came
# three times pays for its graph if it comes three times more; without knowing the future no rule does better (ski
# rental).
USES_BEFORE = 3
# Each graph holds its tables, a few MB, and its nodes.
MAX_GRAPHS = 48


def can_replay(spec: ModelSpec, ops: TorchOps, num_streamed: int) -> bool:
    """Return whether steps can be replayed.

    Not where the host has to know how many rows an expert gets, or which layer is streamed next; and not the kernels in
    C++, which read tables of their own.
    """
    return not isinstance(ops, NativeOps) and not num_streamed and not any(layer.experts for layer in spec.layers)


class Replay:
    """Pieces of a step by name, which are recorded and replayed where they come often.

    A piece is done once or more without a graph, so that its buffers have their size and its kernels are chosen:
    neither may happen while it is recorded. The arithmetic is the same whether it is replayed or not, so resumed runs
    may count again.
    """

    def __init__(
        self,
        device: torch.device,
        workspace: Workspace,
        *,
        uses_before: int = USES_BEFORE,
        max_graphs: int = MAX_GRAPHS,
    ):
        self._device, self._workspace = device, workspace
        self.uses_before, self._max_graphs = uses_before, max_graphs
        self._uses: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, tuple[Callable[[], None], int]] = {}
        """Name -> the function that replays a piece, and `Workspace.moves` when it was recorded."""
        self._inputs: dict[Hashable, BatchTables] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def shapes(self) -> int:
        """Return how many shapes of micro-batches are replayed."""
        return len(self._inputs)

    def micro_batch(self, tables: BatchTables, work: Callable[[BatchTables], None]) -> None:
        """Do or replay `work` of a micro-batch, whose tables are on the host."""
        shape = tables.shape
        if not self._is_frequent(shape):
            work(tables.on(self._device))
            return
        if shape not in self._inputs:
            self._inputs[shape] = tables.buffers(self._device)
        inputs = self._inputs[shape]
        inputs.read(tables)
        self._play(shape, lambda: work(inputs))

    def piece(self, name: str, work: Callable[[], None]) -> None:
        """Do or replay `work`, which reads no tables."""
        if self._is_frequent(name):
            self._play(name, work)
        else:
            work()

    def _is_frequent(self, name: Hashable) -> bool:
        """Count one use, and return whether the piece is worth a graph and has room for one."""
        self._uses[name] += 1
        return name in self._recorded or (
            self._uses[name] > self.uses_before and len(self._recorded) < self._max_graphs
        )

    def _play(self, name: Hashable, work: Callable[[], None]) -> None:
        """Replay `work`, recorded first if need be.

        It allocates nothing that outlives it and asks the device for nothing.
        """
        if name in self._recorded and self._recorded[name][1] != self._workspace.moves:
            del self._recorded[name]
        if name not in self._recorded:
            self._recorded[name] = self._record(work), self._workspace.moves
        self._recorded[name][0]()

    def _record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`. All graphs take their temporaries from one pool: they run in order."""
        if self._device.type != "cuda":
            return work
        graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory for the next step meanwhile, which is nothing that this stream records.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

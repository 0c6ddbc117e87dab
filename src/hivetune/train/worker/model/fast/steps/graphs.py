"""Work of the device that is given out again and again as one: recorded once as a graph, then replayed.

A graph holds addresses. So its inputs are written by copy into the same memory each time, its buffers are the
workspace's, and when one of those has moved it is recorded anew. On a processor there is nothing to record: the same
work is done on the same memory, which is how tests know what a card will do.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from hivetune.train.worker.model.fast.workspace import Workspace


@dataclass(frozen=True)
class _Recorded:
    replay: Callable[[], None]
    moves: int
    """Of the workspace's buffers, when it was recorded."""


class Graphs:
    """`work` of `run` must have been done once without a graph, so that its buffers have their size and its kernels are
    chosen: neither may happen while it is recorded."""

    def __init__(self, device: torch.device, workspace: Workspace):
        self._device, self._workspace = device, workspace
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """`work`, which allocates nothing that outlives it and asks the device for nothing."""
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
        """All graphs take their temporaries from one pool: they run one after the other, and none outlives its own."""
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

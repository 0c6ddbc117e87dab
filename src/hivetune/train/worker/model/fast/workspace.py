"""Buffers by name that live as long as the model: what a step writes, the next one writes over.

Fresh pages cost as much as the work on them (a 4 MB buffer: 0.4 ms of page faults against 2.5 ms for its matrix
product, docs/log.md), and on a GPU fixed addresses are what graphs need.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hivetune.train.worker.model.memory import memory_for, poison, slack_values


class Workspace:
    def __init__(self, device: torch.device, forget: Callable[[], None] = lambda: None):
        """`forget`: called before a buffer gets another address; who knows the old one must not keep it."""
        self.device, self._forget = device, forget
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self.moves = 0
        """How often a buffer has got another address, or its first one."""

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """A view of the buffer `name`, grown if need be. What is in it is undefined."""
        view = self._views.get(name)  # mostly what it was the last time
        if view is not None and view.shape == shape and view.dtype == dtype:
            return poison(view)
        size = math.prod(shape) * dtype.itemsize
        needed = size + slack_values(shape, self.device) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < needed:
            self._buffers.pop(name, None)
            self._views.pop(name, None)
            del buffer, view
            self._forget()
            buffer = memory_for(needed, self.device)
            self._buffers[name] = buffer
            self.moves += 1
        view = self._views[name] = buffer[:size].view(dtype).view(shape)
        return poison(view)

    @property
    def size_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())


def to_device(there: Tensor, values: Sequence[float]) -> None:
    """Copy a few numbers to a buffer of the device; the host goes on meanwhile."""
    here = torch.tensor(values, dtype=there.dtype)
    there.copy_(here if there.device.type == "cpu" else here.pin_memory(), non_blocking=True)

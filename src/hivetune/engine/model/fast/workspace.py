"""Buffers by name that live as long as the model: what a step writes, the next one writes over.

Fresh pages cost as much as the work on them (a 4 MB buffer: 0.4 ms of page faults against 2.5 ms for its matrix
product, docs/log.md), and on a GPU fixed addresses are what graphs need.
"""

import math

import torch
from torch import Tensor


class Workspace:
    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """A view of the buffer `name`, grown if need be. What is in it is undefined."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers.pop(name, None)
            del buffer
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._buffers[name] = buffer
        return buffer[:size].view(dtype).view(shape)

    @property
    def size_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

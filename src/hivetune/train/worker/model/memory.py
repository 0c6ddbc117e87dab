"""Memory for operands of matrix products: its initial content, and the padding (slack) after it.

Some libraries read past operands. So some slices are copied, and on cards operands are padded.
"""

import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Inner values of a left factor that AMX multiplies at a time (two rows of 64 bytes in bfloat16). torch 2.13 reads past
# each row of a left factor that is a slice and multiplies what lies there by zero: NaN beside the slice becomes NaN in
# the result (oneDNN issue 5717).
INNER_BLOCK = 32
# Rows and columns of the widest tile that a card's library reads at a time. Kernels for Radeon cards of gfx12 read an
# operand that is 8 or 16 wide as if it were 64 wide, and fault where nothing is mapped after it
# (ROCm/rocm-libraries#11714).
TILE = 64
# Where operands have slack after them.
PADDED_DEVICES = frozenset({"cuda"})
# For developers: memory that was allocated and not written is NaN, so that reading it shows on any machine.
POISON_VARIABLE = "HIVETUNE_POISON"
POISONED = os.environ.get(POISON_VARIABLE) == "1"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of master weights, residual stream and reductions, where products are computed in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def uninitialized(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return memory to write to, as torch.empty; NaN with HIVETUNE_POISON=1."""
    return poison(torch.empty(shape, dtype=dtype, device=device))


def poison(memory: Tensor) -> Tensor:
    """Return `memory`, filled with NaN where HIVETUNE_POISON=1. Bytes become 255: NaN in each floating type."""
    if POISONED and memory.is_floating_point():
        memory.fill_(torch.nan)
    elif POISONED and memory.dtype == torch.uint8:
        memory.fill_(255)
    return memory


def memory_for(size_bytes: int, device: torch.device) -> Tensor:
    """Return uninitialized bytes; zeros where kernels may read beyond what will be written."""
    memory_n = allocate(size_bytes, device)
    if device.type in PADDED_DEVICES:
        memory_n.zero_()
    return poison(memory_n)


def allocate(size_bytes: int, device: torch.device) -> Tensor:
    """Return bytes on the device. A test replaces this function by one whose memory ends at an unmapped page."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def slack_values(shape: Sequence[int], device: torch.device) -> int:
    """Return the number of values to reserve after a matrix of this shape, up to the end of its last tiles."""
    if device.type not in PADDED_DEVICES:
        return 0
    row_values: int = math.prod(shape[1:])
    return -shape[0] % TILE * row_values + TILE


def padded_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an operand of zeros, with padding after it."""
    values = math.prod(shape)
    size = (values + slack_values(shape, device)) * dtype.itemsize
    return memory_for(size, device)[: values * dtype.itemsize].view(dtype).view(shape).zero_()


def left_factor(a_MK: Tensor) -> Tensor:
    """Return `a_MK`, or, for a slice whose rows end inside a block of AMX, a copy with zeros after each row."""
    rows, inner = a_MK.shape
    missing = -inner % INNER_BLOCK
    whole = a_MK.dtype.itemsize != 2 or not missing or a_MK.device.type != "cpu"
    if whole or a_MK.stride() in ((inner, 1), (1, rows)):
        return a_MK
    return F.pad(a_MK, (0, missing))[:, :inner]


# Multiplies a [M, K] by b [K, N] into the third argument; rows may be strided.
Multiply = Callable[[Tensor, Tensor, Tensor], None]


def mm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Compute out = a b, for factors that may be slices."""
    torch.mm(left_factor(a_MK), b_KN, out=out_MN)


class Workspace:
    """Buffers by name that live as long as the model. Each step overwrites the values of the previous one."""

    # Fresh pages cost as much as the work on them (a 4 MB buffer: 0.4 ms of page faults against 2.5 ms for its matrix
    # product, docs/log.md).

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a view of the buffer `name`, which grows if necessary. Its content is undefined."""
        view = self._views.get(name)  # mostly the same as last time
        if view is not None and view.shape == shape and view.dtype == dtype:
            return poison(view)
        size = math.prod(shape) * dtype.itemsize
        needed = size + slack_values(shape, self.device) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < needed:
            self._buffers.pop(name, None)
            self._views.pop(name, None)
            del buffer, view
            buffer = self._buffers[name] = memory_for(needed, self.device)
        view = self._views[name] = buffer[:size].view(dtype).view(shape)
        return poison(view)

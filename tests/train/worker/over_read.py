"""torch's product as processors with AMX compute it: past the end of each row of a left factor that is a slice.

torch 2.13 multiplies bfloat16 there in blocks of 32 inner values. The last block of a slice's row is read whole from
memory, and what lies behind the row is multiplied by zero (uxlfoundation/oneDNN#5717). So NaN and Inf there become NaN.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 32
_mm, _addmm, _bmm = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm
# Which argument is the left factor.
LEFT: dict[Any, int] = {
    _mm.default: 0,
    _mm.out: 0,
    _mm.dtype: 0,
    _mm.dtype_out: 0,
    _addmm.default: 1,
    _addmm.out: 1,
    torch.ops.aten.addmm_.default: 1,
    _bmm.default: 0,
    _bmm.out: 0,
}


def neighbours(a_MK: Tensor) -> Tensor | None:
    """What is read behind the rows of a left factor, added up for each row [M]; None where nothing is. Beyond the end
    of the memory that torch knows of lies NaN."""
    missing = -a_MK.shape[-1] % BLOCK
    *outer, inner = a_MK.shape
    row, column = a_MK.stride()[-2:]
    whole = (row, column) in ((inner, 1), (1, outer[-1]))
    if a_MK.dtype != torch.bfloat16 or whole or not missing or not a_MK.numel():
        return None
    storage_n = torch.frombuffer(_bytes(a_MK), dtype=a_MK.dtype)
    at = torch.full(outer, a_MK.storage_offset() + a_MK.shape[-1] * column)
    for place, size in enumerate(outer):
        shape = [1] * len(outer)
        shape[place] = size
        at = at + (torch.arange(size) * a_MK.stride(place)).view(shape)
    at = at[..., None] + torch.arange(missing) * column
    inside = at < len(storage_n)
    read = torch.where(inside, storage_n[at.clamp(max=len(storage_n) - 1)], float("nan"))
    return (read * 0).sum(-1)


def _bytes(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()
    return (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())


class AmxProducts(TorchDispatchMode):
    """While it is entered, every product of torch in this thread reads so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        behind = neighbours(args[LEFT[func]]) if func in LEFT else None
        result = func(*args, **(kwargs or {}))
        if behind is not None:
            result += behind[..., None].to(result.dtype)
        return result

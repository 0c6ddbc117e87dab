"""Calls of the C++ kernels: their signatures, and kept calls, which are repeated in one loop.

A product leaves little of Python's own code and objects in the caches: what takes 6 ms a step between kernels that do
nothing takes 20 ms between real ones (docs/log.md). A kept call is two objects, and its numbers are converted already.

Shapes: N adapter weights.
"""

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.kernels.build import NoKernels, library

Result = TypeVar("Result")
Call = tuple[Callable[..., object], tuple[Any, ...]]


class RowCount(ctypes.c_long):
    """An argument that counts rows: the number of tokens, or a multiple of it."""


class Kernel(NamedTuple):
    """One kernel. `call` converts and checks its arguments by `kinds`; `bare` takes them converted."""

    call: Callable[..., None]
    bare: Callable[..., None]
    kinds: tuple[Any, ...]


class _Piece(NamedTuple):
    rows: int
    calls: list[Call]
    result: Any


class Calls:
    """The kept calls of one model. Their arguments are addresses and views: call `forget` before a buffer moves.

    A buffer's first rows lie at the same place however many there are. So what was kept for `rows` tokens serves all
    smaller micro-batches; the number is read when a call is made. Whatever else differs from one time to the next is no
    argument either: it lies where the calls read it, in a buffer, a structure or a ctypes number.
    """

    def __init__(self) -> None:
        self._pieces: dict[Hashable, _Piece] = {}
        self._open: list[Call] | None = None
        self._converted: dict[tuple[type, float], Any] = {}
        self._rows, self._counts = 1, dict[int, RowCount]()
        self.kept = 0
        """The number of calls of all pieces."""

    def set_rows(self, rows: int) -> None:
        """Set the tokens of the micro-batch that comes next."""
        self._rows = rows
        for times, count in self._counts.items():
            count.value = times * rows

    def replayed(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """Do `work`, by kept calls if there are any. Return its result, which may have more rows.

        All of `work` goes through the methods below. `key` is equal for equal calls, apart from the number of rows.
        """
        piece = self._pieces.get(key)
        if piece is None or piece.rows < self._rows:
            return self._first(key, work)
        for call, arguments in piece.calls:
            call(*arguments)
        result: Result = piece.result
        return result

    def make(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make a call of torch."""
        call(*arguments)
        if self._open is not None:
            self._open.append((call, arguments))

    def rowwise(self, call: Callable[..., object], tensors: Sequence[Tensor], named: dict[str, Any]) -> None:
        """Make a call of `tensors` that have as many rows as there are tokens, or a multiple, with fixed `named`."""
        call(*tensors, **named)
        if self._open is not None:
            parts = tuple((tensor, self._count(tensor.shape[0])) for tensor in tensors)
            self._open.append((_rowwise, (call, parts, named)))

    def run(self, kernel: Kernel, *arguments: Any) -> None:
        """Make a call of a kernel in C++."""
        kernel.call(*arguments)
        if self._open is not None:
            self._open.append((kernel.bare, tuple(map(self._convert, kernel.kinds, arguments))))

    def forget(self) -> None:
        """Drop all kept calls, because a buffer is about to get another address."""
        self._pieces.clear()
        self._converted.clear()
        self._open, self.kept = None, 0

    def _first(self, key: Hashable, work: Callable[[], Result]) -> Result:
        self._open = []
        try:
            result = work()
            piece_calls = self._open  # none where a buffer moved meanwhile
        finally:
            self._open = None
        if piece_calls is not None:
            before = self._pieces.get(key)
            self.kept += len(piece_calls) - (len(before.calls) if before else 0)
            self._pieces[key] = _Piece(self._rows, piece_calls, result)
        return result

    def _convert(self, kind: Any, value: Any) -> Any:
        """Convert a number. Equal numbers are one object: they stay in the caches, and take no memory of their own."""
        if kind is RowCount:
            return self._count(value)
        if not isinstance(value, int | float):
            return kind.from_param(value)
        if (kind, value) not in self._converted:
            self._converted[kind, value] = kind.from_param(value)
        return self._converted[kind, value]

    def _count(self, rows: int) -> RowCount:
        times, rest = divmod(rows, self._rows)
        if rest:
            raise ValueError(f"{rows} rows are not a multiple of {self._rows} tokens: such a call can't be kept")
        return self._counts.setdefault(times, RowCount(rows))


def _rowwise(call: Callable[..., object], parts: Sequence[tuple[Tensor, RowCount]], named: dict[str, Any]) -> None:
    call(*[tensor[: count.value] for tensor, count in parts], **named)


KERNEL_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "add_norm": (POINTER, POINTER, LONG, POINTER, POINTER, FLOAT, POINTER, POINTER, RowCount, LONG),
    "norm_backward": (*[POINTER] * 6, RowCount, LONG),
    "rope": (POINTER, LONG, POINTER, POINTER, FLOAT, RowCount, *[LONG] * 3),
    "glu": (POINTER, LONG, POINTER, INT, RowCount, LONG),
    "glu_backward": (POINTER, POINTER, LONG, POINTER, LONG, POINTER, INT, RowCount, LONG),
    "drop": (POINTER, POINTER, LONG, LONG, FLOAT, POINTER, RowCount, LONG),
    "cross_entropy": (*[POINTER] * 3, FLOAT, POINTER, INT, LONG, LONG),
    "adapt": (POINTER, LONG, RowCount, LONG, POINTER, POINTER, LONG),
    "adapt_backward": (POINTER, LONG, RowCount, LONG, LONG, POINTER, LONG),
    "up_gradient": (POINTER, LONG, POINTER, LONG, RowCount, POINTER, LONG, FLOAT),
    "down_gradient": (POINTER, LONG, POINTER, LONG, RowCount, POINTER, LONG, FLOAT),
    "multiply": (POINTER, LONG, POINTER, LONG, INT, POINTER, LONG, RowCount, LONG, LONG),
    "project": (POINTER, LONG, POINTER, POINTER, LONG, RowCount, *[LONG] * 3, POINTER, POINTER, LONG),
    "attention": (POINTER,) * 5,
    "attention_backward": (*[POINTER] * 7, LONG, POINTER, RowCount, LONG),
}


@functools.cache
def kernels_for(dtype: torch.dtype) -> dict[str, Kernel]:
    """Return the kernels of a dtype by name. Raises NoKernels."""
    if dtype not in KERNEL_SUFFIXES:
        raise NoKernels(f"the kernels support float32 and bfloat16, not {dtype}")
    loaded, kernels = library(), {}
    for name, kinds in SIGNATURES.items():
        symbol = f"{name}_{KERNEL_SUFFIXES[dtype]}"
        checked, bare = loaded[symbol], loaded[symbol]  # two objects for one function
        checked.argtypes, checked.restype, bare.restype = kinds, None, None
        kernels[name] = Kernel(checked, bare, kinds)
    return kernels


def product_arguments(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> tuple[Any, ...]:
    """Return arguments of the kernel `multiply`: rows of all three may be strided; b may lie as [N, K]."""
    if a_MK.stride(1) != 1 or out_MN.stride(1) != 1 or 1 not in b_KN.stride():
        raise ValueError(f"rows of {a_MK.stride()}, {b_KN.stride()} and {out_MN.stride()} are not contiguous")
    turned = b_KN.stride(1) != 1
    b = b_KN.data_ptr(), b_KN.stride(1 if turned else 0), int(turned)
    rows, depth = a_MK.shape
    return a_MK.data_ptr(), a_MK.stride(0), *b, out_MN.data_ptr(), out_MN.stride(0), rows, b_KN.shape[1], depth


def native_norm(grad_N: Tensor, norm: Tensor) -> None:
    """Write the norm of a gradient into `norm`, which is fp64."""
    kernel = library().norm_of
    kernel.argtypes, kernel.restype = (POINTER, LONG, POINTER), None
    kernel(grad_N.data_ptr(), grad_N.numel(), norm.data_ptr())


def native_adamw(
    flat: tuple[Tensor, Tensor, Tensor, Tensor],
    terms: Tensor,
    constants: tuple[float, float],
    shrink: Tensor,
    ok: Tensor,
) -> None:
    """Make AdamW's update of all adapter weights.

    `flat`: master, gradient and both averages. `terms`: the five of optimizer.AdamW; `constants`: the new square's
    share and epsilon. `shrink` in fp64 and `ok`, a bool, are read when the kernel runs.
    """
    kernel = library().adamw
    kernel.argtypes, kernel.restype = (*[POINTER] * 4, LONG, POINTER, FLOAT, FLOAT, POINTER, POINTER), None
    addresses = (tensor.data_ptr() for tensor in flat)
    kernel(*addresses, flat[0].numel(), terms.data_ptr(), *constants, shrink.data_ptr(), ok.data_ptr())

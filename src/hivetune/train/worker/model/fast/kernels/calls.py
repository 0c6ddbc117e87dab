"""Calls of kernels and products that come again on the same memory: kept with their arguments and made as one loop.

A product leaves little of Python's own code and objects in the caches: what takes 6 ms a step between kernels that do
nothing takes 20 ms between real ones (docs/log.md). A kept call is two objects, and its numbers are converted already.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Result = TypeVar("Result")
Call = tuple[Callable[..., object], tuple[Any, ...]]


class RowCount(ctypes.c_long):
    """The kind of an argument that counts rows: as many as there are tokens, or a multiple of that."""


class Kernel(NamedTuple):
    """`call` converts and checks its arguments by `kinds`; `bare` takes them converted."""

    call: Callable[..., None]
    bare: Callable[..., None]
    kinds: tuple[Any, ...]


class _Piece(NamedTuple):
    rows: int
    calls: list[Call]
    result: Any


class Calls:
    """Of one model. Arguments are addresses and views: whoever moves a buffer must `forget` first.

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
        """Calls of all pieces."""

    def set_rows(self, rows: int) -> None:
        """Tokens of the micro-batch that comes next."""
        self._rows = rows
        for times, count in self._counts.items():
            count.value = times * rows

    def again(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """`work`, all of which goes through the methods below, and what it returned when it was kept, which may have
        more rows. `key`: equal where the calls would be, but for the number of rows."""
        piece = self._pieces.get(key)
        if piece is None or piece.rows < self._rows:
            return self._first(key, work)
        for call, arguments in piece.calls:
            call(*arguments)
        result: Result = piece.result
        return result

    def make(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)
        if self._open is not None:
            self._open.append((call, arguments))

    def rowwise(self, call: Callable[..., object], tensors: Sequence[Tensor], named: dict[str, Any]) -> None:
        """`tensors` have as many rows as there are tokens, or a multiple; `named` is passed as it is."""
        call(*tensors, **named)
        if self._open is not None:
            parts = tuple((tensor, self._count(tensor.shape[0])) for tensor in tensors)
            self._open.append((_rowwise, (call, parts, named)))

    def run(self, kernel: Kernel, *arguments: Any) -> None:
        """A call of a kernel in C++."""
        kernel.call(*arguments)
        if self._open is not None:
            self._open.append((kernel.bare, tuple(map(self._convert, kernel.kinds, arguments))))

    def forget(self) -> None:
        """Everything: a buffer is about to get another address."""
        self._pieces.clear()
        self._converted.clear()
        self._open, self.kept = None, 0

    def _first(self, key: Hashable, work: Callable[[], Result]) -> Result:
        self._open = []
        try:
            result = work()
            made = self._open  # none where a buffer moved meanwhile
        finally:
            self._open = None
        if made is not None:
            before = self._pieces.get(key)
            self.kept += len(made) - (len(before.calls) if before else 0)
            self._pieces[key] = _Piece(self._rows, made, result)
        return result

    def _convert(self, kind: Any, value: Any) -> Any:
        """Equal numbers are one object: they stay in the caches, and take no memory of their own."""
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
            raise ValueError(f"{rows} rows are no multiple of {self._rows} tokens: such a call can't be kept")
        return self._counts.setdefault(times, RowCount(rows))


def _rowwise(call: Callable[..., object], parts: Sequence[tuple[Tensor, RowCount]], named: dict[str, Any]) -> None:
    call(*[tensor[: count.value] for tensor, count in parts], **named)

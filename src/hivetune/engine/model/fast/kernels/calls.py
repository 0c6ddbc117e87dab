"""Calls of kernels and products that come again on the same memory: kept with their arguments and made as one loop.

A product leaves little of Python's own code and objects in the caches: what takes 6 ms a step between kernels that do
nothing takes 20 ms between real ones (docs/log.md). A kept call is two objects, and its numbers are converted already.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

# SmolLM2's 30 layers make 1,100 calls, forward and backward; kept, they take about 0.6 MB for each number of tokens. So
# there is room for 36 of those, and what comes later is computed to the same bits without being kept.
MOST_CALLS = 40_000

Result = TypeVar("Result")


class Kernel(NamedTuple):
    """`call` converts and checks its arguments by `kinds`; `bare` takes them converted."""

    call: Callable[..., None]
    bare: Callable[..., None]
    kinds: tuple[Any, ...]


class _Piece(NamedTuple):
    calls: list[tuple[Callable[..., object], tuple[Any, ...]]]
    result: Any


class Calls:
    """Of one model. Arguments are addresses and views: whoever moves a buffer must `forget` first.

    What differs from one time to the next is no argument: it lies where the calls read it, in a buffer, a structure or
    a ctypes number that is passed itself.
    """

    def __init__(self) -> None:
        self._pieces: dict[Hashable, _Piece] = {}
        self._open: list[tuple[Callable[..., object], tuple[Any, ...]]] | None = None
        self._converted: dict[tuple[type, float], Any] = {}
        self.kept = 0
        """Calls of all pieces."""

    def again(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """`work`, all of which goes through `make` and `run`, and what it returned the first time. `key`: equal where
        the calls would be."""
        piece = self._pieces.get(key)
        if piece is None:
            return self._first(key, work)
        for call, arguments in piece.calls:
            call(*arguments)
        result: Result = piece.result
        return result

    def make(self, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
        call(*arguments, **named)
        if self._open is not None:
            self._open.append((functools.partial(call, **named) if named else call, arguments))

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
        if self.kept < MOST_CALLS:
            self._open = []
        try:
            result = work()
            made = self._open  # none where a buffer moved meanwhile
        finally:
            self._open = None
        if made is not None:
            self._pieces[key] = _Piece(made, result)
            self.kept += len(made)
        return result

    def _convert(self, kind: Any, value: Any) -> Any:
        """Equal numbers are one object: they stay in the caches, and take no memory of their own."""
        if not isinstance(value, int | float):
            return kind.from_param(value)
        if (kind, value) not in self._converted:
            self._converted[kind, value] = kind.from_param(value)
        return self._converted[kind, value]

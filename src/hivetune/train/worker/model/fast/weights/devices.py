"""Where streamed weights are computed with: the memory that copies come from and go to, and who waits for whom.

A card copies beside its computing: the host only says what comes after what, with events, and waits for neither. On a
processor a copy is done when the call returns, and nothing has to wait.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hivetune.train.worker.model.memory import memory_for

# A point in the device's work that others can wait for and that has a time: an event of a card, seconds on a processor.
Stamp = Any


class StreamDevice(Protocol):
    """What a `Stream` asks of its device."""

    def empty(self, size_bytes: int) -> Tensor:
        """Memory of the device that products read, as bytes."""
        ...

    def pinned(self, size_bytes: int) -> list[Tensor]:
        """Host memory that copies to the device begin in, in one piece or several."""
        ...

    def now(self) -> Stamp:
        """After everything that the device was given to compute so far."""
        ...

    def copy(self, target_n: Tensor, pieces: Sequence[Tensor], after: Stamp) -> tuple[Stamp, Stamp]:
        """As much of the pieces, one behind the other, as the target holds; not before `after`. Begin and end of it."""
        ...

    def wait(self, stamp: Stamp) -> None:
        """What the device is given to compute from here on comes after `stamp`."""
        ...

    def finish(self, stamp: Stamp) -> None:
        """The host waits for it."""
        ...

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Between two stamps; waits for the later one."""
        ...


class StreamingProcessor:
    """Copies are made by the thread that asks for them."""

    def empty(self, size_bytes: int) -> Tensor:
        return memory_for(size_bytes, torch.device("cpu"))

    def pinned(self, size_bytes: int) -> list[Tensor]:
        return _pieces(size_bytes, pin=False)

    def now(self) -> Stamp:
        return time.perf_counter()

    def copy(self, target_n: Tensor, pieces: Sequence[Tensor], after: Stamp) -> tuple[Stamp, Stamp]:
        begin = self.now()
        for part_n, piece_n in _pairs(target_n, pieces):
            part_n.copy_(piece_n)
        return begin, self.now()

    def wait(self, stamp: Stamp) -> None:
        """The copy was made before its stamp existed."""

    def finish(self, stamp: Stamp) -> None:
        """As above."""

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        return float(end - begin)


class StreamingCard:
    """Copies have a stream of their own, from host memory to the card and never back."""

    def __init__(self, device: torch.device):
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def empty(self, size_bytes: int) -> Tensor:
        memory_n = memory_for(size_bytes, self._device)
        memory_n.record_stream(self._copies)  # when it is freed, the allocator waits for the copies too
        return memory_n

    def pinned(self, size_bytes: int) -> list[Tensor]:
        return _pieces(size_bytes, pin=True)

    def now(self) -> Stamp:
        stamp = torch.cuda.Event(enable_timing=True)
        stamp.record(torch.cuda.current_stream(self._device))
        return stamp

    def copy(self, target_n: Tensor, pieces: Sequence[Tensor], after: Stamp) -> tuple[Stamp, Stamp]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._copies.wait_event(after)
        begin.record(self._copies)
        with torch.cuda.stream(self._copies):
            for part_n, piece_n in _pairs(target_n, pieces):
                part_n.copy_(piece_n, non_blocking=True)
        end.record(self._copies)
        return begin, end

    def wait(self, stamp: Stamp) -> None:
        torch.cuda.current_stream(self._device).wait_event(stamp)

    def finish(self, stamp: Stamp) -> None:
        stamp.synchronize()

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def device_of(device: torch.device) -> StreamDevice:
    return StreamingCard(device) if device.type == "cuda" else StreamingProcessor()


def _pieces(size_bytes: int, *, pin: bool) -> list[Tensor]:
    """Powers of two and a small rest: torch rounds what it pins up to the next power, for one piece up to twice."""
    pieces, rest = [], size_bytes >> 4
    while size_bytes:
        piece = size_bytes if size_bytes <= rest else 1 << (size_bytes.bit_length() - 1)
        pieces.append(torch.empty(piece, dtype=torch.uint8, pin_memory=pin))
        size_bytes -= piece
    return pieces


def fill_pieces(pieces: Sequence[Tensor], source_n: Tensor) -> None:
    """Host memory to host memory, as `StreamDevice.copy` reads it."""
    for part_n, piece_n in _pairs(source_n, pieces):
        piece_n.copy_(part_n)


def _pairs(whole_n: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of `whole_n` and the pieces that they lie in."""
    at = 0
    for piece_n in pieces:
        part_n = whole_n[at : at + len(piece_n)]
        yield part_n, piece_n[: len(part_n)]
        at += len(piece_n)

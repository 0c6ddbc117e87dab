"""Streamed layers: frozen weights that are read ahead of the computing to three places that take turns.

Layer i always comes to place i mod 3, so addresses are fixed and a layer's matrices are views that never change. While
layer i is computed the next two are there or on their way, forward and backward. What the forward pass read last is
what the backward pass needs first, and is not read again.

A card copies beside its computing: the host only says what comes after what, with events, and waits for neither. On a
processor a copy is done when the call returns, and nothing has to wait.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hivetune.run.choices import Choices
from hivetune.train.worker.model.fast.weights.files import Checkpoint
from hivetune.train.worker.model.fast.weights.image import LayerImage
from hivetune.train.worker.model.memory import memory_for
from hivetune.train.worker.model.protocol import Streamed

# Stamps of the newest copies only, because a run may never ask what streaming took.
STAMPS_KEPT = 4096


# A point in the device's work that others can wait for and that has a time: an event of a card, seconds on a processor.
Stamp = Any


class StreamDevice:
    """The device of a stream: memory that copies go to, and what comes after what. This one is a processor.

    Its copies are made by the thread that asks for them, so nothing has to wait.
    """

    def empty(self, size_bytes: int) -> Tensor:
        """Return memory of the device that products read, as bytes."""
        return memory_for(size_bytes, torch.device("cpu"))

    def pinned(self, size_bytes: int) -> list[Tensor]:
        """Return host memory that copies to the device begin in, in one piece or several."""
        return _pieces(size_bytes, pin=False)

    def now(self) -> Stamp:
        """Return a stamp after everything that the device was given to compute so far."""
        return time.perf_counter()

    def copy(self, target_n: Tensor, pieces: Sequence[Tensor], after: Stamp) -> tuple[Stamp, Stamp]:
        """Copy as much of the pieces, one behind the other, as the target holds, after `after`. Return both ends."""
        begin = self.now()
        for part_n, piece_n in _pairs(target_n, pieces):
            part_n.copy_(piece_n)
        return begin, self.now()

    def wait(self, stamp: Stamp) -> None:
        """Let what the device is given to compute from here on come after `stamp`."""

    def finish(self, stamp: Stamp) -> None:
        """Let the host wait for `stamp`."""

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Return the seconds between two stamps; waits for the later one."""
        return float(end - begin)


class StreamingCard(StreamDevice):
    """A card: copies have a stream of their own, from host memory to the card and never back."""

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
    return StreamingCard(device) if device.type == "cuda" else StreamDevice()


def _pieces(size_bytes: int, *, pin: bool) -> list[Tensor]:
    """Return powers of two and a small rest: torch rounds what it pins up to the next power."""
    pieces, rest = [], size_bytes >> 4
    while size_bytes:
        piece = size_bytes if size_bytes <= rest else 1 << (size_bytes.bit_length() - 1)
        pieces.append(torch.empty(piece, dtype=torch.uint8, pin_memory=pin))
        size_bytes -= piece
    return pieces


def fill_pieces(pieces: Sequence[Tensor], source_n: Tensor) -> None:
    """Copy host memory to host memory, as `StreamDevice.copy` reads it."""
    for part_n, piece_n in _pairs(source_n, pieces):
        piece_n.copy_(part_n)


def _pairs(whole_n: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of `whole_n` and the pieces that they lie in."""
    at = 0
    for piece_n in pieces:
        part_n = whole_n[at : at + len(piece_n)]
        yield part_n, piece_n[: len(part_n)]
        at += len(piece_n)


class Streaming(NamedTuple):
    """The first `layers` of a model are streamed, from host memory or from disk. `packed`: all are kept as NF4."""

    layers: int
    source: Literal["memory", "disk"]
    packed: bool = False


NOT_STREAMING = Streaming(0, "disk")


def streaming_of(choices: Choices, layers: int, device: torch.device, *, packed: bool) -> Streaming:
    """Return the streaming of the choices. A processor reads files, whatever a card did before it took over."""
    source = "disk" if device.type == "cpu" else choices.stream_from or "memory"
    return Streaming(min(choices.streamed or 0, layers), source, packed)


class LayerSource(Protocol):
    """Where streamed layers come from. `bring` runs on a thread of its own, for one layer after the other."""

    def bring(self, layer: int, place_n: Tensor, after: Stamp) -> Stamp:
        """Bring the layer's bytes to its place, which is free after `after`. Return when they are there."""
        ...

    def read_s(self) -> float:
        """Return the seconds of reading or copying since the last call."""
        ...


class FromFiles:
    """The source for a processor: from the files to the place."""

    def __init__(self, device: StreamDevice, images: Sequence[LayerImage], checkpoint: Checkpoint, dtype: torch.dtype):
        self._device, self._images, self._checkpoint, self._dtype = device, images, checkpoint, dtype
        self._read_s = 0.0

    def bring(self, layer: int, place_n: Tensor, after: Stamp) -> Stamp:
        self._device.finish(after)
        self._read_s += _read(self._images[layer], self._checkpoint, place_n, self._dtype)
        return self._device.now()

    def read_s(self) -> float:
        seconds, self._read_s = self._read_s, 0.0
        return seconds


class FromMemory:
    """The source for a card: from pinned host memory, which all streamed layers are read into once."""

    def __init__(self, device: StreamDevice, images: Sequence[LayerImage], checkpoint: Checkpoint, dtype: torch.dtype):
        self._device = device
        self._layers = [device.pinned(image.size_bytes) for image in images]
        self._copies: deque[tuple[Stamp, Stamp]] = deque(maxlen=STAMPS_KEPT)
        scratch_n = _scratch(images)
        for image, pieces in zip(images, self._layers, strict=True):
            image.read(checkpoint, scratch_n, dtype)
            fill_pieces(pieces, scratch_n[: image.size_bytes])

    def bring(self, layer: int, place_n: Tensor, after: Stamp) -> Stamp:
        begin, end = self._device.copy(place_n, self._layers[layer], after)
        self._copies.append((begin, end))
        return end

    def read_s(self) -> float:
        seconds = sum(self._device.seconds(*copy) for copy in self._copies)
        self._copies.clear()
        return seconds


class ThroughMemory:
    """The source for a card: from the files to one of two pinned buffers, and from there while the other is filled."""

    def __init__(self, device: StreamDevice, images: Sequence[LayerImage], checkpoint: Checkpoint, dtype: torch.dtype):
        self._device, self._images, self._checkpoint, self._dtype = device, images, checkpoint, dtype
        self._scratch_n, self._read_s, now = _scratch(images), 0.0, device.now()
        self._buffers = deque((device.pinned(len(self._scratch_n)), now) for _ in range(2))

    def bring(self, layer: int, place_n: Tensor, after: Stamp) -> Stamp:
        self._read_s += _read(self._images[layer], self._checkpoint, self._scratch_n, self._dtype)
        pieces, copied = self._buffers.popleft()
        self._device.finish(copied)
        fill_pieces(pieces, self._scratch_n[: len(place_n)])
        _, end = self._device.copy(place_n, pieces, after)
        self._buffers.append((pieces, end))
        return end

    def read_s(self) -> float:
        seconds, self._read_s = self._read_s, 0.0
        return seconds


class LayerStream:
    """The stream of layers 0 to `len(images) - 1` of a model, in `places`."""

    def __init__(
        self, source: LayerSource, device: StreamDevice, images: Sequence[LayerImage], places: Sequence[Tensor]
    ):
        self._source, self._device, self._images, self._places = source, device, images, places
        self._coming: dict[int, tuple[int, Future[Stamp]]] = {}
        """Of each place: the layer that is there or on its way."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._waits: deque[tuple[Stamp, Stamp]] = deque(maxlen=STAMPS_KEPT)
        self._asked_bytes = 0

    @property
    def layers(self) -> int:
        return len(self._images)

    def need(self, layer: int, following: Iterable[int]) -> None:
        """Let what is computed from here on find the matrices of `layer` in their place; `following` come meanwhile.

        Layers that stay on the device may be named too. Raises what reading them raised.
        """
        taken = set()
        for number in (layer, *following):
            place = number % len(self._places) if 0 <= number < self.layers else -1
            if place < 0 or place in taken:
                continue
            taken.add(place)
            self._ask(number, place)
            if number == layer:
                self._wait_for(place)

    def report(self) -> Streamed:
        """Return what streaming took since the last call."""
        waited_s = sum(self._device.seconds(*wait) for wait in self._waits)
        streamed = Streamed(waited_s, self._source.read_s(), self._asked_bytes)
        self._waits.clear()
        self._asked_bytes = 0
        return streamed

    def _ask(self, layer: int, place: int) -> None:
        if place in self._coming and self._coming[place][0] == layer:
            return
        # Everything that read this place was given to the device before: `need` is called in the order of computing.
        free, size_bytes = self._device.now(), self._images[layer].size_bytes
        future = self._reader.submit(self._source.bring, layer, self._places[place][:size_bytes], free)
        self._coming[place] = layer, future
        self._asked_bytes += size_bytes

    def _wait_for(self, place: int) -> None:
        begin = self._device.now()
        self._device.wait(self._coming[place][1].result())
        self._waits.append((begin, self._device.now()))


def _read(image: LayerImage, checkpoint: Checkpoint, image_n: Tensor, dtype: torch.dtype) -> float:
    """Read a layer beside a step. Return the seconds that it took."""
    started = time.perf_counter()
    image.read(checkpoint, image_n, dtype, beside=True)
    return time.perf_counter() - started


def _scratch(images: Sequence[LayerImage]) -> Tensor:
    return torch.zeros(max(image.size_bytes for image in images), dtype=torch.uint8)

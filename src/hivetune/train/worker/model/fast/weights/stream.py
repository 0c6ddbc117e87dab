"""Frozen layers that do not stay on the device: brought ahead of the computing to three places that take turns.

Layer i always comes to place i mod 3, so addresses are fixed and a layer's matrices are views that never change. While
layer i is computed the next two are there or on their way, forward and backward; what the forward pass brought last is
what the backward pass needs first, and is not brought again.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hivetune.run.choices import Choices
from hivetune.train.worker.model.fast.weights.devices import Stamp, StreamDevice, fill_pieces
from hivetune.train.worker.model.fast.weights.files import Checkpoint
from hivetune.train.worker.model.fast.weights.image import LayerImage
from hivetune.train.worker.model.protocol import Streamed

# Of the newest layers, so that a run which never asks what streaming took keeps no more.
STAMPS_KEPT = 4096


class Streaming(NamedTuple):
    """The first `layers` of a model are streamed, from host memory or from disk. `packed`: all are kept as NF4."""

    layers: int
    source: Literal["memory", "disk"]
    packed: bool = False


NOT_STREAMING = Streaming(0, "disk")


def streaming_of(choices: Choices, layers: int, device: torch.device, *, packed: bool) -> Streaming:
    """A processor reads files, whatever a card did before it took over."""
    source = "disk" if device.type == "cpu" else choices.stream_from or "memory"
    return Streaming(min(choices.streamed or 0, layers), source, packed)


class LayerSource(Protocol):
    """Where streamed layers come from. `bring` runs on a thread of its own, for one layer after the other."""

    def bring(self, layer: int, place_n: Tensor, after: Stamp) -> Stamp:
        """The layer's bytes to its place on the device, which is free after `after`; when they are there."""
        ...

    def read_s(self) -> float:
        """Seconds in which it read or copied, since the last call."""
        ...


class FromFiles:
    """For a processor: from the files to the place."""

    def __init__(self, device: StreamDevice, images: Sequence[LayerImage], checkpoint: Checkpoint, dtype: torch.dtype):
        self._device, self._images, self._checkpoint, self._dtype = device, images, checkpoint, dtype
        self._read_s = 0.0

    def bring(self, layer: int, place_n: Tensor, after: Stamp) -> Stamp:
        self._device.finish(after)
        self._read_s += _read(self._images[layer], self._checkpoint, place_n, self._dtype)
        return self._device.now()

    def read_s(self) -> float:
        told, self._read_s = self._read_s, 0.0
        return told


class FromMemory:
    """For a card: from pinned host memory, which all streamed layers are read into once."""

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
        told = sum(self._device.seconds(*copy) for copy in self._copies)
        self._copies.clear()
        return told


class ThroughMemory:
    """For a card: from the files to one of two pinned buffers, and from there while the other one is filled."""

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
        told, self._read_s = self._read_s, 0.0
        return told


class LayerStream:
    """Layers 0 to `len(images) - 1` of a model, in `places`."""

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
        """What is computed from here on finds the matrices of `layer` in their place; `following` come meanwhile.

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

    def told(self) -> Streamed:
        """Since the last call."""
        waited_s = sum(self._device.seconds(*wait) for wait in self._waits)
        told = Streamed(waited_s, self._source.read_s(), self._asked_bytes)
        self._waits.clear()
        self._asked_bytes = 0
        return told

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
    """Beside a step; the seconds that it took."""
    started = time.perf_counter()
    image.read(checkpoint, image_n, dtype, beside=True)
    return time.perf_counter() - started


def _scratch(images: Sequence[LayerImage]) -> Tensor:
    return torch.zeros(max(image.size_bytes for image in images), dtype=torch.uint8)

"""Streamed layers: frozen weights that are read ahead of the computing to three places that take turns.

Layer i always comes to place i mod 3, so addresses are fixed and a layer's matrices are views that never change. While
layer i is computed the next two are there or on their way, forward and backward. What the forward pass read last is
what the backward pass needs first, and is not read again.

A card copies beside its computing: the host only says what comes after what, with events, and waits for neither. On a
processor a copy is done when the call returns, and nothing has to wait.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.weights.files import Checkpoint
from hivetune.train.worker.model.fast.weights.image import LayerImage
from hivetune.train.worker.model.memory import memory_for

StreamSource = Literal["files", "memory", "disk"]
"""Where layers come from: read to their place itself, as a processor does; copied from pinned host memory that holds
all of them; or read to one of two pinned buffers, and copied while the other is filled."""

# A point in the device's work that others can wait for: an event of a card, nothing on a processor.
Stamp = Any


def source_for(device: torch.device, stream_from: Literal["memory", "disk"] | None) -> StreamSource:
    """Return the way to a device. A processor reads files, whatever a card did before it took over."""
    return "files" if device.type == "cpu" else stream_from or "memory"


class StreamDevice:
    """The device of a stream: memory for copies, and the order of copies and computing. This one is a processor.

    The requesting thread makes its copies, so nothing has to wait.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def empty(self, size_bytes: int) -> Tensor:
        """Return memory of the device that products read, as bytes."""
        return memory_for(size_bytes, self._device)

    def pinned(self, size_bytes: int) -> list[Tensor]:
        """Return pinned host memory for copies to the device, in blocks of powers of two and a small rest, because
        torch rounds pinned memory up to a power of two.
        """
        pieces, rest = [], size_bytes >> 4
        while size_bytes:
            piece = size_bytes if size_bytes <= rest else 1 << (size_bytes.bit_length() - 1)
            pieces.append(torch.empty(piece, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))
            size_bytes -= piece
        return pieces

    def now(self) -> Stamp:
        """Return a stamp after all work queued on the device so far."""
        return None

    def copy(self, target_n: Tensor, pieces: Sequence[Tensor], after: Stamp) -> Stamp:
        """Copy as much of the pieces, one behind the other, as the target holds, after `after`. Return its end."""
        for part_n, piece_n in _pairs(target_n, pieces):
            part_n.copy_(piece_n)
        return self.now()

    def wait(self, stamp: Stamp) -> None:
        """Make the device's work that is queued from here on wait for `stamp`."""

    def finish(self, stamp: Stamp) -> None:
        """Block the host until `stamp`."""


class StreamingCard(StreamDevice):
    """A card: copies have a stream of their own, from host memory to the card and never back."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._copies = torch.cuda.Stream(device)

    def empty(self, size_bytes: int) -> Tensor:
        memory_n = super().empty(size_bytes)
        memory_n.record_stream(self._copies)  # when it is freed, the allocator waits for the copies too
        return memory_n

    def now(self) -> Stamp:
        stamp = torch.cuda.Event()
        stamp.record(torch.cuda.current_stream(self._device))
        return stamp

    def copy(self, target_n: Tensor, pieces: Sequence[Tensor], after: Stamp) -> Stamp:
        end = torch.cuda.Event()
        self._copies.wait_event(after)
        with torch.cuda.stream(self._copies):
            for part_n, piece_n in _pairs(target_n, pieces):
                part_n.copy_(piece_n, non_blocking=True)
        end.record(self._copies)
        return end

    def wait(self, stamp: Stamp) -> None:
        torch.cuda.current_stream(self._device).wait_event(stamp)

    def finish(self, stamp: Stamp) -> None:
        stamp.synchronize()


def device_of(device: torch.device) -> StreamDevice:
    return StreamingCard(device) if device.type == "cuda" else StreamDevice(device)


def _pairs(whole_n: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of `whole_n` with their pieces."""
    at = 0
    for piece_n in pieces:
        part_n = whole_n[at : at + len(piece_n)]
        yield part_n, piece_n[: len(part_n)]
        at += len(piece_n)


class LayerStream:
    """The stream of layers 0 to `len(images) - 1` of a model, in `places`."""

    def __init__(
        self,
        source: StreamSource,
        device: StreamDevice,
        images: Sequence[LayerImage],
        slots: Sequence[Tensor],
        checkpoint: Checkpoint,
    ):
        self._source, self._device, self._images = source, device, images
        self._slots, self._checkpoint = slots, checkpoint
        self._coming: dict[int, tuple[int, Future[Stamp]]] = {}
        """Place -> the layer that is there or on its way."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        if source == "files":
            return
        self._scratch_n = torch.zeros(max(image.size_bytes for image in images), dtype=torch.uint8)
        if source == "memory":
            self._pinned = [device.pinned(image.size_bytes) for image in images]
            for image, pieces in zip(images, self._pinned, strict=True):
                image.read(checkpoint, self._scratch_n)
                self._fill(pieces, image.size_bytes)
            del self._scratch_n
        else:
            self._buffers = deque((device.pinned(len(self._scratch_n)), device.now()) for _ in range(2))

    @property
    def layers(self) -> int:
        return len(self._images)

    def need(self, layer: int, following: Iterable[int]) -> None:
        """Make the matrices of `layer` ready for the work queued from here on, and start to bring `following`.

        Layers that stay on the device may be named too. Raises what reading them raised.
        """
        used = set()
        for number in (layer, *following):
            slot = number % len(self._slots) if 0 <= number < self.layers else -1
            if slot < 0 or slot in used:
                continue
            used.add(slot)
            if slot not in self._coming or self._coming[slot][0] != number:
                # All that read this place was given to the device before: `need` is called in the order of computing.
                self._coming[slot] = number, self._reader.submit(self._bring, number, slot, self._device.now())
            if number == layer:
                self._device.wait(self._coming[slot][1].result())

    def _bring(self, layer: int, slot: int, after: Stamp) -> Stamp:
        """Bring the layer's bytes to the place, which is free after `after`. Return the stamp of their arrival.

        It runs on a thread of its own, for one layer after the other.
        """
        buffer_n = self._slots[slot][: self._images[layer].size_bytes]
        if self._source == "files":
            self._device.finish(after)
            self._read(layer, buffer_n)
            return self._device.now()
        if self._source == "memory":
            return self._device.copy(buffer_n, self._pinned[layer], after)
        self._read(layer, self._scratch_n)
        pieces, copied = self._buffers.popleft()
        self._device.finish(copied)
        self._fill(pieces, len(buffer_n))
        end = self._device.copy(buffer_n, pieces, after)
        self._buffers.append((pieces, end))
        return end

    def _read(self, layer: int, image_n: Tensor) -> None:
        """Read a layer beside a step."""
        self._images[layer].read(self._checkpoint, image_n, beside=True)

    def _fill(self, pieces: Sequence[Tensor], size_bytes: int) -> None:
        for part_n, piece_n in _pairs(self._scratch_n[:size_bytes], pieces):
            piece_n.copy_(part_n)

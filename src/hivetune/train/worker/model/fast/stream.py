"""Streamed layers: frozen weights that are read ahead of the computing to three places that take turns.

Layer i always comes to place i mod 3, so addresses are fixed and a layer's matrices are views that never change. While
layer i is computed the next two are there or on their way, forward and backward. What the forward pass read last is
what the backward pass needs first, and is not read again.

On a processor a thread reads layers from the files. To a card a thread copies them from pinned host memory: the host
only says with events what comes after what, and waits for neither the copies nor the computing.
"""

import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.files import Checkpoint, LayerImage

StreamSource = Literal["files", "memory", "disk"]
"""Where layers come from: read to their place itself, as a processor does; copied from host memory that holds all of
them; or read to one buffer in host memory, and copied."""


def source_for(device: torch.device, stream_from: Literal["memory", "disk"] | None) -> StreamSource:
    """Return the way to a device. A processor reads files, whatever a card did before it took over."""
    return "files" if device.type == "cpu" else stream_from or "memory"


class LayerStream:
    """The stream of the first layers of a model, one image each, to `places` on the device."""

    def __init__(
        self,
        source: StreamSource,
        device: torch.device,
        images: Sequence[LayerImage],
        places: Sequence[Tensor],
        checkpoint: Checkpoint,
    ):
        self._source, self._images, self._places, self._checkpoint = source, images, places, checkpoint
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._copies is not None:
            for place_n in places:
                place_n.record_stream(self._copies)  # when it is freed, the allocator waits for the copies too
        self._coming: dict[int, tuple[int, Future[torch.cuda.Event | None]]] = {}
        """Place -> the layer that is there or on its way, and the event of its arrival."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._copied: torch.cuda.Event | None = None
        """The end of the last copy from the one buffer of source "disk"."""
        self._held: list[Tensor] = []
        """Host memory: the image of each layer (source "memory"), or one buffer (source "disk")."""
        if source == "memory":
            for image in images:
                self._held.append(self._host(image.size_bytes))
                image.read(checkpoint, self._held[-1])
        elif source == "disk":
            self._held.append(self._host(max(image.size_bytes for image in images)))

    def need(self, layer: int, following: Iterable[int]) -> None:
        """Make the matrices of `layer` ready for the work queued from here on, and start to bring `following`.

        Layers that stay on the device may be named too. Raises what reading them raised.
        """
        used = set()
        for number in (layer, *following):
            place = number % len(self._places) if 0 <= number < len(self._images) else -1
            if place < 0 or place in used:
                continue
            used.add(place)
            if place not in self._coming or self._coming[place][0] != number:
                # All that read this place was given to the device before: `need` is called in the order of computing.
                self._coming[place] = number, self._thread.submit(self._bring, number, place, self._now())
            if number == layer and (arrived := self._coming[place][1].result()) is not None:
                torch.cuda.current_stream().wait_event(arrived)

    def _bring(self, layer: int, place: int, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Bring the layer's bytes to the place, which is free after `free`. Return the event of their arrival.

        It runs on a thread of its own, for one layer after the other.
        """
        image = self._images[layer]
        place_n = self._places[place][: image.size_bytes]
        if self._source == "files":
            image.read(self._checkpoint, place_n, beside=True)
            return None
        held_n = self._held[layer if self._source == "memory" else 0][: image.size_bytes]
        if self._source == "disk":
            if self._copied is not None:
                self._copied.synchronize()
            image.read(self._checkpoint, held_n, beside=True)
        if self._copies is None or free is None:
            place_n.copy_(held_n)
            return None
        self._copies.wait_event(free)
        with torch.cuda.stream(self._copies):
            place_n.copy_(held_n, non_blocking=True)
        self._copied = self._copies.record_event()
        return self._copied

    def _now(self) -> torch.cuda.Event | None:
        """Return an event after all work queued on the card so far; None on a processor, where nothing is queued."""
        return None if self._copies is None else torch.cuda.current_stream(self._copies.device).record_event()

    def _host(self, size_bytes: int) -> Tensor:
        """Return host memory, pinned for a card: registered, because torch rounds what it pins to powers of two."""
        memory_n = torch.zeros(size_bytes, dtype=torch.uint8)
        if self._copies is not None:
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostRegister(memory_n.data_ptr(), size_bytes, 0)))
            weakref.finalize(self, runtime.cudaHostUnregister, memory_n.data_ptr())
        return memory_n

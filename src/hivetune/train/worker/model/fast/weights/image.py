"""The matrices of one layer as one stretch of bytes, so that a layer is read, kept and replaced as a whole.

A layer may be packed in four bits: NF4 as bitsandbytes makes it, packed where layers wait, unpacked where they are
computed with. Each linear module is packed on its own, as QLoRA has it (arXiv:2305.14314): 64 values share a scale, and
scales are rounded to 8 bits. Kept are the scales as they come out of that rounding, in float32: 4.5 bits a weight
instead of 4.13, the same values, and one step less to unpack.

Shapes as in matrices.py.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hivetune.base.paths import install_command
from hivetune.errors import MachineNotFit
from hivetune.train.worker.model.fast.weights.files import Checkpoint

# Matrices begin at multiples of this: vector instructions and a card's products want it. It is the same for every
# layer, because some products round differently at another alignment.
ALIGN_BYTES = 256


class ImagePart(NamedTuple):
    """A part of an image: `values` numbers of a tensor of the files from `start` on, and the byte where they go."""

    tensor: str
    start: int
    values: int
    at: int


@dataclass(frozen=True)
class MatrixPlace:
    """The place of a merged matrix in the image."""

    at: int
    shape: tuple[int, ...]

    def of(self, image_n: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix as a view of the image."""
        size = math.prod(self.shape) * dtype.itemsize
        return image_n[self.at : self.at + size].view(dtype).view(self.shape)


class LayerImage(Protocol):
    """What reading and moving a layer asks of its bytes."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, checkpoint: Checkpoint, image_n: Tensor, dtype: torch.dtype, *, beside: bool = False) -> None:
        """Read the files into `image_n`, which is on the CPU; `beside`: something else computes meanwhile."""
        ...


@dataclass(frozen=True)
class Image:
    """The bytes of a layer: its matrices by name, and what of the files they are read from."""

    size_bytes: int
    places: Mapping[str, MatrixPlace]
    parts: tuple[ImagePart, ...]

    def read(self, checkpoint: Checkpoint, image_n: Tensor, dtype: torch.dtype, *, beside: bool = False) -> None:
        """Read the base rows of all matrices into `image_n` (on the CPU); rank rows are left as they are."""
        for part in self.parts:
            values_n = image_n[part.at : part.at + part.values * dtype.itemsize].view(dtype)
            checkpoint.read_into(part.tensor, part.start, values_n, beside=beside)


class ImageOutline:
    """A builder of an image that puts matrices one behind the other."""

    def __init__(self, dtype: torch.dtype):
        self._dtype, self._end = dtype, 0
        self._places: dict[str, MatrixPlace] = {}
        self._parts: list[ImagePart] = []

    def add(self, name: str, *shape: int) -> None:
        self._places[name] = MatrixPlace(self._end, shape)
        size = math.prod(shape) * self._dtype.itemsize
        self._end += -(-size // ALIGN_BYTES) * ALIGN_BYTES

    def read(self, tensor: str, start: int, count: int, *, matrix: str, value: int) -> None:
        """Let `count` values of `tensor` from `start` on go to value number `value` of the matrix."""
        self._parts.append(ImagePart(tensor, start, count, self._places[matrix].at + value * self._dtype.itemsize))

    def done(self) -> Image:
        return Image(self._end, self._places, tuple(self._parts))


BLOCK = 64


def require_bitsandbytes() -> None:
    """Raise MachineNotFit with the install line where bitsandbytes is missing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MachineNotFit("method: qlora needs bitsandbytes", hint=f"{install_command('qlora')}, or set method: lora")


class PackedImage:
    """The bytes of a layer whose `plain` image is packed: for each module its codes, then its scales."""

    def __init__(self, plain: Image):
        self._plain, self.size_bytes = plain, 0
        self._at: list[tuple[int, int]] = []
        for part in plain.parts:
            codes_at = self.size_bytes
            scales_at = codes_at + _aligned((part.values + 1) // 2)
            self._at.append((codes_at, scales_at))
            self.size_bytes = scales_at + _aligned(4 * -(-part.values // BLOCK))

    def read(self, checkpoint: Checkpoint, image_n: Tensor, dtype: torch.dtype, *, beside: bool = False) -> None:
        """Read each module from the files in `dtype`, and pack it into `image_n` (on the CPU)."""
        from bitsandbytes.functional import dequantize_blockwise, quantize_4bit

        for part, (codes_at, scales_at) in zip(self._plain.parts, self._at, strict=True):
            values_n = torch.empty(part.values, dtype=dtype)
            checkpoint.read_into(part.tensor, part.start, values_n, beside=beside)
            codes, state = quantize_4bit(values_n, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
            scales_n = dequantize_blockwise(state.absmax, state.state2).add_(state.offset).float()
            image_n[codes_at : codes_at + codes.numel()] = codes.view(-1)
            image_n[scales_at : scales_at + 4 * len(scales_n)] = scales_n.view(torch.uint8)

    def unpack(self, image_n: Tensor, plain_n: Tensor, dtype: torch.dtype) -> None:
        """Unpack the base rows of all matrices of the plain image, in `dtype`; both on one device."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        for part, (codes_at, scales_at) in zip(self._plain.parts, self._at, strict=True):
            codes = image_n[codes_at : codes_at + (part.values + 1) // 2].view(-1, 1)
            scales_n = image_n[scales_at : scales_at + 4 * -(-part.values // BLOCK)].view(torch.float32)
            values_n = plain_n[part.at : part.at + part.values * dtype.itemsize].view(dtype)
            state = QuantState(scales_n, shape=values_n.shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
            # bitsandbytes supports `out` on cards only.
            values_n.copy_(dequantize_4bit(codes, state).view(-1))


class PackedLayers:
    """All layers of a model, packed in their own places or in those of a stream.

    There is one place where the layer at hand is unpacked.
    """

    def __init__(self, images: Sequence[PackedImage], places: Sequence[Tensor], plain_n: Tensor, dtype: torch.dtype):
        self._images, self._places, self._plain_n, self._dtype = images, places, plain_n, dtype

    def unpack(self, layer: int) -> None:
        self._images[layer].unpack(self._places[layer], self._plain_n, self._dtype)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES

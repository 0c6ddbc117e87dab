"""The matrices of one layer as one block of bytes, so that a layer is read, stored and replaced as a whole.

A layer may be packed in four bits: NF4 as bitsandbytes makes it, packed where layers wait, unpacked where they are
computed with. Each linear module is packed on its own, as QLoRA has it (arXiv:2305.14314): 64 values share a scale, and
scales are rounded to 8 bits. Kept are the scales as they come out of that rounding, in float32: 4.5 bits a weight
instead of 4.13, the same values, and one step less to unpack.

Shapes as in matrices.py.
"""

import importlib.util
import math
from typing import NamedTuple

import torch
from torch import Tensor

from hivetune.base.paths import install_command
from hivetune.errors import MachineNotFit
from hivetune.train.worker.model.fast.weights.files import Checkpoint

# Matrices begin at multiples of this: vector instructions and a card's products want it. It is the same for every
# layer, because some products round differently at another alignment.
ALIGN_BYTES = 256
# Values that share a scale in NF4.
BLOCK = 64


class ImagePart(NamedTuple):
    """A part of an image: `values` numbers of a tensor in the files, from number `start`, and their byte offset."""

    tensor: str
    start: int
    values: int
    at: int


class LayerImage:
    """The bytes of a layer in `dtype`: its matrices, one after another, and the parts of the files that fill them."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.size_bytes = dtype, 0
        self.parts: list[ImagePart] = []
        self._offsets: dict[str, tuple[int, tuple[int, ...]]] = {}

    def add_matrix(self, name: str, *shape: int) -> None:
        """Place a merged matrix after the last one."""
        self._offsets[name] = self.size_bytes, shape
        self.size_bytes += _aligned(math.prod(shape) * self.dtype.itemsize)

    def add_part(self, tensor: str, start: int, count: int, *, matrix: str, value: int) -> None:
        """Read `count` values of `tensor` from `start` on to value number `value` of the matrix."""
        self.parts.append(ImagePart(tensor, start, count, self._offsets[matrix][0] + value * self.dtype.itemsize))

    def matrices(self, image_n: Tensor) -> dict[str, Tensor]:
        """Return the matrices by name as views of the image."""
        size = self.dtype.itemsize
        return {
            name: image_n[at : at + math.prod(shape) * size].view(self.dtype).view(shape)
            for name, (at, shape) in self._offsets.items()
        }

    def values_of(self, part: ImagePart, image_n: Tensor) -> Tensor:
        """Return the numbers of a part as a view of the image."""
        return image_n[part.at : part.at + part.values * self.dtype.itemsize].view(self.dtype)

    def read(self, checkpoint: Checkpoint, image_n: Tensor, *, beside: bool = False) -> None:
        """Read the base rows of all matrices into `image_n` (on the CPU); rank rows are left as they are.

        `beside`: something else computes meanwhile.
        """
        for part in self.parts:
            checkpoint.read_into(part.tensor, part.start, self.values_of(part, image_n), beside=beside)


class PackedImage:
    """The bytes of a layer whose `plain` image is packed: for each module its codes, then its scales."""

    def __init__(self, plain: LayerImage):
        self._plain, self.size_bytes = plain, 0
        self._at: list[tuple[int, int]] = []
        for part in plain.parts:
            scales_at = self.size_bytes + _aligned((part.values + 1) // 2)
            self._at.append((self.size_bytes, scales_at))
            self.size_bytes = scales_at + _aligned(4 * -(-part.values // BLOCK))

    def read(self, checkpoint: Checkpoint, image_n: Tensor, *, beside: bool = False) -> None:
        """Read each module from the files in the plain image's dtype, and pack it into `image_n` (on the CPU)."""
        from bitsandbytes.functional import dequantize_blockwise, quantize_4bit

        for part, (codes_at, scales_at) in zip(self._plain.parts, self._at, strict=True):
            values_n = torch.empty(part.values, dtype=self._plain.dtype)
            checkpoint.read_into(part.tensor, part.start, values_n, beside=beside)
            codes, state = quantize_4bit(values_n, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
            scales_n = dequantize_blockwise(state.absmax, state.state2).add_(state.offset).float()
            image_n[codes_at : codes_at + codes.numel()] = codes.view(-1)
            image_n[scales_at : scales_at + 4 * len(scales_n)] = scales_n.view(torch.uint8)

    def unpack(self, image_n: Tensor, plain_n: Tensor) -> None:
        """Unpack the base rows of all matrices of the plain image; both on one device."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        for part, (codes_at, scales_at) in zip(self._plain.parts, self._at, strict=True):
            codes = image_n[codes_at : codes_at + (part.values + 1) // 2].view(-1, 1)
            scales_n = image_n[scales_at : scales_at + 4 * -(-part.values // BLOCK)].view(torch.float32)
            values_n = self._plain.values_of(part, plain_n)
            state = QuantState(scales_n, shape=values_n.shape, blocksize=BLOCK, quant_type="nf4", dtype=values_n.dtype)
            # bitsandbytes supports `out` on cards only.
            values_n.copy_(dequantize_4bit(codes, state).view(-1))


def require_bitsandbytes() -> None:
    """Raise MachineNotFit with the install line where bitsandbytes is missing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MachineNotFit("method: qlora needs bitsandbytes", hint=f"{install_command('qlora')}, or set method: lora")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES

"""The matrices of one layer as one block of bytes, so that a layer is read, stored and replaced as a whole.

Shapes as in matrices.py.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.weights.files import Checkpoint

# Matrices begin at multiples of this: vector instructions and a card's products want it. It is the same for every
# layer, because some products round differently at another alignment.
ALIGN_BYTES = 256


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


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES

"""The matrices of one layer as one stretch of bytes, so that a layer is brought, kept and replaced as a whole.

Shapes as in matrices.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.weights.files import Checkpoint

# Where a matrix begins: what vector instructions and a card's matrix products want, and the same for every layer, as
# some products round differently at another alignment.
ALIGN_BYTES = 256


class ImagePart(NamedTuple):
    """`values` numbers of a tensor of the files from `start` on, and the byte of the image where they go."""

    tensor: str
    start: int
    values: int
    at: int


@dataclass(frozen=True)
class MatrixPlace:
    """Where a merged matrix lies in the image."""

    at: int
    shape: tuple[int, ...]

    def of(self, image_n: Tensor, dtype: torch.dtype) -> Tensor:
        size = math.prod(self.shape) * dtype.itemsize
        return image_n[self.at : self.at + size].view(dtype).view(self.shape)


class LayerImage(Protocol):
    """What reading and moving a layer asks of its bytes."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, checkpoint: Checkpoint, image_n: Tensor, dtype: torch.dtype, *, beside: bool = False) -> None:
        """From the files into `image_n`, which is on the CPU; `beside`: something else computes meanwhile."""
        ...


@dataclass(frozen=True)
class Image:
    """What the bytes of a layer are: its matrices by name, and what of the files they are read from."""

    size_bytes: int
    places: Mapping[str, MatrixPlace]
    parts: tuple[ImagePart, ...]

    def read(self, checkpoint: Checkpoint, image_n: Tensor, dtype: torch.dtype, *, beside: bool = False) -> None:
        """The base rows of all matrices into `image_n` (on the CPU); rank rows are left as they are."""
        for part in self.parts:
            values_n = image_n[part.at : part.at + part.values * dtype.itemsize].view(dtype)
            checkpoint.read_into(part.tensor, part.start, values_n, beside=beside)


class ImageOutline:
    """Puts matrices one behind the other."""

    def __init__(self, dtype: torch.dtype):
        self._dtype, self._end = dtype, 0
        self._places: dict[str, MatrixPlace] = {}
        self._parts: list[ImagePart] = []

    def add(self, name: str, *shape: int) -> None:
        self._places[name] = MatrixPlace(self._end, shape)
        size = math.prod(shape) * self._dtype.itemsize
        self._end += -(-size // ALIGN_BYTES) * ALIGN_BYTES

    def read(self, tensor: str, start: int, count: int, *, matrix: str, value: int) -> None:
        """`count` values of `tensor` from `start` on go to value number `value` of the matrix."""
        self._parts.append(ImagePart(tensor, start, count, self._places[matrix].at + value * self._dtype.itemsize))

    def done(self) -> Image:
        return Image(self._end, self._places, tuple(self._parts))

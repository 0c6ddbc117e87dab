"""Tensors of a model's safetensors files, read by position into existing memory; the matrices of a layer as one block.

Reads, not a mapping: mapped pages of a model count as the process's own memory, and a mapped file that becomes shorter
ends the process with SIGBUS where a read gives an error.
"""

import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hivetune.errors import UsageError
from hivetune.models.worker.weights import Stored, open_weights

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
# Values of another precision are converted in pieces. Below this many, torch's copy stays on the thread that calls it:
# beside a step, a reader must not take the threads that compute.
BESIDE_VALUES = 1 << 15
ALONE_VALUES = 1 << 22


class Checkpoint:
    """Tensors by name from a folder's safetensors files, which stay open: one that is deleted is still read.

    Names are those of a text model (`layers.0.mlp.up_proj.weight`); multimodal checkpoints carry a prefix.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._stored = open_weights(folder)
        self._files: dict[Path, tuple[int, tuple[int, int]]] = {}
        """The number of each open file, and its size and time when it was opened."""
        prefixes = ("model.", "language_model.model.", "")
        self._prefix = next((p for p in prefixes if f"{p}embed_tokens.weight" in self._stored), "model.")

    def has(self, name: str) -> bool:
        return self._full(name) in self._stored

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, as it is stored."""
        stored, dtype = self._find(name)
        tensor = torch.empty(stored.shape, dtype=dtype)
        self.read_into(name, tensor.view(-1))
        return tensor

    def read_into(self, name: str, values_n: Tensor, *, beside: bool = False) -> None:
        """Read the tensor's values in the precision of `values_n` (contiguous, on the CPU).

        `beside`: something else computes meanwhile. Raises UsageError for a file that changed since it was opened,
        OSError with its path for one that can't be read.
        """
        stored, dtype = self._find(name)
        path = stored.file.path
        if len(values_n) * dtype.itemsize > stored.size_bytes:
            raise UsageError(
                f"{path}: {name} is {list(stored.shape)}, which does not match config.json",
                hint="prepare the model again: hivetune fetch",
            )
        number = self._open(path)
        at = stored.start
        if dtype == values_n.dtype:
            _read_whole(path, number, values_n, at)
            return
        most = BESIDE_VALUES if beside else ALONE_VALUES
        read_n = torch.empty(min(most, len(values_n)), dtype=dtype)
        for part_n in values_n.split(most):
            _read_whole(path, number, read_n[: len(part_n)], at)
            part_n.copy_(read_n[: len(part_n)])
            at += len(part_n) * dtype.itemsize

    def _find(self, name: str) -> tuple[Stored, torch.dtype]:
        full = self._full(name)
        if full not in self._stored:
            raise UsageError(f"{self._folder}: the weights lack {full}", hint="prepare the model again: hivetune fetch")
        stored = self._stored[full]
        if stored.kind not in _DTYPES:
            raise UsageError(f"{stored.file.path}: weights of type {stored.kind} are unsupported")
        return stored, _DTYPES[stored.kind]

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else self._prefix + name

    def _open(self, path: Path) -> int:
        """Return the file's number. Raises UsageError if it changed since it was opened."""
        if path not in self._files:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, number)
            self._files[path] = number, _state_of(number)
        number, state = self._files[path]
        if _state_of(number) != state:
            raise _changed(path)
        return number


def _read_whole(path: Path, number: int, values_n: Tensor, at: int) -> None:
    unread = memoryview(values_n.view(torch.uint8).numpy())
    while unread:
        try:
            count = read_at(number, unread, at)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, while weights were read", str(path)) from None
        if not count:
            raise _changed(path)
        unread, at = unread[count:], at + count


def read_at(number: int, into: memoryview, at: int) -> int:
    """Read bytes of an open file from a position on; return how many came."""
    return os.preadv(number, [into], at)


def _state_of(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_size, status.st_mtime_ns


def _changed(path: Path) -> UsageError:
    return UsageError(
        f"{path} was changed while a run read weights from it",
        hint="prepare the model again (hivetune fetch), then hivetune train RUN",
    )


# Matrices begin at multiples of this: vector instructions and a card's products want it. It is the same for every
# layer, because some products round differently at another alignment.
ALIGN_BYTES = 256


class Part(NamedTuple):
    """A part of an image: `values` numbers of a tensor in the files, and the byte that they begin at."""

    tensor: str
    values: int
    at: int


class LayerImage:
    """The merged matrices of a layer one after another in a block of bytes, read, streamed and replaced as a whole."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.size_bytes = dtype, 0
        self._parts: list[Part] = []
        self._offsets: dict[str, tuple[int, tuple[int, int]]] = {}

    def add_matrix(self, name: str, rows: int, columns: int, tensors: Mapping[str, int]) -> None:
        """Place a matrix behind the last one: its first rows are those of `tensors` (name -> rows), others are kept."""
        at, row_bytes = self.size_bytes, columns * self.dtype.itemsize
        self._offsets[name] = at, (rows, columns)
        self.size_bytes += -(-rows * row_bytes // ALIGN_BYTES) * ALIGN_BYTES
        for tensor, count in tensors.items():
            self._parts.append(Part(tensor, count * columns, at))
            at += count * row_bytes

    def matrices(self, image_n: Tensor) -> dict[str, Tensor]:
        """Return the matrices by name as views of the image."""
        return {
            name: self._values(image_n, at, math.prod(shape)).view(shape) for name, (at, shape) in self._offsets.items()
        }

    def read(self, checkpoint: Checkpoint, image_n: Tensor, *, beside: bool = False) -> None:
        """Read the base rows of all matrices into `image_n` (on the CPU); rank rows are left as they are.

        `beside`: something else computes meanwhile.
        """
        for tensor, values, at in self._parts:
            checkpoint.read_into(tensor, self._values(image_n, at, values), beside=beside)

    def _values(self, image_n: Tensor, at: int, values: int) -> Tensor:
        return image_n[at : at + values * self.dtype.itemsize].view(self.dtype)

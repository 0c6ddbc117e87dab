"""The matrices of one layer as one block of bytes, so that a layer is read, stored and replaced as a whole.

Tensors of the safetensors files are read by position into existing memory. Reads, not a mapping: mapped pages of a
model count as the process's own memory, and a mapped file that becomes shorter ends the process with SIGBUS where a
read gives an error.

A layer may be packed in four bits: NF4 as bitsandbytes makes it, packed where layers wait, unpacked where they are
computed with. Each linear module is packed on its own, as QLoRA has it (arXiv:2305.14314): 64 values share a scale, and
scales are rounded to 8 bits. Kept are the scales as they come out of that rounding, in float32: 4.5 bits a weight
instead of 4.13, the same values, and one step less to unpack.

Shapes as in matrices.py.
"""

import importlib.util
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hivetune.base.paths import install_command
from hivetune.errors import MachineNotFit, UsageError
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
        self.read_into(name, 0, tensor.view(-1))
        return tensor

    def read_into(self, name: str, start: int, values_n: Tensor, *, beside: bool = False) -> None:
        """Read the tensor's values from number `start` on, in the precision of `values_n` (contiguous, on the CPU).

        `beside`: something else computes meanwhile. Raises UsageError for a file that changed since it was opened,
        OSError with its path for one that can't be read.
        """
        stored, dtype = self._find(name)
        path = stored.file.path
        if (start + len(values_n)) * dtype.itemsize > stored.size_bytes:
            raise UsageError(
                f"{path}: {name} is {list(stored.shape)}, which does not match config.json",
                hint="prepare the model again: hivetune fetch",
            )
        number = self._open(path)
        at = stored.start + start * dtype.itemsize
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
        hint="prepare the model again (hivetune fetch), then hivetune resume RUN",
    )


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

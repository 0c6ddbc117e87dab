"""A model's tensors in its safetensors files, read by position into memory that is there already.

Reads, not a mapping: mapped pages of a model count as the process's own memory, and a mapped file that becomes shorter
ends the process with SIGBUS where a read gives an error.
"""

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
        self._files: dict[Path, _Opened] = {}
        prefixes = ("model.", "language_model.model.", "")
        self._prefix = next((p for p in prefixes if f"{p}embed_tokens.weight" in self._stored), "model.")

    def has(self, name: str) -> bool:
        return self._full(name) in self._stored

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, as it is stored."""
        stored = self._find(name)
        tensor = torch.empty(stored.shape, dtype=_dtype_of(stored))
        self.read_into(name, 0, tensor.view(-1))
        return tensor

    def read_into(self, name: str, start: int, values_n: Tensor, *, beside: bool = False) -> None:
        """Read the tensor's values from number `start` on, in the precision of `values_n` (contiguous, on the CPU).

        `beside`: something else computes meanwhile. Raises UsageError for a file that changed since it was opened,
        OSError with its path for one that can't be read.
        """
        stored = self._find(name)
        dtype, file = _dtype_of(stored), self._open(stored.file.path)
        if (start + len(values_n)) * dtype.itemsize > stored.size_bytes:
            raise UsageError(
                f"{file.path}: {name} is {list(stored.shape)}, which is not what config.json describes",
                hint="prepare the model again: hivetune fetch",
            )
        file.check()
        at = stored.start + start * dtype.itemsize
        if dtype == values_n.dtype:
            file.read(values_n.view(torch.uint8), at)
            return
        most = BESIDE_VALUES if beside else ALONE_VALUES
        read_n = torch.empty(min(most, len(values_n)), dtype=dtype)
        for part_n in values_n.split(most):
            file.read(read_n[: len(part_n)].view(torch.uint8), at)
            part_n.copy_(read_n[: len(part_n)])
            at += len(part_n) * dtype.itemsize

    def _find(self, name: str) -> Stored:
        full = self._full(name)
        if full not in self._stored:
            raise UsageError(f"{self._folder}: the weights lack {full}", hint="prepare the model again: hivetune fetch")
        return self._stored[full]

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else self._prefix + name

    def _open(self, path: Path) -> "_Opened":
        if path not in self._files:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, number)
            self._files[path] = _Opened(path, number, _state_of(number))
        return self._files[path]


@dataclass(frozen=True)
class _Opened:
    path: Path
    number: int
    state: tuple[int, int]

    def check(self) -> None:
        if _state_of(self.number) != self.state:
            raise _changed(self.path)

    def read(self, bytes_n: Tensor, at: int) -> None:
        left = memoryview(bytes_n.numpy())
        while left:
            try:
                count = read_at(self.number, left, at)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}, while weights were read", str(self.path)) from None
            if not count:
                raise _changed(self.path)
            left, at = left[count:], at + count


def read_at(number: int, into: memoryview, at: int) -> int:
    """Read bytes of an open file from a position on; return how many came."""
    return os.preadv(number, [into], at)


def _state_of(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_size, status.st_mtime_ns


def _changed(path: Path) -> UsageError:
    return UsageError(
        f"{path} was changed while a run reads its weights from it",
        hint="prepare the model again (hivetune fetch), then hivetune resume RUN",
    )


def _dtype_of(stored: Stored) -> torch.dtype:
    if stored.kind not in _DTYPES:
        raise UsageError(f"{stored.file.path}: weights of type {stored.kind} are unsupported")
    return _DTYPES[stored.kind]

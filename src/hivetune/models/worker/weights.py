"""Tensors of a safetensors folder as numpy arrays, memory-mapped and without torch, which takes seconds to import.

The format is a little-endian u64 header length, a JSON header, then the raw tensors
(https://github.com/huggingface/safetensors#format). bfloat16, which numpy lacks, is widened to float32 exactly.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hivetune.base.disk import read_json
from hivetune.errors import UsageError
from hivetune.models.prepared import WEIGHTS, WEIGHTS_INDEX

Array = np.ndarray[Any, np.dtype[Any]]
NUMPY_KINDS = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "|b1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"},
}
MAX_HEADER_BYTES = 100 << 20
NOT_WHOLE = "the folder is not whole: get the model again"


@dataclass(frozen=True)
class Stored:
    """The place of one tensor in a file. `kind` is the format's own name of its type."""

    kind: str
    shape: tuple[int, ...]
    file: "SafetensorsFile"
    start: int
    size_bytes: int

    def raw(self) -> Array:
        """Return its bytes, mapped."""
        raw: Array = np.frombuffer(self.file.data, dtype="|u1", count=self.size_bytes, offset=self.start)
        return raw

    def read(self) -> Array:
        """Return float32 for every floating type, as a fresh or mapped array of `shape`."""
        array: Array = self.raw().view(NUMPY_KINDS[self.kind]).reshape(self.shape)
        if self.kind == "BF16":
            array = (array.astype("<u4") << 16).view("<f4")
        elif self.kind[0] == "F":
            array = array.astype("<f4", copy=False)
        return array


class SafetensorsFile:
    """One file, mapped for as long as its arrays live."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            try:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise UsageError(f"{path} is empty", hint=NOT_WHOLE) from None
        self.tensors = self._header()

    def _header(self) -> dict[str, Stored]:
        """Raise UsageError for a file that is cut or lies about its offsets."""
        length = struct.unpack_from("<Q", self.data)[0] if len(self.data) >= 8 else 0
        begin = 8 + length
        if not 2 <= length <= MAX_HEADER_BYTES or begin > len(self.data):
            raise UsageError(f"{self.path} is not a safetensors file, or is truncated", hint=NOT_WHOLE)
        try:
            header = json.loads(self.data[8:begin])
            header.pop("__metadata__", None)
            return {name: self._entry(name, entry, begin) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise UsageError(f"{self.path}: damaged header: {error}", hint=NOT_WHOLE) from None

    def _entry(self, name: str, entry: dict[str, Any], begin: int) -> Stored:
        kind, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
        first, last = entry["data_offsets"]
        if min(shape, default=0) < 0:
            raise ValueError(f"{name} has the shape {list(shape)}")
        if kind not in NUMPY_KINDS:
            raise ValueError(f"{name} has the unsupported type {kind}")
        size_bytes = math.prod(shape) * np.dtype(NUMPY_KINDS[kind]).itemsize
        if not 0 <= first <= last <= len(self.data) - begin or last - first != size_bytes:
            raise ValueError(f"{name} is outside of the file")
        return Stored(kind, shape, self, begin + first, size_bytes)


def open_weights(folder: Path) -> dict[str, Stored]:
    """Return every tensor of `model.safetensors`, or of the shards that `model.safetensors.index.json` names, by
    name."""
    index = folder / WEIGHTS_INDEX
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    else:
        names = [WEIGHTS]
    return dict(_tensors(folder, names))


def _tensors(folder: Path, names: list[str]) -> Iterator[tuple[str, Stored]]:
    for name in names:
        path = folder / Path(name).name  # a shard lies in the folder itself
        if not path.is_file():
            raise UsageError(f"{folder} has no {path.name}", hint="use a folder with safetensors weights")
        yield from SafetensorsFile(path).tensors.items()

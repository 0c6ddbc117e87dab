"""The tensors of a safetensors folder as numpy arrays, memory-mapped and without torch, which takes seconds to import;
and checks that their values can be those of a model.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hivetune.base.disk import read_json
from hivetune.errors import UsageError
from hivetune.models.prepared import WEIGHTS, WEIGHTS_INDEX

Array = np.ndarray[Any, np.dtype[Any]]
NUMPY_KINDS = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "|b1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"},
}
INCOMPLETE = "the folder is incomplete: get the model again"


@dataclass(frozen=True)
class Stored:
    """The place of one tensor in a file. `kind`: the name of its type in the format, such as BF16."""

    kind: str
    shape: tuple[int, ...]
    file: "SafetensorsFile"
    start: int
    size_bytes: int

    def raw(self) -> Array:
        """Return the tensor's bytes as a memory-mapped array."""
        raw: Array = np.frombuffer(self.file.data, dtype="|u1", count=self.size_bytes, offset=self.start)
        return raw

    def read(self) -> Array:
        """Return the tensor as an array of `shape`, new or mapped; every floating type becomes float32."""
        array: Array = self.raw().view(NUMPY_KINDS[self.kind]).reshape(self.shape)
        if self.kind == "BF16":
            array = (array.astype("<u4") << 16).view("<f4")
        elif self.kind[0] == "F":
            array = array.astype("<f4", copy=False)
        return array


class SafetensorsFile:
    """One file, mapped while its arrays exist. Raises UsageError for a file that is cut or whose header does not match
    its content.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="numpy"):
                pass  # sizes, offsets and the header's form are right
        except SafetensorError as error:
            raise UsageError(f"{path} is damaged: {error}", hint=INCOMPLETE) from None
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # The places are read here, as the library hands out no maps, and numpy lacks bfloat16
        # (https://github.com/huggingface/safetensors#format).
        begin = 8 + struct.unpack_from("<Q", self.data)[0]
        header = json.loads(self.data[8:begin])
        header.pop("__metadata__", None)
        self.tensors: dict[str, Stored] = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            self.tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), self, begin + first, last - first)
            if entry["dtype"] not in NUMPY_KINDS:
                raise UsageError(f"{path}: {name} has the unsupported type {entry['dtype']}", hint=INCOMPLETE)


def shard_files(folder: Path) -> list[str]:
    """Return the names of a model's weight files: those in its index, or the single one."""
    index = folder / WEIGHTS_INDEX
    return sorted(set(read_json(index)["weight_map"].values())) if index.exists() else [WEIGHTS]


def open_weights(folder: Path) -> dict[str, Stored]:
    """Return name -> place of every tensor of a model folder."""
    tensors: dict[str, Stored] = {}
    for name in shard_files(folder):
        path = folder / Path(name).name  # a shard lies in the folder itself
        if not path.is_file():
            raise UsageError(f"{folder} has no {path.name}", hint="use a folder with safetensors weights")
        tensors |= SafetensorsFile(path).tensors
    return tensors


def write_weights(
    path: Path, described: Mapping[str, tuple[str, Sequence[int]]], data: Callable[[str], memoryview]
) -> None:
    """Write a safetensors file. `described`: kind and shape of each tensor; `data`: returns the bytes of one."""
    # One tensor at a time, where the library would hold the whole model in memory.
    header, end = dict[str, Any](), 0
    for name, (kind, shape) in described.items():
        begin, end = end, end + math.prod(shape) * np.dtype(NUMPY_KINDS[kind]).itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in described:
            file.write(data(name))


# Every value is read once, when the model is prepared: a download that broke off, a disk that filled a file with zeros,
# or a conversion that went wrong must not become a run of hours. It reads 1 to 2 GB/s, and costs less than hashing the
# same bytes. Names and shapes are compared with config.json in strict.py.

# Of each floating type: the integer of its width, and the bits that are all set in NaN and infinity alone.
EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
# Embeddings are padded by a fifth at most (data/render/folder.py); a download that broke off leaves more.
MAX_ZEROS_AT_END = 0.25
_CHUNK_BYTES = 16 << 20
_HINT = "download or convert it again"


def check_weights(folder: Path, name: str) -> None:
    """Raise UsageError, naming the tensor, for weights that are truncated, not finite, or all equal."""
    tensors = open_weights(folder)
    if not tensors:
        raise UsageError(f"model {name} has no weights in its safetensors files", hint=_HINT)
    quantized = "quantization_config" in read_json(folder / "config.json")
    for tensor_name, tensor in tensors.items():
        if problem := _problem(tensor, quantized=quantized):
            raise UsageError(f"model {name}: {tensor_name} {problem}", hint=_HINT)


def _problem(tensor: Stored, *, quantized: bool) -> str:
    """Return the problem with a tensor's values in words; "" if there is none."""
    if tensor.kind not in EXPONENTS:  # tables of numbers (DeepSeek V4's tokens of experts) are I64
        is_weight = len(tensor.shape) > 1 and tensor.kind not in ("I64", "BOOL") and not quantized
        return f"is stored as {tensor.kind} numbers" if is_weight else ""
    integer, exponent = EXPONENTS[tensor.kind]
    bits: Array = tensor.raw().view(integer)
    per_chunk, filled, alike = _CHUNK_BYTES // bits.itemsize, 0, True  # filled: up to the last value that is not zero
    for start in range(0, len(bits), per_chunk):
        chunk = bits[start : start + per_chunk]
        if bool((np.bitwise_and(chunk, exponent) == exponent).any()):
            return "contains NaN or infinity"
        if bool(chunk.any()):
            filled = start + len(chunk) - int(np.argmax(chunk[::-1] != 0))
        alike = alike and bool((chunk == bits[0]).all())
    if len(tensor.shape) < 2 or min(tensor.shape) < 2:  # biases and buffers may be zero
        return ""
    if not filled:
        return "is all zeros"
    if 1 - filled / len(bits) > MAX_ZEROS_AT_END:
        return "ends with zeros"
    return "contains the same value everywhere" if alike else ""

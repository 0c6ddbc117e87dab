"""The header of a GGUF file, read without numpy or the gguf package: settings, and names and shapes of tensors.

The files are untrusted, so every count and length is checked against the size of the file before it is used. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.paths import path_hint
from hivetune.base.private import open_plain
from hivetune.errors import UsageError

GGUF_MAGIC = b"GGUF"
# Types of values by GGUF's number, as struct writes them.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
UINT32 = 4
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
# Types of tensors by GGUF's number: (values, bytes) of a block. Of others only that a byte is there is checked.
BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292)},
    **{16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82)},
    **{23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2)},
}


@dataclass(frozen=True)
class Header:
    """The settings of a GGUF file by key, and the shape of each tensor by name. Of an array, such as the vocabulary,
    only the length is kept.

    Shapes are in GGUF's order, the reverse of torch's: the dimension that is contiguous in memory comes first.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]

    @property
    def is_adapter(self) -> bool:
        return self.settings.get("general.type") == "adapter"


def adapter_problem(base: Header, adapter: Header) -> str | None:
    """Return, in words, why an adapter can't be applied to a base: another architecture, or other shapes; None if it
    can.
    """
    theirs, its = (header.settings.get("general.architecture") for header in (base, adapter))
    if its != theirs:
        return f"it is for the architecture {its!r}, the model is {theirs!r}"
    for name, shape in adapter.tensors.items():
        stem, _, half = name.rpartition(".lora_")
        weight = base.tensors.get(stem)
        if weight is None:
            return f"the model has no weight {stem or name}"
        side = {"a": 0, "b": 1}.get(half)
        # Of a mixture's experts a third dimension counts them, in the weight and in both halves.
        fits = side is not None and len(shape) == len(weight) in (2, 3) and shape[2:] == weight[2:]
        if side is None or not fits or shape[side] != weight[side]:
            return f"{name} has the shape {shape}, the weight {weight}"
    return None


def read_header(path: Path) -> Header:
    """Return the header of a file. Raises UsageError for a file that is not GGUF, has a damaged header, or ends before
    its last tensor does.
    """
    # 0.02 s on SmolLM2's file, where gguf.GGUFReader takes 4 s: it makes an array of each of 100,000 words.
    try:
        with (
            open(open_plain(path, links=True), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(data).header()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=path_hint(error)) from None
    except (struct.error, ValueError, OverflowError) as error:
        raise UsageError(
            f"{path} is not a GGUF file, or is damaged: {error}", hint="copy or download it again"
        ) from None


class _Reader:
    """A reader of one value after another. It raises ValueError or struct.error for damage."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def header(self) -> Header:
        magic, version, tensors, settings = self._take("<4sIQQ")
        if magic != GGUF_MAGIC:
            raise ValueError("it does not start with the bytes GGUF")
        if version not in (2, 3):
            raise ValueError(f"version {version} is unsupported")
        values: dict[str, Any] = {}
        for _ in range(settings):
            key, (kind,) = self._string(), self._take("<I")
            values[key] = self._value(kind)
            # llama.cpp asserts it (ggml-org/llama.cpp#26318): a file with another type ends the server.
            if key == "general.alignment" and (kind != UINT32 or values[key].bit_count() != 1):
                raise ValueError(f"{key} is {values[key]!r}, not a power of two as an unsigned 32-bit number")
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        shapes: dict[str, tuple[int, ...]] = {}
        end = 0
        for _ in range(tensors):
            name, (dimensions,) = self._string(), self._take("<I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"the tensor {name} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed")
            shapes[name] = self._take(f"<{dimensions}Q")
            kind, offset = self._take("<IQ")
            block, block_bytes = BLOCKS.get(kind, (1, 0))
            if not all(shapes[name]) or (shapes[name] and shapes[name][0] % block) or offset % alignment:
                raise ValueError(f"{name} has the shape {shapes[name]} at {offset}, which its type does not allow")
            end = max(end, offset + max(1, math.prod(shapes[name]) // block * block_bytes))
        begin = -(-self.at // alignment) * alignment  # of the tensors, after the header
        if end and begin + end > len(self.data):
            raise ValueError(f"it is truncated: {len(self.data):,} of at least {begin + end:,} bytes")
        return Header(values, shapes)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(_layout(kind))[0]
        element, count = self._take("<IQ")
        if element == STRING:
            length_at = struct.Struct("<Q").unpack_from  # a vocabulary has 100,000 words
            for _ in range(count):
                self.at += 8 + length_at(self.data, self.at)[0]
            self._skip(0)
        else:
            self._skip(count * struct.calcsize(_layout(element)))
        return count

    def _string(self) -> str:
        start = self.at + 8
        self._skip(*self._take("<Q"))
        return self.data[start : self.at].decode("utf-8")

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.at)
        self._skip(struct.calcsize(layout))
        return values

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):  # no claimed length is believed before
            raise ValueError("it is truncated")


def _layout(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"values of type {kind} are unsupported")
    return SCALARS[kind]

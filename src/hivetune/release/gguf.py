"""GGUF files as seen from outside the engine: started as a task, and read back without numpy.

A file that was written is not yet a file that can be used: its header is read back and compared with what was meant.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hivetune.errors import HivetuneError, UsageError
from hivetune.process.parent import run_task
from hivetune.records import Progress
from hivetune.release.quantize import Recipe

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
LONGEST_STRING_BYTES = 16 << 20
MOST_ENTRIES = 1 << 24  # of an array or of the tensors: far above any real file, far below a lie that fills memory


@dataclass(frozen=True)
class Header:
    """Settings by key (arrays only as their length) and shape of each tensor, the longest-running dimension first."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]

    @property
    def is_adapter(self) -> bool:
        return self.settings.get("general.type") == "adapter"


def read_header(path: Path) -> Header:
    """Raises UsageError for what is no GGUF file, or is damaged or cut within its header."""
    try:
        with open(path, "rb") as file:
            return _Reader(file, path.stat().st_size).header()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is no whole GGUF file: {error}", hint="make one with: hivetune export RUN --to gguf"
        ) from None


def write_model(model: Path, adapter: Path | None, recipe: Recipe, folder: Path, file: str, progress: Progress) -> Path:
    """`folder/file`: the model with the adapter merged into it. Raises what the task says (UsageError, ...)."""
    task = {
        "kind": "model",
        "model": str(model),
        "adapter": None if adapter is None else str(adapter),
        "recipe": recipe.as_task(),
        "file": file,
        "name": Path(file).stem,
    }
    return _write(task, folder, "writing the GGUF file", progress)


def write_adapter(model: Path, adapter: Path, base_name: str, folder: Path, file: str, progress: Progress) -> Path:
    """`folder/file`: the adapter alone, for llama.cpp's `--lora`. Raises what the task says."""
    task = {
        "kind": "adapter",
        "model": str(model),
        "adapter": str(adapter),
        "base_name": base_name,
        "file": file,
        "name": Path(file).stem,
    }
    return _write(task, folder, "writing the GGUF adapter", progress)


def check_model(model: Path, folder: Path) -> None:
    """Raises now what a GGUF export of this model would raise later: architecture, tensors, tokenizer. One second."""
    task = {"kind": "check", "model": str(model), "adapter": None}
    run_task("to_gguf", task, folder).check("the export check")


def _write(task: Mapping[str, Any], folder: Path, what: str, progress: Progress) -> Path:
    done = 0

    def beat(kind: str) -> None:
        nonlocal done
        if kind == "t":
            done += 1
            progress(done, None)

    result = run_task("to_gguf", task, folder, on_beat=beat).check(what)
    path = folder / str(task["file"])
    header = read_header(path)
    if len(header.tensors) != result["tensors"] or header.is_adapter != (task["kind"] == "adapter"):
        raise HivetuneError(f"{path} does not read back as it was written: {len(header.tensors)} tensors")
    progress(done, done)
    return path


class _Reader:
    """GGUF version 2 and 3, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

    def __init__(self, file: BinaryIO, size_bytes: int):
        self.file = file
        self.size_bytes = size_bytes

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, settings = struct.unpack("<IQQ", self._take(20))
        if version not in (2, 3):
            raise ValueError(f"version {version} is not known")
        if tensors > MOST_ENTRIES or settings > MOST_ENTRIES:
            raise ValueError("its counts are not plausible")
        found = {}
        for _ in range(settings):
            key = self._string()
            found[key] = self._value(self._scalar(4))
        shapes = {}
        for _ in range(tensors):
            name = self._string()
            dimensions = self._scalar(4)
            if dimensions > 8:
                raise ValueError(f"{name} has {dimensions} dimensions")
            shapes[name] = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
            self._take(12)  # type and offset
        return Header(found, shapes)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            element, count = self._scalar(4), self._scalar(10)
            self._skip(element, count)
            return count
        return self._scalar(kind)

    def _skip(self, kind: int, count: int) -> None:
        if count > MOST_ENTRIES:
            raise ValueError("an array is longer than plausible")
        if kind == STRING:
            for _ in range(count):
                self.file.seek(self._length(), 1)
        elif kind in SCALARS:
            self.file.seek(count * struct.calcsize(SCALARS[kind]), 1)
        else:
            raise ValueError(f"arrays of type {kind} are not known")
        if self.file.tell() > self.size_bytes:
            raise ValueError("it is cut short")

    def _string(self) -> str:
        return self._take(self._length()).decode("utf-8")

    def _length(self) -> int:
        length = self._scalar(10)
        if length > LONGEST_STRING_BYTES:
            raise ValueError("a text is longer than plausible")
        return int(length)

    def _scalar(self, kind: int) -> Any:
        if kind not in SCALARS:
            raise ValueError(f"values of type {kind} are not known")
        layout = SCALARS[kind]
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError("it is cut short")
        return data

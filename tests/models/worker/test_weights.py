"""Safetensors files from outside: read whole, or refused in words; and the reordering of rotated heads."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from hivetune.errors import UsageError
from hivetune.models.worker.weights import SafetensorsFile, open_weights


def write_safetensors(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(kind: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


def test_safetensors_are_read_exactly(tmp_path: Path) -> None:
    halves = np.array([[1.0, -2.5], [3.0, 0.0]], dtype=np.float32)
    bf16 = (halves.view(np.uint32) >> 16).astype("<u2").tobytes()
    singles = np.arange(3, dtype="<f4").tobytes()
    header = {"__metadata__": {"format": "pt"}, "a": entry("BF16", [2, 2], 0, 8), "b": entry("F32", [3], 8, 20)}
    write_safetensors(tmp_path / "model.safetensors", header, bf16 + singles)
    weights = open_weights(tmp_path)
    assert weights["a"].read().dtype == np.float32
    assert (weights["a"].read() == halves).all()
    assert weights["b"].read().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("F32", [3], 0, 400)},
        {"a": entry("F32", [3], -8, 4)},
        {"a": entry("F32", [300], 0, 12)},
        {"a": entry("F8_E4M3", [3], 0, 3)},
        {"a": {"dtype": "F32"}},
        ["a"],
        {"a": entry("F32", [2**40, 2**40], 0, 12)},
    ],
)
def test_safetensors_that_lie_are_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(UsageError, match="damaged header"):
        SafetensorsFile(write_safetensors(tmp_path / "x.safetensors", header, bytes(12)))


@pytest.mark.parametrize("data", [b"", b"1234", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 50) + b"{}"])
def test_safetensors_that_are_cut_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        SafetensorsFile(path)

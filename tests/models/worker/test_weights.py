"""Safetensors files from outside: read exactly, or refused in words."""

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
    "header", [{"a": entry("F32", [3], -8, 4)}, {"a": entry("F8_E4M3", [12], 0, 12)}, ["a"], {"a": {"dtype": "F32"}}]
)
def test_safetensors_that_lie_are_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(UsageError, match=r"is damaged|unsupported type"):
        SafetensorsFile(write_safetensors(tmp_path / "x.safetensors", header, bytes(12)))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged"):
        SafetensorsFile(tmp_path / "x.safetensors")

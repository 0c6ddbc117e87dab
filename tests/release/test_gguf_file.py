"""GGUF headers and safetensors files from outside: read whole, or refused in words; never a crash, never a flood."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.engine.convert.to_gguf import interleave
from hivetune.engine.convert.weights import SafetensorsFile, open_weights
from hivetune.errors import UsageError
from hivetune.release.gguf import read_header


def write_small_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0, 3.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_float32("x", 0.5)
    writer.add_tensor("t.weight", np.zeros((3, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


def test_a_header_is_read_without_numpy(tmp_path: Path) -> None:
    header = read_header(write_small_gguf(tmp_path / "small.gguf"))
    assert header.is_adapter
    assert header.settings["tokenizer.ggml.tokens"] == 3
    assert header.settings["tokenizer.ggml.add_bos_token"] is True
    assert header.settings["x"] == 0.5
    assert header.tensors == {"t.weight": (4, 3)}


def test_a_header_cut_anywhere_is_refused(tmp_path: Path, small_gguf: bytes) -> None:
    path = tmp_path / "cut.gguf"
    end = small_gguf.index(b"t.weight") + 8
    for length in range(0, end, 3):
        path.write_bytes(small_gguf[:length])
        with pytest.raises(UsageError):
            read_header(path)


@settings(max_examples=200, deadline=1000)
@given(place=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_header_with_any_byte_changed_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, small_gguf: bytes, place: int, byte: int
) -> None:
    changed = bytearray(small_gguf)
    changed[place % len(changed)] = byte
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(changed)
    try:
        read_header(path)
    except UsageError:
        return


def test_what_is_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is long enough to be a header of something")
    with pytest.raises(UsageError, match="no whole GGUF file"):
        read_header(tmp_path / "text.gguf")


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
    with pytest.raises(UsageError, match="broken header"):
        SafetensorsFile(write_safetensors(tmp_path / "x.safetensors", header, bytes(12)))


@pytest.mark.parametrize("data", [b"", b"1234", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 50) + b"{}"])
def test_safetensors_that_are_cut_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        SafetensorsFile(path)


def test_rows_of_a_head_are_paired_as_llama_cpp_rotates_them() -> None:
    """transformers rotates row i of a head with row i + half; llama.cpp rotates rows 2i and 2i + 1."""
    rows = np.arange(8, dtype=np.float32)
    assert interleave(rows, heads=2, size=4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    matrix = np.arange(16, dtype=np.float32).reshape(8, 2)
    assert interleave(matrix, heads=2, size=4)[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    with pytest.raises(UsageError):
        interleave(rows, heads=3, size=4)

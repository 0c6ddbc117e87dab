"""GGUF headers from outside: read whole, or refused in words; never a crash, never a flood of memory."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.errors import UsageError
from hivetune.models.gguf_header import Header, adapter_problem, read_header


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


def test_a_missing_file_and_one_of_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is long enough to be a header of something")
    with pytest.raises(UsageError, match="not a GGUF file"):
        read_header(tmp_path / "text.gguf")


def header_of(architecture: str = "llama", **tensors: tuple[int, ...]) -> Header:
    return Header(
        {"general.architecture": architecture}, {name.replace("__", "."): shape for name, shape in tensors.items()}
    )


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        (header_of(q__weight__lora_a=(64, 8), q__weight__lora_b=(8, 32)), None),
        (header_of("qwen2", q__weight__lora_a=(64, 8)), "architecture 'qwen2', the model is 'llama'"),
        (header_of(v__weight__lora_a=(64, 8)), "no weight v.weight"),
        (header_of(q__weight__lora_a=(32, 8)), "q.weight.lora_a has the shape (32, 8)"),
        (header_of(q__weight__lora_b=(8, 64)), "q.weight.lora_b has the shape (8, 64)"),
        (header_of(q__weight=(64, 32)), "no weight q.weight"),
        (header_of(q__weight__lora_c=(64, 8)), "q.weight.lora_c has the shape"),
        (header_of(e__weight__lora_a=(64, 8, 4), e__weight__lora_b=(8, 32, 4)), None),
        (header_of(e__weight__lora_a=(64, 8, 3)), "e.weight.lora_a has the shape (64, 8, 3)"),
    ],
)
def test_an_adapter_belongs_to_a_base_or_it_is_said_why_not(adapter: Header, problem: str | None) -> None:
    found = adapter_problem(header_of(q__weight=(64, 32), e__weight=(64, 32, 4)), adapter)
    assert found == problem if problem is None else found is not None and problem in found

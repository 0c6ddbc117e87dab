"""Names of number types, and which tensor gets which."""

import importlib.util
import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.release.gguf import QUANTS, find_quant
from hivetune.release.worker.to_gguf import _check_numbers, encode, file_type, tensor_type


def test_names() -> None:
    assert find_quant("Q8_0") == "q8_0"
    with pytest.raises(UsageError, match="did you mean q4_k_m"):
        find_quant("q4_km")
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    assert not [name for name in QUANTS if f"`{name}`" not in text]


def test_k_quants_without_their_package_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineNotFit, match="pip install libgguf"):
        find_quant("q4_k_m")
    assert find_quant("q4_0") == "q4_0"


def test_file_types_are_llama_cpps() -> None:
    named = {
        "f32": "ALL_F32",
        "q4_k_m": "MOSTLY_Q4_K_M",
        "q5_k_m": "MOSTLY_Q5_K_M",
        "q6_k": "MOSTLY_Q6_K",
    }
    for name in QUANTS:
        member = named.get(name, f"MOSTLY_{name.upper()}")
        assert file_type(name) == gguf.LlamaFileType[member]


@pytest.mark.parametrize(
    ("name", "shape", "quant", "expected"),
    [
        ("blk.0.attn_q.weight", (64, 64), "q4_0", "Q4_0"),
        ("blk.0.attn_q.weight", (64, 48), "q4_0", "F16"),
        ("blk.0.attn_q.weight", (64, 64), "q4_k_m", "Q8_0"),
        ("blk.0.attn_q.weight", (64, 256), "q4_k_m", "Q4_K"),
        ("blk.0.attn_v.weight", (64, 256), "q4_k_m", "Q6_K"),
        ("blk.4.ffn_down.weight", (64, 256), "q4_k_m", "Q4_K"),
        ("blk.6.ffn_down.weight", (64, 256), "q4_k_m", "Q6_K"),
        ("token_embd.weight", (64, 64), "q4_0", "Q8_0"),
        ("output.weight", (64, 256), "q4_k_m", "Q6_K"),
    ],
)
def test_which_tensor_gets_which_type(name: str, shape: tuple[int, ...], quant: str, expected: str) -> None:
    assert tensor_type(name, shape, quant, blocks=32) == expected


@pytest.mark.parametrize(("kind", "bound"), [("Q8_0", 5e-3), ("Q4_0", 0.126)])
def test_numbers_survive_as_well_as_their_type_allows(kind: str, bound: float) -> None:
    """Relative to the largest number of a block of 32: half a unit in the last place of each type. Q4_0 has -8 to 7
    eighths of it, so the far end on the other side misses by a whole eighth."""
    array = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    raw = encode(array, kind)
    member = gguf.GGMLQuantizationType[kind]
    back = gguf.quants.dequantize(raw, member).reshape(array.shape)
    blocks = np.abs(array).reshape(-1, 32).max(axis=1, keepdims=True)
    assert (np.abs(back - array).reshape(-1, 32) <= bound * blocks).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_is_never_exported(value: float) -> None:
    import torch

    tensor = torch.ones(2, 32)
    _check_numbers("t", tensor, True)
    tensor[1, 3] = value
    with pytest.raises(HivetuneError, match="not finite"):
        _check_numbers("t", tensor, False)


def test_numbers_too_large_for_f16_are_not_turned_into_infinities() -> None:
    import torch

    with pytest.raises(HivetuneError, match="bf16"):
        _check_numbers("t", torch.full((1, 32), 1e5), True)
    _check_numbers("t", torch.full((1, 32), 1e5), False)

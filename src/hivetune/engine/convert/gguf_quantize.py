"""Numbers of a tensor in the types of a GGUF file: floats and block quantizations, chunk by chunk.

F16, BF16, Q4_0 ... Q8_0 come from the `gguf` package. K-quants come from `libgguf` where it is installed.
"""

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from hivetune.engine.convert.weights import Array
from hivetune.errors import HivetuneError, MachineNotFit

LARGEST_F16 = 65504.0
CHUNK_NUMBERS = 1 << 24  # 64 MB of float32 at a time


def tensor_type(name: str, shape: tuple[int, ...], recipe: Mapping[str, Any], blocks: int) -> str:
    """The type of one tensor (its GGUF name) under a recipe of release/quantize.py.

    Vectors and routers stay F32: they are few, and llama.cpp expects it. Rows whose length is not a multiple of the
    type's block size fall back to Q8_0 (32 numbers), then to F16.
    """
    if len(shape) < 2 or name.endswith(("_norm.weight", "ffn_gate_inp.weight")):
        return "F32"
    wanted = str(recipe["default"])
    if name in ("token_embd.weight", "output.weight"):
        wanted = str(recipe["embedding"])
    elif recipe.get("important") and name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
        layer = int(name.split(".")[1])
        # The layers that llama.cpp's "_M" mixtures spend more on: first and last eighth, every third between.
        if layer < blocks // 8 or layer >= 7 * blocks // 8 or (layer - blocks // 8) % 3 == 2:
            wanted = str(recipe["important"])
    for candidate in (wanted, "Q8_0"):
        if shape[-1] % block_size(candidate) == 0:
            return candidate
    return "F16"


def block_size(kind: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])


def row_bytes(kind: str, numbers: int) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(numbers // block * size)


def encode(name: str, array: Array, kind: str) -> Array:
    """`array` (float32 [..., row]) as raw bytes uint8 [..., row bytes].

    Raises HivetuneError for numbers that are not finite (law 5) or that F16 can't hold.
    """
    rows = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    step = max(1, CHUNK_NUMBERS // rows.shape[1])
    pieces = []
    for start in range(0, rows.shape[0], step):
        piece = np.ascontiguousarray(rows[start : start + step], dtype=np.float32)
        _check(name, piece, kind)
        pieces.append(_encode_rows(piece, kind))
    whole: Array = np.concatenate(pieces).reshape(*array.shape[:-1], -1)
    return whole


def _check(name: str, piece: Array, kind: str) -> None:
    largest = float(np.abs(piece).max(initial=0.0))
    if not np.isfinite(largest):
        raise HivetuneError(f"{name} has values that are not finite; nothing was exported")
    if kind == "F16" and largest > LARGEST_F16:
        raise HivetuneError(
            f"{name} has the value {largest:.3g}, above F16's largest, 65504", hint="export with --quant bf16"
        )


def _encode_rows(piece: Array, kind: str) -> Array:
    raw: Array
    if kind == "F32":
        raw = piece.view(np.uint8)
    elif kind == "F16":
        raw = piece.astype(np.float16).view(np.uint8)
    elif kind.endswith("_K"):
        raw = _encode_k(piece, kind)
    else:
        quantized = gguf.quants.quantize(piece, gguf.GGMLQuantizationType[kind])
        raw = np.ascontiguousarray(quantized).view(np.uint8)
    return raw


def _encode_k(piece: Array, kind: str) -> Array:
    try:
        import libgguf
    except ModuleNotFoundError:
        raise MachineNotFit(
            f"{kind} needs the package libgguf", hint="pip install libgguf, or choose --quant q8_0"
        ) from None
    encoded = libgguf.quantize_rows(piece, int(gguf.GGMLQuantizationType[kind]))
    raw: Array = np.asarray(encoded, dtype=np.uint8).reshape(piece.shape[0], -1)
    return raw

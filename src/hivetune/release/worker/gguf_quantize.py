"""Block quantizations that llama.cpp's converter does not write itself, computed chunk by chunk.

Q4_0 ... Q5_1 come from its `gguf` package, which is importable once a model is staged; K-quants come from `libgguf`
where it is installed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hivetune.errors import MachineNotFit
from hivetune.models.worker.weights import Array

CHUNK_NUMBERS = 1 << 24  # 64 MB of float32 at a time


def tensor_type(name: str, shape: tuple[int, ...], recipe: Mapping[str, Any], blocks: int) -> str:
    """Return the type of one tensor (its GGUF name) under a recipe of release/gguf.py.

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
    import gguf

    fitting = (
        candidate
        for candidate in (wanted, "Q8_0")
        if shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[candidate]][0] == 0
    )
    return next(fitting, "F16")


def encode(array: Array, kind: str) -> Array:
    """Return `array` (floats [..., row]) as raw bytes uint8 [..., row bytes]."""
    import gguf

    member = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        try:
            import libgguf
        except ModuleNotFoundError:
            raise MachineNotFit(
                f"{kind} needs the package libgguf", hint="pip install libgguf, or choose --quant q8_0"
            ) from None
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, CHUNK_NUMBERS // rows.shape[1])
    pieces = []
    for start in range(0, rows.shape[0], step):
        piece = np.ascontiguousarray(rows[start : start + step], dtype=np.float32)
        if kind.endswith("_K"):
            encoded = libgguf.quantize_rows(piece, int(member))
        else:
            encoded = gguf.quants.quantize(piece, member)
        pieces.append(np.ascontiguousarray(encoded).view(np.uint8).reshape(piece.shape[0], -1))
    whole: Array = np.concatenate(pieces).reshape(*array.shape[:-1], -1)
    return whole

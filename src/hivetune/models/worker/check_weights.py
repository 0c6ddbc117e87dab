"""Checks that the values of a model folder's weights can be those of a model. numpy, no torch; names and shapes are
compared with config.json in models/worker/strict.py.

Every value is read once, when the model is prepared: a download that broke off, a disk that filled a file with zeros,
or a conversion that went wrong must not become a run of hours. It reads 1 to 2 GB/s, and costs less than hashing the
same bytes.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hivetune.base.disk import read_json
from hivetune.errors import UsageError
from hivetune.models.worker.weights import Array, Stored, open_weights

# Of each floating type: the integer of its width, and the bits that are all set in NaN and infinity alone.
EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
# Embeddings are padded by a fifth at most (data/render/vocabulary.py); a download that broke off leaves more.
MAX_ZEROS_AT_END = 0.25
_CHUNK_BYTES = 16 << 20
_HINT = "download or convert it again"


def check_weights(folder: Path, name: str) -> None:
    """Raise UsageError, naming the tensor, for weights that are cut, not finite, or of one value."""
    tensors = open_weights(folder)
    if not tensors:
        raise UsageError(f"model {name} has no weights in its safetensors files", hint=_HINT)
    quantized = "quantization_config" in read_json(folder / "config.json")
    for tensor_name, tensor in tensors.items():
        problem = _problem(tensor, quantized=quantized)
        if problem:
            raise UsageError(f"model {name}: {tensor_name} {problem}", hint=_HINT)


def check_tied(folder: Path, pairs: Iterable[tuple[str, str]], name: str) -> None:
    """Raise UsageError when two tensors that config.json ties are both stored, with different values: transformers then
    keeps both, most other programs one of them."""
    tensors = open_weights(folder)
    for name_a, name_b in pairs:
        if name_a in tensors and name_b in tensors and not np.array_equal(tensors[name_a].raw(), tensors[name_b].raw()):
            raise UsageError(
                f"model {name}: config.json ties {name_a} to {name_b}, and the weights hold two different ones",
                hint="set tie_word_embeddings to false in a local copy, if its publisher says that they differ",
            )


def _problem(tensor: Stored, *, quantized: bool) -> str:
    """Return the problem with its values in words; "" if there is none."""
    if tensor.kind not in EXPONENTS:  # tables of numbers (DeepSeek V4's tokens of experts) are I64
        is_weight = len(tensor.shape) > 1 and tensor.kind not in ("I64", "BOOL") and not quantized
        return f"is stored as {tensor.kind} numbers" if is_weight else ""
    integer, exponent = EXPONENTS[tensor.kind]
    ends_at = 0  # behind the last value that is not zero
    for start in range(0, tensor.size_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, tensor.size_bytes - start)
        bits = np.frombuffer(tensor.file.data, "|u1", size, tensor.start + start).view(integer)
        if bool((np.bitwise_and(bits, exponent) == exponent).any()):
            return "holds NaN or infinity"
        if bool(bits.any()):
            ends_at = start + size - bits.itemsize * int(np.argmax(bits[::-1] != 0))
    if len(tensor.shape) < 2 or min(tensor.shape) < 2:  # biases and buffers may be zero
        return ""
    if not ends_at:
        return "is all zeros"
    if 1 - ends_at / tensor.size_bytes > MAX_ZEROS_AT_END:
        return "ends with zeros"
    first: Array = tensor.raw()[:_CHUNK_BYTES].view(integer)
    one_value = bool((first == first[0]).all()) and tensor.size_bytes <= _CHUNK_BYTES
    return "holds one value only" if one_value and first.size > 1 else ""

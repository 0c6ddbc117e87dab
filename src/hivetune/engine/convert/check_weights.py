"""Whether the weights of a model folder can be those of the model that its config.json describes. numpy, no torch.

Every value is looked at once, when the model is prepared: a download that broke off, a disk that filled a file with
zeros, or a conversion that went wrong must not become a run of hours. 1 to 2 GB/s, less than hashing the same bytes.
"""

from pathlib import Path

import numpy as np

from hivetune.engine.convert.weights import Stored, open_weights
from hivetune.errors import UsageError
from hivetune.models.architecture import Architecture, read_architecture

# Of each floating type: the integer of its width, and the bits that are all set in NaN and infinity alone.
EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_CHUNK_BYTES = 16 << 20
_HINT = "download or convert it again"


def check_weights(folder: Path, name: str) -> None:
    """Raises UsageError, naming the tensor, for weights that are cut, not finite, all zero, or of another shape."""
    tensors = open_weights(folder)
    if not tensors:
        raise UsageError(f"model {name} has no weights in its safetensors files", hint=_HINT)
    architecture = read_architecture(folder)
    if architecture.exact:
        _check_shapes(tensors, architecture, name)
    for tensor_name, tensor in tensors.items():
        problem = _problem(tensor)
        if problem:
            raise UsageError(f"model {name}: {tensor_name} {problem}", hint=_HINT)


def _check_shapes(tensors: dict[str, Stored], architecture: Architecture, name: str) -> None:
    """Each linear layer that the config describes. Image-and-text models name them otherwise and are not looked at."""
    if not any(tensor_name.startswith("model.layers.0.") for tensor_name in tensors):
        return
    for linear in architecture.adapted():
        stored = tensors.get(f"{linear.name}.weight")
        if stored is None:
            raise UsageError(f"model {name}: its weights lack {linear.name}.weight", hint=_HINT)
        if stored.shape != (linear.outputs, linear.inputs):
            raise UsageError(
                f"model {name}: {linear.name}.weight is {list(stored.shape)}, by config.json it is "
                f"{[linear.outputs, linear.inputs]}",
                hint=_HINT,
            )


def _problem(tensor: Stored) -> str:
    """What is wrong with its values, in words; "" when nothing is."""
    if tensor.kind not in EXPONENTS:
        return ""
    integer, exponent = EXPONENTS[tensor.kind]
    any_set = False
    for start in range(0, tensor.size_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, tensor.size_bytes - start)
        bits = np.frombuffer(tensor.file.data, "|u1", size, tensor.start + start).view(integer)
        if bool((np.bitwise_and(bits, exponent) == exponent).any()):
            return "holds NaN or infinity"
        any_set = any_set or bool(bits.any())
    return "" if any_set or len(tensor.shape) < 2 else "is all zeros"

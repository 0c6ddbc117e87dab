"""PEFT's names of the two halves of an adapter, of linear modules and of routed experts. Names and shapes only."""

from collections.abc import Mapping, Sequence

from hivetune.models.architecture import Linear
from hivetune.models.targets import find_targets

PREFIX = "base_model.model."
A_WEIGHT = ".lora_A.weight"
# Tensors of fused experts, in the model's order; the first of them that a model has goes in, the last comes out.
EXPERT_TENSORS = ("gate_up_proj", "up_proj", "down_proj")


def parameter_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of A [R, I] and B [O, R] of a linear module."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def names_of(linears: Sequence[Linear]) -> list[tuple[str, str]]:
    """Return `parameter_names` of each module. PEFT wraps the module that holds the tensors of experts once for each
    adapted one: the last of them has the module's own name, the one before `base_layer` below it."""
    last = {_holder(linear): linear.name for linear in linears if linear.experts > 1}
    names = []
    for linear in linears:
        module = linear.name
        if linear.experts > 1:
            module = _holder(linear) if last[_holder(linear)] == linear.name else f"{_holder(linear)}.base_layer"
        names.append(parameter_names(module))
    return names


def expert_tensors(shapes: Mapping[str, Sequence[int]], rank: int, targets: str | Sequence[str]) -> dict[str, str]:
    """Return the adapted tensor of each adapter on experts, by the module in PEFT's names.

    An adapter on experts has more rows than its rank. PEFT's names don't tell the tensors apart, their shapes do.
    """
    halves = {name.removeprefix(PREFIX).removesuffix(A_WEIGHT): a for name, a in shapes.items() if A_WEIGHT in name}
    tensors = {}
    for module, a_shape in halves.items():
        if a_shape[0] == rank:
            continue
        holder = module.removesuffix(".base_layer")
        inner = f"{holder}.base_layer"
        if inner not in halves:  # one tensor alone, by the words of the setting
            tensors[module] = find_targets([f"{holder}.{part}" for part in EXPERT_TENSORS], targets)[-1]
        elif module == holder:
            tensors[module] = f"{holder}.down_proj"
        else:
            gated = shapes[f"{PREFIX}{inner}.lora_B.weight"][0] == 2 * halves[holder][1]
            tensors[module] = f"{holder}.{'gate_up_proj' if gated else 'up_proj'}"
    return tensors


def _holder(linear: Linear) -> str:
    return linear.name.rpartition(".")[0]

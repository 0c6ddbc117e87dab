"""Which number types a GGUF file can be written in, and what each needs. Pure; the numbers are made by the engine."""

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hivetune.errors import MachineNotFit, UsageError


@dataclass(frozen=True)
class Recipe:
    """`default` for matrices, `embedding` for token and output embeddings, `important` for the layers that a mixture
    spends more on. `file_type` is llama.cpp's number of the mixture, `bits` the size of a weight of `default`."""

    name: str
    file_type: int
    default: str
    embedding: str
    bits: float
    important: str | None = None

    def as_task(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def needs_libgguf(self) -> bool:
        return any(kind is not None and kind.endswith("_K") for kind in (self.default, self.embedding, self.important))


# Embeddings of a small model are a large part of it and the first thing to suffer: they keep 8 bits, or 6 in K-quants.
RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", 0, "F32", "F32", 32),
        Recipe("f16", 1, "F16", "F16", 16),
        Recipe("bf16", 32, "BF16", "BF16", 16),
        Recipe("q8_0", 7, "Q8_0", "Q8_0", 8.5),
        Recipe("q5_1", 9, "Q5_1", "Q8_0", 6),
        Recipe("q5_0", 8, "Q5_0", "Q8_0", 5.5),
        Recipe("q4_1", 3, "Q4_1", "Q8_0", 5),
        Recipe("q4_0", 2, "Q4_0", "Q8_0", 4.5),
        Recipe("q6_k", 18, "Q6_K", "Q6_K", 6.5625),
        Recipe("q5_k_m", 17, "Q5_K", "Q6_K", 5.5, "Q6_K"),
        Recipe("q4_k_m", 15, "Q4_K", "Q6_K", 4.5, "Q6_K"),
    )
}

SERVED_QUANT = "q8_0"  # what `serve` uses unless told otherwise: half of 16 bits, hardly a difference


def find_recipe(name: str) -> Recipe:
    """Raises UsageError for an unknown type naming the nearest, MachineNotFit when its package is missing."""
    recipe = RECIPES.get(name.lower())
    if recipe is None:
        near = difflib.get_close_matches(name.lower(), RECIPES, 1)
        raise UsageError(
            f"unknown --quant {name}",
            hint=f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RECIPES)}",
        )
    if recipe.needs_libgguf and importlib.util.find_spec("libgguf") is None:
        raise MachineNotFit(
            f"--quant {recipe.name} needs the package libgguf", hint="pip install libgguf, or choose --quant q8_0"
        )
    return recipe

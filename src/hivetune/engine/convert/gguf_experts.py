"""Routed experts in GGUF: one tensor for all experts of a layer, gate and up apart; llama.cpp multiplies by one of them
a token (`ggml_mul_mat_id`), adapters too.

Shapes: E experts, O outputs and I inputs of one, F their width, R rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hivetune.engine.convert.gguf_arch import ModelConfig, expert_count
from hivetune.engine.convert.lora_file import Module
from hivetune.engine.convert.weights import Array, Stored
from hivetune.models.families import FAMILIES

EXPERT_MODULE = "model.layers.{}.mlp.experts.{}"


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor of a layer's experts.

    source: its name, as llama.cpp's are found by. sources: the tensors of the files, one for each expert or one for
    all. module: the adapted tensor that it is a part of; half: which one of gate and up, None for down.
    """

    source: str
    sources: tuple[str, ...]
    module: str
    half: int | None

    def read(self, weights: Mapping[str, Stored], change: Module | None) -> Array:
        """[E, O, I], float32, with the adapter's change."""
        parts = [weights[name].read() for name in self.sources]
        stacked = np.stack(parts) if len(parts) > 1 or parts[0].ndim == 2 else self._own(parts[0])
        if change is None:
            return stacked
        added: Array = stacked.astype(np.float32)
        for expert in range(len(added)):
            added[expert] += self._own(change.product(expert)[None])[0]
        return added

    def shape(self, weights: Mapping[str, Stored], experts: int) -> tuple[int, ...]:
        first = weights[self.sources[0]].shape
        if len(first) == 2:
            return (experts, *first)
        return (experts, first[1] // (1 if self.half is None else 2), first[2])

    def adapter_halves(self, change: Module) -> tuple[Array, Array]:
        """A [E, R, I] and B [E, O, R]."""
        return change.read_a(), self._own(change.read_b())

    def _own(self, array_EON: Array) -> Array:
        """Its half of what gate and up have together."""
        if self.half is None:
            return array_EON
        middle = array_EON.shape[1] // 2
        own: Array = array_EON[:, self.half * middle : (self.half + 1) * middle]
        return own


def expert_tensors_of(config: ModelConfig, known: Mapping[str, Stored] | None = None) -> Iterator[ExpertTensor]:
    """Those of every layer; `known`: the tensors of the files, which may hold all experts as one."""
    names, count = FAMILIES[config["model_type"]].experts, expert_count(config)
    if names is None:
        return
    for layer in range(int(config["num_hidden_layers"])):
        for half, pattern in ((0, names.gate), (1, names.up), (None, names.down)):
            module = EXPERT_MODULE.format(layer, "down_proj" if half is None else "gate_up_proj")
            path = f"model.layers.{layer}.{pattern}"
            sources = tuple(f"{path.format(expert)}.weight" for expert in range(count))
            if known is not None and module in known:
                sources = (module,)
            yield ExpertTensor(path.replace(".{}", ""), sources, module, half)

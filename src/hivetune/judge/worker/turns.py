"""Base and tuned model in turns, a few prompts at a time, so that whatever else the machine does meets both alike.

Whole models one after the other made the verdict follow the load: one adapter got `deploy`, then twice
`not-enough-evidence`. The order is base, tuned, tuned, base, ..., so that a load which grows or fades favours neither.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hivetune.judge.worker.generate import PROBE_TOKENS, settle_module
from hivetune.judge.worker.sides import SideName
from hivetune.machine.inventory import read_machine
from hivetune.release.worker.merge import Delta, add_delta, is_transposed, pair_up
from hivetune.train.worker.model.adapter import read_adapter

# Blocks are the units of the interval on latency: with 12 of them Student's t is 1.12 times the normal quantile.
FEWEST_BLOCKS = 12
# Of the memory that is free, how much a second set of weights may take; caches and activations need the rest.
SHARE_FOR_WEIGHTS = 0.5


def blocks(prompts: Sequence[Sequence[int]], slots: int) -> list[list[int]]:
    """The prompts' indices in blocks of at most `slots`, at least FEWEST_BLOCKS where there are as many prompts.

    By length, longest first: prompts of a block are computed together, padded to the longest.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    width = max(1, min(slots, len(prompts) // FEWEST_BLOCKS))
    return [order[start : start + width] for start in range(0, len(order), width)]


class BothModels:
    """One module that is the base or the tuned model, with merged weights as they are shipped.

    Where memory allows, the adapted weights are kept twice and exchanged. Else the tuned ones replace the base's, and
    the base is read again for its next turn.
    """

    def __init__(self, load: Callable[[], nn.Module], adapter: Path | None, prompts: Sequence[Sequence[int]]):
        self._load = load
        self.module = load()
        self.side: SideName = "base"
        self.cached = settle_module(self.module, prompts)  # and the warm-up
        self._attention = self.module.config._attn_implementation
        self._probe = min(prompts, key=len)[:PROBE_TOKENS]
        self._deltas: Mapping[str, Delta] = {}
        self._idle: dict[str, Tensor] = {}  # the adapted weights of the model whose turn it is not
        if adapter is not None:
            lora, tensors = read_adapter(adapter)
            self._deltas = pair_up(tensors, lora)
        size_bytes = sum(self.module.get_parameter(name).nbytes for name in self._deltas)
        if size_bytes <= SHARE_FOR_WEIGHTS * _free_bytes(next(self.module.parameters()).device):
            self._idle = {name: self._merged(name) for name in self._deltas}

    @property
    def idle_bytes(self) -> int:
        """What the model whose turn it is not holds; a model that is served alone does without."""
        return sum(tensor.nbytes for tensor in self._idle.values())

    @torch.no_grad()
    def turn_to(self, side: SideName) -> None:
        if side == self.side:
            return
        if self._idle:
            for name, waiting in self._idle.items():
                parameter = self.module.get_parameter(name)
                self._idle[name], parameter.data = parameter.data, waiting
        elif side == "tuned":
            for name in self._deltas:
                self.module.get_parameter(name).copy_(self._merged(name))
        else:
            del self.module
            gc.collect()
            self.module = self._load()
            if self.module.config._attn_implementation != self._attention:
                self.module.set_attn_implementation(self._attention)
        self.side = side

    @torch.no_grad()
    def probe_s(self) -> float:
        """Seconds of a forward pass that is always the same: what differs is the machine."""
        tokens_1P = torch.tensor([list(self._probe)], device=next(self.module.parameters()).device)
        started = time.perf_counter()
        self.module(input_ids=tokens_1P, use_cache=False).logits[0, -1].argmax().item()  # waits for the device
        return time.perf_counter() - started

    @torch.no_grad()
    def _merged(self, name: str) -> Tensor:
        """W + scale * B A, rounded once to the weight's precision."""
        weight, owner = self.module.get_parameter(name), self.module.get_submodule(name.rpartition(".")[0])
        return add_delta(weight, self._deltas[name], transposed=is_transposed(owner)).to(weight.dtype).contiguous()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_machine().available_bytes

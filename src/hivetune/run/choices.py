"""The choices of a run, made by rules before step 0 and kept in config.resolved.yaml.

A recorded choice is never made again, so a resumed run computes as it began. The changes of a recovery apply to one
worker and are not recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Choices:
    """The choices of a run; None: the engine's default. A recovery's changes have the same form.

    `threads`: torch's. `budget_tokens`: the most in a micro-batch, which is then cut `halvings` times in half.
    `pack_tokens`: what a micro-batch aims at where workers compute them (config: workers), whatever their number.
    `recompute`: layers whose activations are computed again in the backward pass. `path_why`: why the general path.
    `kernels`: of the functions of rows, our own in C++ ("native", on a processor), torch.compile's ("compiled", on a
    card) or plain "torch"; `kernels_why`: why plain torch.
    `products`: what multiplies on a CPU, a library or our own kernel (train/worker/model/fast/backend.py).
    `attention`: as transformers names it. `streamed`: the number of first layers whose frozen weights do not stay on
    the device; the bits are the same.
    `agreement`: the evidence that the fast path is right (train/worker/check.py). `peak_bytes`: the predicted peak of
    memory. `environment`: variables of the worker over the inherited ones, null for one that is taken away
    (machine/findings.py).
    """

    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    budget_tokens: int | None = None
    pack_tokens: int | None = None
    recompute: int | None = None
    path: Literal["fast", "general"] | None = None
    path_why: str | None = None
    kernels: Literal["native", "compiled", "torch"] | None = None
    kernels_why: str | None = None
    products: Literal["torch", "onednn", "native"] | None = None
    attention: str | None = None
    halvings: int | None = None
    streamed: int | None = None
    agreement: Mapping[str, Any] | None = None
    peak_bytes: int | None = None
    environment: Mapping[str, str | None] | None = None

    def made(self) -> dict[str, Any]:
        """Return the choices that are set, as plain values."""
        return {name: value for name in self.__dataclass_fields__ if (value := getattr(self, name)) is not None}

    def over(self, base: "Choices") -> "Choices":
        """Return `base` with these choices in place of its own."""
        return replace(base, **self.made())


NO_CHOICES = Choices()

"""The choices of a run, made by rules before step 0 and stored in config.resolved.yaml.

A stored choice is never made again, so a resumed run computes as it began. Changes that a recovery makes apply to one
worker only and are not stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Choices:
    """The choices of a run; None means the engine's default. The changes of a recovery are written as `Choices` too."""

    device: str | None = None
    dtype: str | None = None
    threads: int | None = None  # torch's
    budget_tokens: int | None = None  # the most in a micro-batch, which is then cut `halvings` times in half
    pack_tokens: int | None = None  # what a micro-batch aims at where workers compute them, whatever their number
    recompute: int | None = None  # layers whose activations are computed again in the backward pass
    path: Literal["fast", "general"] | None = None
    path_why: str | None = None  # why the general one
    # Of the functions of rows: our own in C++ on a processor, torch.compile's on a card, or plain torch.
    kernels: Literal["native", "compiled", "torch"] | None = None
    kernels_why: str | None = None  # why plain torch
    # What multiplies on a CPU: a library or our own kernel (train/worker/model/fast/backend.py).
    products: Literal["torch", "onednn", "native"] | None = None
    attention: str | None = None  # as transformers names it
    halvings: int | None = None
    streamed: int | None = None  # first layers whose frozen weights do not stay on the device; the bits are the same
    agreement: Mapping[str, Any] | None = None  # the evidence that the fast path is right (train/worker/check.py)
    peak_bytes: int | None = None  # of memory, as predicted
    # Variables of the worker over the inherited ones, null for one that is taken away (machine/findings.py).
    environment: Mapping[str, str | None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the choices that are set, as plain values."""
        return {name: value for name in self.__dataclass_fields__ if (value := getattr(self, name)) is not None}

    def updated(self, changes: "Choices") -> "Choices":
        """Return these choices, with those that `changes` sets replaced."""
        return replace(self, **changes.as_dict())


NO_CHOICES = Choices()

"""The comparison before step 0: does the fast path compute what transformers computes, on this machine?

A few rows of the run and adapters that are not zero go through both. The loss of each row and the whole gradient must
agree as far as the precision goes. A config that the fast path misreads, a kernel that this compiler got wrong, a shape
that a card computes wrongly: each shows here, and the run takes a path that is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hivetune.data.snapshot import Snapshot
from hivetune.run.choices import Choices
from hivetune.train.plan.memory import STREAM_BUFFERS, TrainingSetup
from hivetune.train.worker.model.adapter import initialise, same_views
from hivetune.train.worker.model.protocol import Document, LoraModel, read_documents

ROWS, TOKENS = 4, 1024
# Of a model that is streamed: a whole turn of every family's pattern of windows (six layers in Gemma 3).
MAX_LAYERS_COMPARED = 6
# Nats a token, and relative to the gradient's length. Two right computations of SmolLM2 differ by 1e-6 and 4e-6 in
# float32, by 0.03 and 0.05 in bfloat16; a layout with its loss out of order was 10 nats off (docs/log.md).
LOSS = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.12, "float16": 0.06}
GRADIENT = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.15, "float16": 0.08}
GENERAL, PLAIN_KERNELS = Choices(path="general"), Choices(kernels="torch")


@dataclass(frozen=True)
class Computed:
    """The result of a model: mean nll of each row [B], and the whole gradient, ordered by PEFT name, in one vector [N].

    Both are float64 on the CPU.
    """

    nll_B: Tensor
    grad_N: Tensor
    dtype: torch.dtype


def right_choices(
    load: Callable[[Choices], LoraModel],
    documents: Sequence[Document],
    *,
    truth_dtype: str | None = None,
) -> Choices:
    """Return choices under which the model computes what transformers does, with the evidence as `agreement`.

    Nothing is chosen where no fast path is asked for. `load` makes a model without dropout under these choices over the
    run's; no two are alive at the same time. `truth_dtype`: a wider precision that has room here. Where the two
    disagree, the fast path is compared with transformers in that precision.
    """
    model = load(Choices())
    if model.path == "general":
        return Choices()
    fast = answer(model, documents)
    del model
    plain = answer(load(GENERAL), documents)
    off, evidence = difference(fast, plain), dict[str, Any]()
    if not off.is_rounding and truth_dtype is not None and truth_dtype != off.dtype:
        theirs, plain = plain, answer(load(replace(GENERAL, dtype=truth_dtype)), documents)
        off, evidence = difference(fast, plain), {"truth": truth_dtype, "theirs": asdict(difference(theirs, plain))}
    if off.is_rounding:
        return Choices(agreement={**asdict(off), **evidence})
    plain_off = difference(answer(load(PLAIN_KERNELS), documents), plain)
    text = f"the fast path was {off.loss:.2g} nats a token and {off.gradient:.0%} of the gradient off"
    if plain_off.is_rounding:
        instead_of = f"{text} with its own kernels"
        return replace(PLAIN_KERNELS, agreement={**asdict(plain_off), **evidence, "instead_of": instead_of})
    return replace(GENERAL, path_why=text)


def layers_compared(setup: TrainingSetup) -> int | None:
    """Return how many layers are compared: as many as stay on the device; None for all."""
    on_device = setup.architecture.layers - setup.streamed + STREAM_BUFFERS
    return min(on_device, MAX_LAYERS_COMPARED) if setup.streamed else None


def check_documents(snapshot: Snapshot, rows: Sequence[int]) -> list[Document]:
    """Return the shortest of `rows`: at least one, as many as are cheap."""
    chosen: list[int] = []
    for row in sorted(rows, key=lambda row: (snapshot.length(row), row))[:ROWS]:
        if not chosen or sum(map(snapshot.length, [*chosen, row])) <= TOKENS:
            chosen.append(row)
    return read_documents(snapshot, chosen)


def answer(model: LoraModel, documents: Sequence[Document]) -> Computed:
    """Compute loss and gradient with adapters that depend on their names alone and are not zero."""
    initialise(model.adapter, 0)
    for name, view in model.adapter.items():
        if ".lora_B." in name:
            initialise({name.replace(".lora_B.", ".lora_A."): view}, 1)
            view.mul_(0.1)
    trained_B = torch.tensor([int(document.trained_L.sum()) for document in documents], dtype=torch.float64)
    nll_B = model.nll(documents).to("cpu", torch.float64) / trained_B
    model.backward(documents, 1.0 / float(trained_B.sum()))
    gradients = same_views(model.grad_N, model.adapter)
    grad_N = torch.cat([gradients[name].flatten().to("cpu", torch.float64) for name in sorted(gradients)])
    return Computed(nll_B, grad_N, model.dtype)


@dataclass(frozen=True)
class Difference:
    """The difference between two results.

    `loss`: the largest of a row, nats a token; `gradient`: relative to the other's length.
    """

    loss: float
    gradient: float
    dtype: str

    @property
    def is_rounding(self) -> bool:
        """Return whether rounding explains the difference; NaN is never rounding."""
        return self.loss <= LOSS[self.dtype] and self.gradient <= GRADIENT[self.dtype]


def difference(fast: Computed, plain: Computed) -> Difference:
    """Return how far two results are apart."""
    return Difference(
        loss=float((fast.nll_B - plain.nll_B).abs().max()),
        gradient=float((fast.grad_N - plain.grad_N).norm() / plain.grad_N.norm()),
        dtype=str(fast.dtype).removeprefix("torch."),
    )

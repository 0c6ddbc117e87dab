"""The comparison before step 0: does the fast path compute what transformers computes, on this machine?

A few rows of the run and adapters that are not zero go through both. The loss of each row and the whole gradient must
agree as far as the precision goes. A config that the fast path misreads, a kernel that this compiler got wrong, a shape
that a card computes wrongly: each shows here, and the run takes a path that is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from hivetune.data.snapshot import Snapshot
from hivetune.run.choices import Choices
from hivetune.train.worker.model.adapter import initialise, same_views
from hivetune.train.worker.model.protocol import Document, LoraModel, read_documents

ROWS, TOKENS = 4, 1024
# Of a model that is streamed: a whole turn of every family's pattern of windows (six layers in Gemma 3).
MAX_LAYERS_COMPARED = 6
# Nats a token, and relative to the gradient's length. Two right computations of SmolLM2 differ by 1e-6 and 4e-6 in
# float32, by 0.03 and 0.05 in bfloat16; a layout with its loss out of order was 10 nats off (docs/log.md).
LOSS = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.12, "float16": 0.06}
GRADIENT = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.15, "float16": 0.08}


def right_choices(load: Callable[[Choices], LoraModel], documents: Sequence[Document], truth_dtype: str) -> Choices:
    """Return choices under which the model computes what transformers does, with the evidence as `agreement`.

    `load` makes a model without dropout under these choices over the run's; no two are alive at the same time.
    `truth_dtype`: what transformers computes in, as wide as has room: in bfloat16 it was further from float64 than the
    fast path for a mixture of experts, and no truth.
    """
    truth = answer(load(Choices(path="general", dtype=truth_dtype)), documents)
    wrong = ""
    for changes in (Choices(), Choices(kernels="torch")):
        off = difference(answer(load(changes), documents), truth)
        if off.is_rounding:
            return replace(changes, agreement={**asdict(off), "truth": truth_dtype, "instead_of": wrong})
        wrong = wrong or f"the fast path was {off.loss:.2g} nats a token and {off.gradient:.0%} of the gradient off"
    return Choices(path="general", path_why=wrong)


def check_documents(snapshot: Snapshot, rows: Sequence[int]) -> list[Document]:
    """Return the shortest of `rows`: at least one, as many as are cheap."""
    chosen: list[int] = []
    for row in sorted(rows, key=lambda row: (snapshot.length(row), row))[:ROWS]:
        if not chosen or sum(map(snapshot.length, [*chosen, row])) <= TOKENS:
            chosen.append(row)
    return read_documents(snapshot, chosen)


@dataclass(frozen=True)
class Computed:
    """The result of a model: mean nll of each row [B], and the whole gradient, ordered by PEFT name, in one vector [N].

    Both are float64 on the CPU.
    """

    nll_B: torch.Tensor
    grad_N: torch.Tensor
    dtype: str


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
    return Computed(nll_B, grad_N, str(model.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Difference:
    """The difference between two results.

    `loss`: the largest of a row, nats a token; `gradient`: relative to the other's length; `dtype`: of the first.
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
    loss = float((fast.nll_B - plain.nll_B).abs().max())
    return Difference(loss, float((fast.grad_N - plain.grad_N).norm() / plain.grad_N.norm()), fast.dtype)

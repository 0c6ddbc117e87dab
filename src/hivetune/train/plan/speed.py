"""The time that a step takes: operations by formula, and the rate of the model's last run here or a published one."""

from collections.abc import Sequence
from dataclasses import dataclass

from hivetune.train.plan.layout import TrimmedDocument, make_layout, multiples_of, split_documents, token_multiple
from hivetune.train.plan.memory import TrainingSetup

# The share of a published rate of products that a whole step reaches; measured ones lie between 0.35 and 0.6
# (docs/performance.md).
PUBLISHED_SHARE, PUBLISHED_ERROR = 0.45, 0.5
# Two runs of one model differ in their rows' lengths and in what else the machine did.
LAST_RUN_ERROR = 0.25
LAST_RUN = "this model's last run here"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one micro-batch: tokens, sum of squared document lengths, positions with a loss."""

    tokens: int
    squares: int
    trained: int

    def __add__(self, shape: "StepShape") -> "StepShape":
        return StepShape(self.tokens + shape.tokens, self.squares + shape.squares, self.trained + shape.trained)


def shape_of(length: int, trained: int) -> StepShape:
    """Return the shape of one document, computed whole."""
    return StepShape(length, length * length, trained)


def micro_batch_shapes(
    setup: TrainingSetup, documents: Sequence[TrimmedDocument], budget_tokens: int
) -> list[StepShape]:
    """Return the layout of each micro-batch of a step on these documents, as on the fast path.

    The general path pads its documents; that loss is not counted.
    """
    fast = setup.path == "fast"
    multiple = token_multiple(setup.kind, setup.dtype, setup.products) if fast else 1
    shapes = []
    for batch in split_documents(documents, budget_tokens, share=fast):
        layout = make_layout([documents[index] for index in batch], share=fast, pad=multiples_of(multiple))
        squares = sum((part.depth + part.size) ** 2 - part.depth**2 for part in layout.segments)
        shapes.append(StepShape(layout.size, squares, len(layout.rows)))
    return shapes


def step_flops(setup: TrainingSetup, shape: StepShape) -> float:
    """Return the floating point operations of forward and backward.

    For each token: 4 N for the frozen linears (forward and input gradient, 2 each; no weight gradient) and 6 for each
    adapter parameter (forward, input and weight gradient). For each document of length s: 3.5 x 2 L q s^2 for causal
    attention, with two products forward (4 q s^2, half of it masked) and five backward with the scores recomputed
    (FlashAttention-2, arXiv 2307.08691). For each trained token: 4 V d for the logits and the gradient of their input,
    made in the forward pass. A recomputed layer adds another forward.
    """
    a = setup.architecture
    recomputed = setup.recompute / a.layers
    trained = setup.adapter_parameters
    linear = (4 + 2 * recomputed) * a.linear_parameters + (6 + 2 * recomputed) * trained
    attention = (3.5 + recomputed) * 2 * a.layers * a.q
    logits = 4 * a.vocabulary * a.hidden
    return linear * shape.tokens + attention * shape.squares + logits * shape.trained


@dataclass(frozen=True)
class Rate:
    """The operations a second that steps reach on a device. `error`: half-width of the bar, as a share."""

    flops_per_s: float
    error: float
    source: str


def published_rate(products_per_s: float, source: str) -> Rate:
    """Return the rate of steps by a published rate of large products."""
    return Rate(PUBLISHED_SHARE * products_per_s, PUBLISHED_ERROR, source)


def rate_key(setup: TrainingSetup) -> str:
    """Return the key of a model's last rate in a machine's profile: model, precision, path and device."""
    a = setup.architecture
    return f"{setup.kind} {a.family} {a.parameters} parameters, {setup.precision}, {setup.path}"

"""The time that a step takes: operations by formula, a rate by measurement, an error bar that says which.

From a formula and a published rate the error is a factor of two. From two probe steps on the machine it is 10 %, while
the machine stays as it was. A canary GEMM (one fixed matrix product) before and during the run checks that. Predicted
and actual times: docs/performance.md.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from hivetune.base.typed import from_plain
from hivetune.base.units import step_time
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.plan.layout import TrimmedDocument, make_layout, multiples_of, split_documents, token_multiple
from hivetune.train.plan.memory import STREAM_BUFFERS, Affine, TrainingSetup, fit_affine, fit_correction, layer_bytes

# The share of the GEMM rate that a step reaches without a probe; measured ones lie between 0.35 and 0.6
# (docs/performance.md).
UNPROBED_SHARE = 0.45
UNPROBED_ERROR = 0.5
PROBED_TIME_ERROR = 0.10
# The two probe steps contradict each other: something else uses the machine (seen at load 10: 501 tokens faster than
# 371, docs/log.md).
NOISY_ERROR = 0.3
PROBED = "two probe steps on this machine"
# Overhead of a micro-batch: launches of some 20 kernels a layer on a card, Python on a CPU.
OVERHEAD_S = {"cpu": 0.01, "cuda": 0.02, "rocm": 0.02}
# Beyond this change of the canary's rate a comparison says nothing about the prediction.
VOID_AT = 0.05
# Below some tokens a GEMM only reads its weights: rate(T) = rate * T / (T + half). Half is rate / bandwidth, in tokens.
CPU_HALF_TOKENS = 32
BUCKET_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one optimizer step: tokens, sum of squared document lengths, positions with a loss."""

    tokens: int
    squares: int
    trained: int

    def __add__(self, shape: "StepShape") -> "StepShape":
        return StepShape(self.tokens + shape.tokens, self.squares + shape.squares, self.trained + shape.trained)


def shape_of(length: int, trained: int) -> StepShape:
    """Return the shape of one document, computed whole."""
    return StepShape(length, length * length, trained)


def micro_batch_shapes(
    setup: TrainingSetup, documents: Sequence[TrimmedDocument], budget_tokens: int, *, share: bool
) -> list[StepShape]:
    """Return the layout of each micro-batch of a step on these documents, as on the fast path.

    `share`: a common prefix is computed once. The general path pads its documents; that loss is not counted.
    """
    fast = setup.path == "fast"
    multiple = token_multiple(setup.kind, setup.dtype, setup.products) if fast else 1
    shapes = []
    for batch in split_documents(documents, budget_tokens, share=share and fast):
        layout = make_layout([documents[index] for index in batch], share=share and fast, pad=multiples_of(multiple))
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
    trained = setup.active_adapter_parameters or setup.adapter_parameters
    linear = (4 + 2 * recomputed) * a.linear_parameters + (6 + 2 * recomputed) * trained
    attention = (3.5 + recomputed) * 2 * a.layers * a.q
    logits = 4 * a.vocabulary * a.hidden
    return linear * shape.tokens + attention * shape.squares + logits * shape.trained


def streamed_flops(setup: TrainingSetup, shape: StepShape) -> tuple[float, float]:
    """Return those `step_flops` that hide the reading of streamed layers: theirs, forward and backward."""
    a = setup.architecture
    trained = setup.active_adapter_parameters or setup.adapter_parameters
    forward = 2 * (a.linear_parameters + trained) * shape.tokens + 2 * a.layers * a.q * shape.squares
    whole = step_flops(replace(setup, recompute=0), replace(shape, trained=0))
    recomputed = min(setup.recompute, setup.streamed) / a.layers * forward
    share = setup.streamed / a.layers
    return share * forward, share * (whole - forward) + recomputed


@dataclass(frozen=True)
class Rate:
    """The operations a second that a step reaches on a device.

    error: half-width of the bar, as a share. overhead_s: what each micro-batch costs besides. half_tokens: at so many
    tokens half of the rate is reached, because products that small wait for their weights; 0 where the rate was fitted.
    read_bytes_per_s: the rate at which streamed layers come; None where that was not measured.
    """

    flops_per_s: float
    error: float
    overhead_s: float = 0.0
    half_tokens: float = CPU_HALF_TOKENS
    source: str = "published rate"
    read_bytes_per_s: float | None = None

    def seconds(self, setup: TrainingSetup, micro_batches: Iterable[StepShape]) -> float:
        """Return the seconds of a step with these micro-batches."""
        return sum(
            step_flops(setup, shape) / self._reached(shape) + self.overhead_s + self.waiting_s(setup, shape)
            for shape in micro_batches
            if shape.tokens
        )

    def waiting_s(self, setup: TrainingSetup, shape: StepShape) -> float:
        """Return the seconds for which computing waits for streamed layers.

        Each pass reads all of them but the three that the pass before it left there, while it computes all but its
        first and its last.
        """
        reads = setup.streamed - STREAM_BUFFERS
        if reads <= 0 or self.read_bytes_per_s is None:
            return 0.0
        read_s = reads * layer_bytes(setup) / self.read_bytes_per_s
        hides = (setup.streamed - 2) / setup.streamed
        return sum(max(0.0, read_s - hides * flops / self._reached(shape)) for flops in streamed_flops(setup, shape))

    def _reached(self, shape: StepShape) -> float:
        return self.flops_per_s * shape.tokens / (shape.tokens + self.half_tokens)


def unprobed_rate(gemm_flops_per_s: float, bandwidth: float | None, *, kind: str, source: str) -> Rate:
    """Return the rate by a GEMM's rate alone, measured here or published."""
    half = gemm_flops_per_s / bandwidth if bandwidth else CPU_HALF_TOKENS
    return Rate(UNPROBED_SHARE * gemm_flops_per_s, UNPROBED_ERROR, OVERHEAD_S[kind], half, source)


def probed_rate(
    setup: TrainingSetup, points: Sequence[tuple[StepShape, float]], *, gemm_flops_per_s: float = math.inf
) -> Rate:
    """Return the rate by measured steps (shape, seconds) of one micro-batch each: time as a line over operations.

    A slope above 1.1 times the GEMM rate or a negative overhead is noise: a step is not faster than its products.
    """
    fitted = fit_affine([(step_flops(setup, shape), seconds) for shape, seconds in points])
    shape, seconds = max(points, key=lambda point: point[0].tokens)
    if fitted.slope > 1 / (1.1 * gemm_flops_per_s) and fitted.constant >= -0.01 * seconds:
        return Rate(1 / fitted.slope, PROBED_TIME_ERROR, max(0.0, fitted.constant), 0.0, PROBED)
    # The machine is noisy: the rate of the larger step, and the overhead that is assumed without any probe.
    overhead_s = min(OVERHEAD_S[setup.kind], seconds / 2)
    return Rate(step_flops(setup, shape) / (seconds - overhead_s), NOISY_ERROR, overhead_s, 0.0, PROBED)


def probe_key(setup: TrainingSetup) -> str:
    """Return the key of a probe in a machine's profile: model, adapters, precision and device."""
    a = setup.architecture
    nf4 = " nf4" if setup.quantized else ""
    return f"{setup.kind} {a.family} {a.parameters} parameters, {setup.adapter_parameters} trained, {setup.dtype}{nf4}"


class Point(NamedTuple):
    """One measured step of one micro-batch; `seconds` without waiting for streamed layers."""

    shape: StepShape
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Measured:
    """The result of a probe. `setup`: as the loaded model computes it; `canary_flops_per_s`: of the own canary.

    `changes`: the choices under which the model computes right (worker/measure/agreement.py).
    """

    setup: TrainingSetup
    points: list[Point]
    load_peak_bytes: int
    canary_flops_per_s: float
    changes: Choices = NO_CHOICES
    read_bytes_per_s: float | None = None
    """The rate at which streamed layers came."""

    @property
    def step_s(self) -> float:
        """Return the seconds of the largest step."""
        return self.points[-1].seconds

    @property
    def correction(self) -> Affine:
        """Return what the steps add to the formula of their peak."""
        return fit_correction(self.setup, [(point.shape.tokens, point.peak_bytes) for point in self.points])

    def rate(self, gemm_flops_per_s: float = math.inf) -> Rate:
        rate = probed_rate(self.setup, [point[:2] for point in self.points], gemm_flops_per_s=gemm_flops_per_s)
        return replace(rate, read_bytes_per_s=self.read_bytes_per_s)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for the profile."""
        return {
            **{name: getattr(self.setup, name) for name in ("path", "recompute", "streamed")},
            "points": [
                {**asdict(shape), "seconds": seconds, "peak_bytes": peak} for shape, seconds, peak in self.points
            ],
            "read_bytes_per_s": self.read_bytes_per_s,
            "load_peak_bytes": self.load_peak_bytes,
            "canary_flops_per_s": self.canary_flops_per_s,
            "changes": self.changes.made(),
        }


def read_measured(setup: TrainingSetup, plain: Mapping[str, Any]) -> Measured:
    """Return what `Measured.to_plain` wrote, for the same model, adapters, precision and device."""
    return Measured(
        replace(setup, path=plain["path"], recompute=plain["recompute"], streamed=plain.get("streamed", 0)),
        [
            Point(StepShape(point["tokens"], point["squares"], point["trained"]), point["seconds"], point["peak_bytes"])
            for point in plain["points"]
        ],
        plain.get("load_peak_bytes", 0),
        plain.get("canary_flops_per_s", 0.0),
        from_plain(Choices, plain.get("changes", {})),
        plain.get("read_bytes_per_s"),
    )


@dataclass(frozen=True)
class Prediction:
    """A prediction in the run's choices from before step 0, to compare with the actual figures."""

    flops_per_s: float
    overhead_s: float
    error: float
    peak_bytes: int
    peak_error: float
    canary_flops_per_s: float
    read_bytes_per_s: float | None = None

    @property
    def rate(self) -> Rate:
        return Rate(self.flops_per_s, self.error, self.overhead_s, 0.0, PROBED, self.read_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Timed:
    """A finished step: the tokens of its rows, and its seconds, predicted and measured."""

    tokens: int
    predicted_s: float
    actual_s: float


def predicted_and_actual(
    prediction: Prediction,
    steps: Iterable[Timed],
    *,
    peak_bytes: int | None = None,
    canary: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the report after a run: median predicted and measured seconds for each bucket of tokens, and the peak.

    `canary`: rates of the canary GEMM beside those steps. `void` is true when their median is more than 5 % off: then
    the machine changed under the run, and the comparison says nothing.
    """
    measured: dict[int, list[Timed]] = {}
    for step in steps:
        measured.setdefault(-(-step.tokens // BUCKET_TOKENS) * BUCKET_TOKENS, []).append(step)
    buckets = []
    for bucket, timed in sorted(measured.items()):
        predicted_s = statistics.median(step.predicted_s for step in timed)
        actual_s = statistics.median(step.actual_s for step in timed)
        off = predicted_s / actual_s - 1
        buckets.append(
            {"tokens": bucket, "steps": len(timed), "predicted_s": predicted_s, "actual_s": actual_s, "off": off}
        )
    moved = abs(statistics.median(canary) / prediction.canary_flops_per_s - 1) if canary else 0.0
    report: dict[str, Any] = {"buckets": buckets, "canary_moved": moved, "void": moved > VOID_AT}
    if peak_bytes:
        report["peak"] = {"predicted_bytes": prediction.peak_bytes, "actual_bytes": peak_bytes}
        report["peak"]["off"] = prediction.peak_bytes / peak_bytes - 1
    report["held"] = all(abs(bucket["off"]) <= prediction.error for bucket in buckets)
    return report


# Between processes of one machine gloo sums 35 MB in 36 to 51 ms on two busy cores, and Ray's object store carries them
# in 6 to 78 ms.
LOCAL_BYTES_PER_S = 1e9
WEIGHT_BYTES = 4
GRADIENT_BYTES = 8
# With less gain than this, another run makes better use of the other card.
WORTH_STARTING = 1.3


@dataclass(frozen=True)
class Worth:
    """The predicted gain of more workers. Whole packs are divided among them, which costs a transfer of weights and
    gradients. `alone_s`, `together_s`: a step by one worker and by all. `exchange_s`: the part of `together_s` that is
    bytes. `link`: what carries them, in words; "" inside one machine.
    """

    workers: int
    packs: int
    alone_s: float
    together_s: float
    exchange_s: float
    link: str = ""

    @property
    def gain(self) -> float:
        return self.alone_s / self.together_s

    @property
    def words(self) -> str:
        packs = "1 pack" if self.packs == 1 else f"{self.packs} packs"
        text = (
            f"{self.workers} workers: a step of {packs} takes {step_time(self.together_s)} instead of "
            f"{step_time(self.alone_s)}, {step_time(self.exchange_s)} of it for gradients and "
            f"weights{self.link and f' over {self.link}'}"
        )
        if self.gain >= WORTH_STARTING:
            return text
        return f"{text}: not worth it, use the other devices for other runs"


def worth_of(
    workers: int,
    packs: int,
    step_s: float,
    adapter_weights: int,
    *,
    bytes_per_s: float = LOCAL_BYTES_PER_S,
    link: str = "",
) -> Worth:
    """Return the worth of `workers` for `packs` of equal size in a step that takes one worker `step_s`.

    The run's own worker sends 4 bytes a weight of the adapter to each of the others in a step. It gets 8 bytes a weight
    back from each: the sum over its packs. `bytes_per_s` is the rate of its `link` to them.
    """
    packs = max(1, packs)
    longest = math.ceil(packs / workers)
    exchange_s = (WEIGHT_BYTES + GRADIENT_BYTES) * adapter_weights * min(workers - 1, packs - longest) / bytes_per_s
    return Worth(workers, packs, step_s, step_s * longest / packs + exchange_s, exchange_s, link)

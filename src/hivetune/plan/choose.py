"""Which precision, token budget and recompute depth a run gets on a device, or what would fit instead. Pure.

The effective batch is the user's and is never changed: only how it is cut into micro-batches is chosen here.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.knowledge.cards import known_model
from hivetune.machine.profile import WORTH_IT
from hivetune.models.architecture import Architecture, parse_architecture
from hivetune.models.targets import ALL_LINEAR
from hivetune.plan.device import Device
from hivetune.plan.layout import TrimmedDocument
from hivetune.plan.memory import Affine, Peak, TrainingSetup, adapters_of, disk_bytes, predict_peak, with_recompute
from hivetune.plan.speed import Rate, StepShape, micro_batch_shapes, shape_of, unprobed_rate
from hivetune.run.checkpoints import MEAN_TIME_BETWEEN_FAULTS_S, checkpoint_interval_s
from hivetune.run.choices import Choices

# So near to WORTH_IT two measurements of one busy machine may disagree (a canary's rate moved by 6 to 60 % on a machine
# that others used, docs/log.md): then what was decided there before stands.
NEAR_TIE = 1.25
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Beyond these a larger micro-batch gains no speed and costs memory: caches on a CPU, full GEMM tiles on a card.
LARGEST_BUDGET = {"cpu": 2048, "cuda": 32768, "rocm": 32768}
# Below this difference in speed, fewer micro-batches win (a shared prefix is computed once in each), then less memory;
# least memory alone chose 192 tokens on a noisy machine and lost the shared prefixes (docs/log.md).
SAME_SPEED = 0.03
BUCKET = 64
# Models to compare with: one of each size that people train at home.
COMPARED = ("smollm2-135m", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct")
COMPARED_LARGE = ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct")
DISK_BYTES_PER_S = 200e6


@dataclass(frozen=True)
class Workload:
    """What the data asks for. `lengths` and `trained` are tokens of one typical step's rows, `longest` of any row."""

    lengths: tuple[int, ...]
    trained: tuple[int, ...]
    longest: int
    rows: int
    batch_size: int
    epochs: float
    max_steps: int | None = None
    assumed: bool = False
    documents: tuple[tuple[TrimmedDocument, ...], ...] = ()
    """The rows of some steps where they are known; else the typical step stands for all."""
    share: bool = False
    """A common prefix is computed once."""

    @property
    def steps(self) -> int:
        whole = math.ceil(self.epochs * self.rows / self.batch_size)
        return min(whole, self.max_steps) if self.max_steps else max(1, whole)

    def micro_batches(self, setup: TrainingSetup, budget_tokens: int) -> list[list[StepShape]]:
        """Shapes of the micro-batches of each known step; of the typical step where only lengths are known."""
        if self.documents:
            return [micro_batch_shapes(setup, rows, budget_tokens, share=self.share) for rows in self.documents]
        batches: list[StepShape] = []
        for shape in map(shape_of, self.lengths, self.trained):
            if batches and batches[-1].tokens + shape.tokens <= budget_tokens:
                batches[-1] += shape
            else:
                batches.append(shape)
        return [batches]


@dataclass(frozen=True)
class Choice:
    """How the steps of a run are computed. `micro_batches` and `step_s` are means of the steps that were looked at."""

    setup: TrainingSetup
    device: Device
    budget_tokens: int
    micro_batches: float
    peak: Peak
    limit_bytes: int
    step_s: float
    error: float

    def to_choices(self) -> Choices:
        """What of it the engine reads."""
        return Choices(
            device=self.device.torch_name,
            dtype=self.setup.dtype,
            budget_tokens=self.budget_tokens,
            recompute=self.setup.recompute,
        )


def assumed_workload(
    *, longest: int, mean: float, rows: int, batch_size: int, epochs: float, max_steps: int | None, trained: float = 0.5
) -> Workload:
    """A workload of equal lengths, when nothing is known of the data but a mean."""
    length = max(2, min(round(mean), longest))
    lengths = (length,) * min(batch_size, max(rows, 1))
    counts = tuple(max(1, round(length * trained)) for _ in lengths)
    return Workload(lengths, counts, longest, rows, batch_size, epochs, max_steps, assumed=True)


def choose_dtype(wanted: str, device: Device) -> str:
    """The config's dtype, or for `auto` bfloat16 where its GEMM is clearly faster, else float32.

    Raises UsageError for a precision that the device does not compute in.
    """
    if wanted != "auto":
        if wanted not in device.rates:
            raise UsageError(f"{wanted} is unsupported on {device.name}. {device.note}", hint="set dtype: auto")
        return wanted
    return auto_dtype(device.rates, device.decided_dtype)


def auto_dtype(rates: Mapping[str, float], decided: str | None = None) -> str:
    """What `dtype: auto` is where matrix products run at these rates (any unit): bfloat16 if that is clearly faster.

    `decided`: what it was on this machine before (its profile). Near a tie that stands, so that two runs on one machine
    agree; rates that contradict it clearly win.
    """
    half, full = rates.get("bfloat16", 0.0), rates.get("float32")
    if decided is not None and decided in rates and full and WORTH_IT / NEAR_TIE <= half / full <= WORTH_IT * NEAR_TIE:
        return decided
    return "bfloat16" if full is None or half > WORTH_IT * full else "float32"


def fastest_that_fits(
    setup: TrainingSetup,
    device: Device,
    work: Workload,
    *,
    memory_share: float = 0.9,
    correction: Affine | None = None,
    rate: Rate | None = None,
) -> Choice:
    """The fastest token budget and recompute depth that fit. Raises DoesNotFit when not even the longest row does.

    `setup.dtype` comes from `choose_dtype`, `correction` and `rate` from probes. Every budget is tried with as few
    recomputed layers as fit: all products cost about the same operations per saved byte, so only their number matters.
    """
    limit = device.limit_bytes(memory_share)
    rate = rate or unprobed_rate(device.rates[setup.dtype], device.bandwidth, kind=device.kind, source=device.source)
    candidates = [_candidate(setup, device, work, budget, limit, correction, rate) for budget in _budgets(work, device)]
    fitting = [candidate for candidate in candidates if candidate is not None]
    if not fitting:
        smallest = predict_peak(with_recompute(setup, setup.architecture.layers), _round_up(work.longest), correction)
        raise DoesNotFit(
            f"at least {size_words(smallest.bytes)} are needed, {size_words(limit)} may be used on {device.name} "
            f"({size_words(device.free_bytes)} free, {100 * device.margin:.0f} % reserved)"
        )
    fastest = min(candidate.step_s for candidate in fitting)
    good = [candidate for candidate in fitting if candidate.step_s <= fastest * (1 + SAME_SPEED)]
    return min(good, key=lambda candidate: (candidate.micro_batches, candidate.peak.bytes, candidate.budget_tokens))


def _candidate(
    setup: TrainingSetup,
    device: Device,
    work: Workload,
    budget: int,
    limit: int,
    correction: Affine | None,
    rate: Rate,
) -> Choice | None:
    """This budget with as few recomputed layers as fit; None when it does not fit with all of them."""
    for layers in range(setup.architecture.layers + 1):
        deeper = with_recompute(setup, layers)
        peak = predict_peak(deeper, budget, correction)
        if peak.bytes <= limit:
            steps = work.micro_batches(setup, budget)
            seconds = statistics.mean(rate.seconds(deeper, shapes) for shapes in steps)
            packs = statistics.mean(map(len, steps))
            return Choice(deeper, device, budget, packs, peak, limit, seconds, rate.error)
    return None


def _budgets(work: Workload, device: Device) -> Sequence[int]:
    """Budgets that hold the longest row and are not larger than a whole step needs."""
    least, most = _round_up(work.longest), _round_up(max(sum(work.lengths), work.longest))
    cap = max(least, LARGEST_BUDGET[device.kind])
    return sorted({least, min(most, cap), *(budget for budget in BUDGETS if least <= budget <= min(most, cap))})


def _round_up(tokens: int) -> int:
    return -(-tokens // BUCKET) * BUCKET


@dataclass(frozen=True)
class Option:
    """One line of the table of what would fit."""

    model: str
    length: int
    rank: int
    precision: str
    choice: Choice | None
    peak_bytes: int
    """Of the choice, or `least_bytes` when nothing fits."""
    least_bytes: int
    """Predicted with every layer recomputed and micro-batches of one row of this length."""
    hours: float | None
    error: float
    disk: int

    @property
    def fits(self) -> bool:
        return self.choice is not None

    def to_plain(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name) for name in ("model", "length", "rank", "precision", "fits", "hours", "error")
        }
        return {**plain, "peak_bytes": self.peak_bytes, "least_bytes": self.least_bytes, "disk_bytes": self.disk}


@dataclass(frozen=True)
class Case:
    """One combination to try."""

    model: str
    architecture: Architecture
    length: int
    rank: int
    precision: str
    """A dtype, or nf4."""


def try_case(case: Case, device: Device, work: Workload, *, memory_share: float = 0.9) -> Option:
    """The case with every row as long as `case.length`, so that lengths can be compared."""
    quantized = case.precision == "nf4"
    dtype = choose_dtype("auto", device) if quantized else case.precision
    trained, active = adapters_of(case.architecture, case.rank, ALL_LINEAR)
    setup = TrainingSetup(
        case.architecture, trained, dtype, device.kind, quantized=quantized, active_adapter_parameters=active
    )
    share = sum(work.trained) / max(1, sum(work.lengths))
    at_length = assumed_workload(
        longest=case.length,
        mean=case.length,
        rows=work.rows,
        batch_size=work.batch_size,
        epochs=work.epochs,
        max_steps=work.max_steps,
        trained=share,
    )
    try:
        choice = fastest_that_fits(setup, device, at_length, memory_share=memory_share)
    except DoesNotFit:
        choice = None
    deepest = predict_peak(with_recompute(setup, case.architecture.layers), _round_up(case.length))
    return Option(
        model=case.model,
        length=case.length,
        rank=case.rank,
        precision=case.precision,
        choice=choice,
        peak_bytes=choice.peak.bytes if choice else deepest.bytes,
        least_bytes=deepest.bytes,
        hours=choice.step_s * at_length.steps / 3600 if choice else None,
        error=choice.error if choice else 0.0,
        disk=sum(disk_bytes(setup).values()),
    )


def precisions(device: Device) -> list[str]:
    """What the device computes in, fastest first, and 4-bit weights."""
    half = "bfloat16" if "bfloat16" in device.rates else "float16"
    found = [dtype for dtype in (half, "float32") if dtype in device.rates]
    return [*sorted(found, key=lambda dtype: -device.rates[dtype]), "nf4"]


def what_would_fit(
    own: Case, device: Device, work: Workload, others: Mapping[str, Architecture], *, memory_share: float = 0.9
) -> list[Option]:
    """The user's model over lengths, ranks and precisions, then other models with the user's settings."""
    lengths = sorted({own.length, *(n for n in (512, 2048, 8192) if n != own.length)})
    ranks = sorted({own.rank, 8, 64})
    cases = [
        replace(own, length=length, rank=rank, precision=precision)
        for length in lengths
        for rank in (ranks if length == own.length else [own.rank])
        for precision in (precisions(device) if rank == own.rank else [own.precision])
    ]
    cases += [
        replace(own, model=name, architecture=architecture, precision=precision)
        for name, architecture in others.items()
        for precision in dict.fromkeys((own.precision, "nf4"))
    ]
    return [try_case(case, device, work, memory_share=memory_share) for case in cases]


def advice(options: Sequence[Option], own: Case, most: int = 4) -> list[str]:
    """The nearest options that fit, in words: same model first, then precision, then rank."""
    fitting = [option for option in options if option.fits]
    near = sorted(
        fitting,
        key=lambda o: (o.model != own.model, o.precision != own.precision, abs(o.rank - own.rank), -o.peak_bytes),
    )
    return [
        f"{o.model}, length {o.length}, rank {o.rank}, {o.precision}: {size_words(o.peak_bytes)}" for o in near[:most]
    ]


def compared(own: str, device: Device) -> dict[str, Architecture]:
    """Other models to compare with on a device of this size, by name."""
    names = COMPARED + (COMPARED_LARGE if device.kind != "cpu" or device.memory_bytes > 24e9 else ())
    found = {name: known_model(name) for name in names if name != own}
    return {name: parse_architecture(config, name) for name, config in found.items() if config}


def with_advice(error: DoesNotFit, options: Sequence[Option], own: Case) -> DoesNotFit:
    """The same error, with what would fit as its hint."""
    near = "; ".join(advice(options, own))
    return DoesNotFit(error.message, hint=f"these would fit: {near}" if near else "choose a smaller model")


def power_loss_s(
    setup: TrainingSetup, step_s: float, every_s: float | None = None, *, disk_bytes_per_s: float = DISK_BYTES_PER_S
) -> float:
    """Most seconds of work that a power cut can lose: one step, or the checkpoint interval."""
    checkpoint_bytes = 12 * setup.adapter_parameters
    cost_s = max(0.05, checkpoint_bytes / disk_bytes_per_s)
    interval_s = every_s or checkpoint_interval_s(cost_s, MEAN_TIME_BETWEEN_FAULTS_S, blocking_s=0.1 * cost_s)
    return max(step_s, interval_s)


def size_words(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.0f} MB"

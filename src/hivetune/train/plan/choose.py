"""The choice of precision, token budget, recompute depth and streamed layers for a device, and what would fit instead.

Pure functions. The effective batch is the user's and is never changed: only how it is cut into micro-batches is chosen
here.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.knowledge.cards import known_model
from hivetune.machine.profile import WORTH_IT
from hivetune.models.architecture import ALL_LINEAR, Architecture, parse_architecture
from hivetune.run.checkpoints import MEAN_TIME_BETWEEN_FAULTS_S, checkpoint_interval_s
from hivetune.run.choices import Choices
from hivetune.train.plan.device import MARGIN, Device
from hivetune.train.plan.layout import TrimmedDocument
from hivetune.train.plan.memory import (
    WORTH_STREAMING,
    Affine,
    Peak,
    StreamSource,
    TrainingSetup,
    can_stream,
    disk_bytes,
    fewest_streamed,
    hiding_tokens,
    predict_peak,
    setup_of,
    source_of,
    with_streamed,
)
from hivetune.train.plan.speed import Rate, StepShape, micro_batch_shapes, shape_of, unprobed_rate

# This near to WORTH_IT two measurements of one busy machine may disagree: a canary's rate moved by 6 to 60 % on a
# machine that others used (docs/log.md). Then the earlier decision stands.
NEAR_TIE = 1.25
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Beyond these a larger micro-batch gains no speed and costs memory: caches on a CPU, full GEMM tiles on a card.
LARGEST_BUDGET = {"cpu": 2048, "cuda": 32768, "rocm": 32768}
# Below this difference in speed, fewer micro-batches win (a shared prefix is computed once in each), then less memory;
# least memory alone chose 192 tokens on a noisy machine and lost the shared prefixes (docs/log.md).
SAME_SPEED = 0.03
BUCKET = 64
DISK_BYTES_PER_S = 200e6


@dataclass(frozen=True)
class Workload:
    """The workload of the data. `lengths` and `trained` are tokens of one typical step's rows, `longest` of any row."""

    lengths: tuple[int, ...]
    trained: tuple[int, ...]
    longest: int
    rows: int
    batch_size: int
    epochs: float
    max_steps: int | None = None
    assumed: bool = False
    documents: tuple[tuple[TrimmedDocument, ...], ...] = ()
    """The rows of some steps, where they are known; else the typical step stands for all."""
    share: bool = False
    """Whether a common prefix is computed once."""

    @property
    def steps(self) -> int:
        whole = math.ceil(self.epochs * self.rows / self.batch_size)
        return min(whole, self.max_steps) if self.max_steps else max(1, whole)

    def micro_batches(self, setup: TrainingSetup, budget_tokens: int) -> list[list[StepShape]]:
        """Return the shapes of the micro-batches of each known step, or else of the typical step."""
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
class StreamedFrom:
    """The source of streamed layers, and its speed.

    From `hiding_tokens` tokens of a micro-batch on, reading them costs no time; `waited_s`: waiting time in a step.
    """

    source: StreamSource
    bytes_per_s: float
    hiding_tokens: float
    waited_s: float


@dataclass(frozen=True)
class Choice:
    """The way in which a run's steps are computed. `micro_batches` and `step_s` are means over the steps of the
    workload.
    """

    setup: TrainingSetup
    device: Device
    budget_tokens: int
    micro_batches: float
    peak: Peak
    limit_bytes: int
    step_s: float
    error: float
    streaming: StreamedFrom | None = None

    def to_choices(self) -> Choices:
        """Return the fields that the engine reads."""
        return Choices(
            device=self.device.torch_name,
            dtype=self.setup.dtype,
            budget_tokens=self.budget_tokens,
            recompute=self.setup.recompute,
            streamed=self.setup.streamed or None,
            stream_from=self.streaming.source if self.streaming else None,
        )


def assumed_workload(
    *, longest: int, mean: float, rows: int, batch_size: int, epochs: float, max_steps: int | None, trained: float = 0.5
) -> Workload:
    """Return a workload of equal lengths, for data of which nothing but a mean is known."""
    length = max(2, min(round(mean), longest))
    counts = min(batch_size, max(rows, 1))
    lengths, part = (length,) * counts, (max(1, round(length * trained)),) * counts
    return Workload(lengths, part, longest, rows, batch_size, epochs, max_steps, assumed=True)


def choose_dtype(setting: str, device: Device) -> str:
    """Return the config's dtype; for `auto`, bfloat16 where its GEMM is clearly faster, else float32.

    Raises UsageError for a precision that the device does not compute in.
    """
    if setting != "auto":
        if setting not in device.rates:
            why = f": {device.note}" if device.note else ""
            raise UsageError(f"{setting} is not supported on {device.name}{why}", hint="set dtype: auto")
        return setting
    return auto_dtype(device.rates, device.decided_dtype)


def auto_dtype(rates: Mapping[str, float], decided: str | None = None) -> str:
    """Return the precision of `dtype: auto` for these rates of matrix products (in any unit).

    It is bfloat16 if that is clearly faster. `decided` is what it was on this machine before, by its profile. Near a
    tie that stands, so that two runs on one machine agree; rates that clearly contradict it win.
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
    only_streamed: bool = False,
) -> Choice:
    """Return the fastest token budget, recompute depth and number of streamed layers that fit.

    `setup.dtype` comes from `choose_dtype`, `correction` and `rate` from probes. Every budget is tried with as few
    recomputed layers as fit: all products cost about the same operations per saved byte, so only their number matters.
    Where layers are streamed instead, fewer are recomputed. `only_streamed`: stream all layers that can be.

    Raises DoesNotFit when not even the longest row fits.
    """
    limit = device.limit_bytes(memory_share)
    rate = rate or unprobed_rate(device.rates[setup.dtype], device.bandwidth, kind=device.kind, source=device.source)
    search = _Search(setup, device, work, limit, correction, rate, only_streamed)
    fitting = [choice for budget in _budgets(work, device, search) for choice in search.with_budget(budget)]
    if not fitting:
        smallest = predict_peak(smallest_setup(setup), rounded_up(work.longest), correction)
        raise DoesNotFit(
            f"at least {size_text(smallest.bytes)} are needed, {size_text(limit)} may be used on {device.name} "
            f"({size_text(device.free_bytes)} free, {100 * MARGIN[device.kind]:.0f} % reserved)"
        )
    whole = [choice for choice in fitting if not choice.setup.streamed]
    if whole and min(c.step_s for c in fitting) > (1 - WORTH_STREAMING) * min(c.step_s for c in whole):
        fitting = whole
    fastest = min(choice.step_s for choice in fitting)
    good = [choice for choice in fitting if choice.step_s <= fastest * (1 + SAME_SPEED)]
    return min(good, key=lambda c: (c.micro_batches, c.setup.streamed, c.peak.bytes, c.budget_tokens))


def smallest_setup(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup that holds least memory: every layer recomputed, and streamed where it can be."""
    layers = setup.architecture.layers
    deepest = replace(setup, recompute=layers)
    return with_streamed(deepest, layers) if can_stream(setup) else deepest


@dataclass(frozen=True)
class _Search:
    """The options to try, with device and workload."""

    setup: TrainingSetup
    device: Device
    work: Workload
    limit_bytes: int
    correction: Affine | None
    rate: Rate
    only_streamed: bool

    @property
    def hiding_tokens(self) -> float:
        """Return the budget from which on streamed layers cost no time; 0 where none can be streamed."""
        if not can_stream(self.setup):
            return 0.0
        return hiding_tokens(self.setup, self.rate.flops_per_s, self._read_rate(self.setup)[1])

    def with_budget(self, budget: int) -> Iterator[Choice]:
        """Yield, for each number of recomputed layers, the choice with the fewest streamed layers that fits.

        The last one is the first that needs none streamed. A budget beyond the largest useful one is tried with
        streamed layers only.
        """
        beyond = budget > _largest(self.work, self.device)
        steps: dict[str, list[list[StepShape]]] = {}
        for layers in range(self.setup.architecture.layers + 1):
            deeper = replace(self.setup, recompute=layers)
            streamed = fewest_streamed(deeper, budget, self.correction, self.limit_bytes)
            if streamed is not None and self.only_streamed:
                streamed = self.setup.architecture.layers if can_stream(self.setup) else None
            if streamed == 0 and beyond:
                return
            if streamed is not None:
                setup = with_streamed(deeper, streamed)
                if setup.path not in steps:
                    steps[setup.path] = self.work.micro_batches(setup, budget)
                yield self._choice(setup, budget, steps[setup.path])
            if streamed == 0 or (streamed is not None and self.only_streamed):
                return

    def _choice(self, setup: TrainingSetup, budget: int, steps: Sequence[Sequence[StepShape]]) -> Choice:
        source, bytes_per_s = self._read_rate(setup)
        rate = replace(self.rate, read_bytes_per_s=bytes_per_s)
        hiding = hiding_tokens(setup, rate.flops_per_s, bytes_per_s)
        waited_s = statistics.mean(sum(rate.waiting_s(setup, shape) for shape in shapes) for shapes in steps)
        return Choice(
            setup,
            self.device,
            budget,
            statistics.mean(map(len, steps)),
            predict_peak(setup, budget, self.correction),
            self.limit_bytes,
            statistics.mean(rate.seconds(setup, shapes) for shapes in steps),
            rate.error,
            StreamedFrom(source, bytes_per_s, hiding, waited_s) if setup.streamed else None,
        )

    def _read_rate(self, setup: TrainingSetup) -> tuple[StreamSource, float]:
        source, published = source_of(setup, self.device)
        return source, self.rate.read_bytes_per_s or published


def _largest(work: Workload, device: Device) -> int:
    return max(rounded_up(work.longest), LARGEST_BUDGET[device.kind])


def _budgets(work: Workload, device: Device, search: _Search) -> Sequence[int]:
    """Return the budgets that hold the longest row and are not larger than a whole step needs."""
    least, most = rounded_up(work.longest), rounded_up(max(sum(work.lengths), work.longest))
    cap = min(most, max(least, max(_largest(work, device), rounded_up(math.ceil(search.hiding_tokens)))))
    cuts = {cap, min(most, _largest(work, device))}
    return sorted({least, *cuts, *(budget for budget in BUDGETS if least <= budget <= cap)})


def rounded_up(tokens: int) -> int:
    """Return `tokens` rounded up to a whole bucket."""
    return -(-tokens // BUCKET) * BUCKET


def power_loss_s(
    setup: TrainingSetup, step_s: float, every_s: float | None = None, *, disk_bytes_per_s: float = DISK_BYTES_PER_S
) -> float:
    """Return the most seconds of work that a power cut can lose: one step, or the checkpoint interval."""
    checkpoint_bytes = 12 * setup.adapter_parameters
    cost_s = max(0.05, checkpoint_bytes / disk_bytes_per_s)
    interval_s = every_s or checkpoint_interval_s(cost_s, MEAN_TIME_BETWEEN_FAULTS_S, blocking_s=0.1 * cost_s)
    return max(step_s, interval_s)


def size_text(size_bytes: float) -> str:
    """Return bytes in words."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.0f} MB"


# Models to compare with, one of each size that people train at home.
COMPARED = ("smollm2-135m", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct")
COMPARED_LARGE = ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct")


@dataclass(frozen=True)
class Case:
    """One combination of model, length, rank and precision to try."""

    model: str
    architecture: Architecture
    length: int
    rank: int
    precision: str
    """A dtype, or nf4."""
    streamed: bool = False
    """Whether all frozen layers are streamed, also where that is not needed."""


@dataclass(frozen=True)
class Option:
    """A case with its fitting form: one line of the table.

    `least_bytes`: the peak with every layer recomputed and streamed where it can be, and micro-batches of one row.
    """

    case: Case
    choice: Choice | None
    least_bytes: int
    hours: float | None
    disk: int

    @property
    def fits(self) -> bool:
        return self.choice is not None

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the choice, or the least one when nothing fits."""
        return self.choice.peak.bytes if self.choice else self.least_bytes

    def to_plain(self) -> dict[str, Any]:
        """Return the line as `plan --json` has it."""
        case, choice = self.case, self.choice
        return {
            **{name: getattr(case, name) for name in ("model", "length", "rank", "precision")},
            "fits": self.fits,
            "hours": self.hours,
            "error": choice.error if choice else 0.0,
            "streamed": choice.setup.streamed if choice else None,
            "step_s": choice.step_s if choice else None,
            "peak_bytes": self.peak_bytes,
            "least_bytes": self.least_bytes,
            "disk_bytes": self.disk,
        }


def try_case(case: Case, device: Device, work: Workload, *, memory_share: float = 0.9) -> Option:
    """Return the option of a case, with every row as long as `case.length`, so that lengths can be compared."""
    quantized = case.precision == "nf4"
    dtype = choose_dtype("auto", device) if quantized else case.precision
    setup = setup_of(case.architecture, case.rank, ALL_LINEAR, dtype, device.kind, quantized=quantized)
    at_length = assumed_workload(
        longest=case.length,
        mean=case.length,
        rows=work.rows,
        batch_size=work.batch_size,
        epochs=work.epochs,
        max_steps=work.max_steps,
        trained=sum(work.trained) / max(1, sum(work.lengths)),
    )
    try:
        choice = fastest_that_fits(setup, device, at_length, memory_share=memory_share, only_streamed=case.streamed)
    except DoesNotFit:
        choice = None
    return Option(
        case=case,
        choice=choice,
        least_bytes=predict_peak(smallest_setup(setup), rounded_up(case.length)).bytes,
        hours=choice.step_s * at_length.steps / 3600 if choice else None,
        disk=sum(disk_bytes(setup).values()),
    )


def precisions(device: Device) -> list[str]:
    """Return the precisions of the device, fastest first, and 4-bit weights."""
    half = "bfloat16" if "bfloat16" in device.rates else "float16"
    computed = [dtype for dtype in (half, "float32") if dtype in device.rates]
    return [*sorted(computed, key=lambda dtype: -device.rates[dtype]), "nf4"]


def fitting_options(
    base: Case, device: Device, work: Workload, others: Mapping[str, Architecture], *, memory_share: float = 0.9
) -> list[Option]:
    """Return options: the user's model over lengths, ranks and precisions, then other models."""
    lengths = sorted({base.length, *(n for n in (512, 2048, 8192) if n != base.length)})
    ranks = sorted({base.rank, 8, 64})
    streamed = try_case(replace(base, streamed=True), device, work, memory_share=memory_share)
    cases = [
        replace(base, length=length, rank=rank, precision=precision)
        for length in lengths
        for rank in (ranks if length == base.length else [base.rank])
        for precision in (precisions(device) if rank == base.rank else [base.precision])
    ]
    cases += [
        replace(base, model=name, architecture=architecture, precision=precision)
        for name, architecture in others.items()
        for precision in dict.fromkeys((base.precision, "nf4"))
    ]
    tried = [
        try_case(case, device, work, memory_share=memory_share)
        for case in cases
        # On a CPU 4-bit weights are unpacked right in whole blocks only (worker/model/general.py).
        if case.precision != "nf4" or device.kind != "cpu" or case.architecture.has_whole_blocks
    ]
    return [streamed, *tried] if streamed.fits else tried


def advice(options: Sequence[Option], base: Case, most: int = 4) -> list[str]:
    """Return the nearest options that fit, in words: same model first, then precision, then rank."""

    def distance(option: Option) -> tuple[bool, bool, int, int]:
        other = option.case
        return (
            other.model != base.model,
            other.precision != base.precision,
            abs(other.rank - base.rank),
            -option.peak_bytes,
        )

    near = sorted((option for option in options if option.fits), key=distance)[:most]
    lines = []
    for option in near:
        other, streamed = option.case, option.choice.setup.streamed if option.choice else 0
        layers = f", {streamed} layers streamed" if streamed else ""
        named = f"{other.model}, length {other.length}, rank {other.rank}, {other.precision}"
        lines.append(f"{named}{layers}: {size_text(option.peak_bytes)}")
    return lines


def compared(model: str, device: Device) -> dict[str, Architecture]:
    """Return other models to compare with on a device of this size, by name."""
    names = COMPARED + (COMPARED_LARGE if device.kind != "cpu" or device.memory_bytes > 24e9 else ())
    configs = {name: known_model(name) for name in names if name != model}
    return {name: parse_architecture(config, name) for name, config in configs.items() if config}


def with_advice(error: DoesNotFit, options: Sequence[Option], case: Case) -> DoesNotFit:
    """Return the same error, with fitting settings as its hint."""
    near = "; ".join(advice(options, case))
    return DoesNotFit(error.message, hint=f"these would fit: {near}" if near else "choose a smaller model")

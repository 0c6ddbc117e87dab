"""The form of a run's steps on a device: precision by a rule, the first of three forms that fits, and a step's time.

Pure functions of the config, the rows and the machine's facts: nothing is timed, and free memory has no influence. The
batch size is the user's; only its division into micro-batches is chosen.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hivetune.base.units import size
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.cards import known_model
from hivetune.models.architecture import parse_architecture
from hivetune.run.choices import Choices
from hivetune.train.plan.device import DISK_READ_BYTES_PER_S, LINK_BYTES_PER_S, Device
from hivetune.train.plan.layout import rounded_up
from hivetune.train.plan.memory import (
    Peak,
    TrainingSetup,
    can_stream,
    host_holds,
    layer_bytes,
    predict_peak,
    setup_of,
)
from hivetune.train.plan.steps import count_steps

BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Beyond these a larger micro-batch gains no speed and costs memory: caches on a CPU, full GEMM tiles on a card.
LARGEST_BUDGET = {"cpu": 2048, "cuda": 32768, "rocm": 32768}
# Below these a product waits for its weights, and recomputing layers costs less than it.
GOOD_BUDGET = {"cpu": 256, "cuda": 1024, "rocm": 1024}
BUCKET = 64
# The share of a published rate of products that a whole step reaches; measured ones lie between 0.35 and 0.6
# (docs/performance.md).
PUBLISHED_SHARE, PUBLISHED_ERROR = 0.45, 0.5
# Two runs of one model differ in their rows' lengths and in what else the machine did.
LAST_RUN_ERROR = 0.25
LAST_RUN = "this model's last run here"


def step_flops(setup: TrainingSetup, rows: Iterable[tuple[int, int]]) -> float:
    """Return the floating-point operations of forward and backward for rows of (length, trained tokens), one by one.

    Padding and shared prefixes are not counted. A run's measured rate is based on the same count, so it includes them.
    """
    a = setup.architecture
    recomputed = setup.recompute / a.layers  # a recomputed layer adds another forward
    # Of each token: 4 for the frozen linears (forward and input gradient, 2 each; no weight gradient) and 6 for each
    # adapter parameter (forward, input and weight gradient).
    linear = (4 + 2 * recomputed) * a.linear_parameters + (6 + 2 * recomputed) * setup.adapter_parameters
    # Causal attention: two products forward (4 q s^2, half of it masked) and five backward with the scores recomputed
    # (FlashAttention-2, arXiv 2307.08691).
    attention = (3.5 + recomputed) * 2 * a.layers * a.q
    # The logits and the gradient of their input, made in the forward pass.
    logits = 4 * a.vocabulary * a.hidden
    return sum(linear * length + attention * length**2 + logits * trained for length, trained in rows)


@dataclass(frozen=True)
class Rate:
    """The floating-point operations per second of training steps. `error`: half-width of the error bar, as a share."""

    flops_per_s: float
    error: float
    source: str


def published_rate(products_per_s: float, source: str) -> Rate:
    """Return the rate of training steps, estimated from a published rate of large matrix products."""
    return Rate(PUBLISHED_SHARE * products_per_s, PUBLISHED_ERROR, source)


def rate_key(setup: TrainingSetup) -> str:
    """Return the key of a model's last rate in a machine's profile: model, precision, path and device."""
    a = setup.architecture
    return f"{setup.kind} {a.family} {a.parameters} parameters, {setup.precision}, {setup.path}"


@dataclass(frozen=True)
class Workload:
    """The rows of a run, as far as time and memory depend on them.

    `lengths` and `trained`: the numbers of tokens and of trained tokens of each row of one typical step. `longest`:
    number of tokens of the longest row of all.
    """

    lengths: tuple[int, ...]
    trained: tuple[int, ...]
    longest: int
    rows: int
    batch_size: int
    epochs: float
    max_steps: int | None = None

    @property
    def steps(self) -> int:
        whole = max(1, count_steps(self.rows, self.batch_size, self.epochs))
        return min(whole, self.max_steps) if self.max_steps else whole

    def micro_batches(self, budget_tokens: int) -> int:
        """Return the number of micro-batches of the typical step, without shared prefixes."""
        count, used = 1, 0
        for length in self.lengths:
            if used and used + length > budget_tokens:
                count, used = count + 1, 0
            used += length
        return count


@dataclass(frozen=True)
class Choice:
    """The form of a run's steps. `micro_batches` and `step_s` (in seconds) are those of the typical step.

    `step_s` is None if no rate is known; `error` is the half-width of its error bar, as a share.
    """

    setup: TrainingSetup
    device: Device
    budget_tokens: int
    micro_batches: int
    peak: Peak
    limit_bytes: int
    step_s: float | None = None
    error: float = 0.0

    def to_choices(self) -> Choices:
        """Return this form as the fields of `Choices` that the engine reads."""
        return Choices(
            budget_tokens=self.budget_tokens,
            recompute=self.setup.recompute,
            streamed=self.setup.streamed or None,
        )


def assumed_workload(
    *, longest: int, mean: float, rows: int, batch_size: int, epochs: float, max_steps: int | None
) -> Workload:
    """Return a workload of rows of equal length, half of it trained, for data whose mean length alone is known."""
    length = max(2, min(round(mean), longest))
    count = min(batch_size, max(rows, 1))
    return Workload((length,) * count, (length // 2,) * count, longest, rows, batch_size, epochs, max_steps)


def choose_dtype(setting: str, device: Device) -> str:
    """Return the config's dtype; for `auto`, bfloat16 where the device computes it natively, else float32.

    Raises UsageError for a half precision in which a card can't compute.
    """
    if setting == "auto":
        return "bfloat16" if device.has_bfloat16 else "float32"
    if setting == "bfloat16" and not device.has_bfloat16 and device.kind != "cpu":
        why = f": {device.note}" if device.note else ""
        raise UsageError(f"{setting} is not supported on {device.name}{why}", hint="set dtype: auto")
    return setting


def forms(setup: TrainingSetup, device: Device) -> Iterator[TrainingSetup]:
    """Yield the possible forms, the fastest first: activations kept, recomputed, recomputed with streamed weights."""
    layers = setup.architecture.layers
    yield setup
    yield replace(setup, recompute=layers)
    streamed = replace(setup, recompute=layers, streamed=layers)
    if can_stream(setup) and host_holds(streamed, device):
        yield streamed


def first_that_fits(
    setup: TrainingSetup, device: Device, work: Workload, *, memory_share: float = 0.9, rate: Rate | None = None
) -> Choice:
    """Return the first form that fits into `memory_share` of the memory, with the largest useful micro-batches.

    Raises DoesNotFit, with the needed and the allowed memory, if not even the longest row fits.
    """
    limit = device.limit_bytes(memory_share)
    least, most = (rounded_up(tokens, BUCKET) for tokens in (work.longest, max(sum(work.lengths), work.longest)))
    most = min(most, max(least, LARGEST_BUDGET[device.kind]))
    budgets = sorted({least, most, *(budget for budget in BUDGETS if least < budget < most)}, reverse=True)
    good = min(most, max(least, GOOD_BUDGET[device.kind]))
    # A form whose micro-batches would be small gives way to the next one, unless no form has room for larger ones.
    for enough in (good, least):
        for form in forms(setup, device):
            for budget in budgets:
                peak = predict_peak(form, budget, work.longest)
                if budget >= enough and peak.bytes <= limit:
                    return _choice(form, device, work, budget, peak, limit, rate)
    smallest = predict_peak(list(forms(setup, device))[-1], least, work.longest)
    raise DoesNotFit(
        f"the run needs at least {size(smallest.bytes)}, but may use {size(limit)} of {device.name} "
        f"({100 * memory_share:.0f} % of {size(device.memory_bytes)}, memory_share)"
    )


def _choice(
    setup: TrainingSetup, device: Device, work: Workload, budget: int, peak: Peak, limit: int, rate: Rate | None
) -> Choice:
    choice = Choice(setup, device, budget, work.micro_batches(budget), peak, limit)
    if rate is None:
        return choice
    computed_s = step_flops(setup, zip(work.lengths, work.trained, strict=True)) / rate.flops_per_s
    # Each micro-batch reads the streamed layers twice, beside the computing.
    read_bytes = 2 * choice.micro_batches * setup.streamed * layer_bytes(setup)
    read_s = read_bytes / (DISK_READ_BYTES_PER_S if device.kind == "cpu" else LINK_BYTES_PER_S)
    return replace(choice, step_s=max(computed_s, read_s), error=rate.error)


# Models to advise instead, one of each size that people train at home.
SMALLER = (
    *("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-3B-Instruct"),
    *("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "smollm2-135m"),
)
SHORTEST = 256  # one question and answer


def with_alternatives(
    error: DoesNotFit, setup: TrainingSetup, device: Device, work: Workload, share: float
) -> DoesNotFit:
    """Return the error with settings that would fit as its hint: `method: qlora`, a shorter length, a smaller model."""

    def fits(other: TrainingSetup, longest: int = work.longest) -> bool:
        lengths = tuple(min(length, longest) for length in work.lengths)
        try:
            first_that_fits(other, device, replace(work, longest=longest, lengths=lengths), memory_share=share)
        except DoesNotFit:
            return False
        return True

    found = []
    # On a CPU 4-bit weights are unpacked right in whole blocks only (worker/model/general.py).
    can_pack = not setup.quantized and (device.kind != "cpu" or setup.architecture.has_whole_blocks)
    if can_pack and fits(replace(setup, quantized=True, path="general")):
        found.append("--set method=qlora")
    lengths = [work.longest >> halvings for halvings in range(1, work.longest.bit_length())]
    shorter = [*(length for length in lengths if length > SHORTEST), SHORTEST]
    found += [f"--set max_length={length}" for length in shorter if fits(setup, length)][:1]
    known = {name: parse_architecture(config, name) for name in SMALLER if (config := known_model(name))}
    for name, other in known.items():
        if other.parameters < setup.architecture.parameters and fits(
            setup_of(other, setup.rank, "all-linear", setup.dtype, setup.kind)
        ):
            found.append(f"--set model={name}")
            break
    return DoesNotFit(error.message, hint=f"this would fit: {'; or '.join(found)}" if found else "use another machine")

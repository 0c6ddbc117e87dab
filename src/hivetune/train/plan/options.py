"""What would fit a device: the user's model over lengths, ranks, precisions and ways to hold it, and others. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hivetune.errors import DoesNotFit
from hivetune.machine.knowledge.cards import known_model
from hivetune.models.architecture import Architecture, parse_architecture
from hivetune.models.targets import ALL_LINEAR
from hivetune.train.plan.choose import (
    Choice,
    Workload,
    assumed_workload,
    choose_dtype,
    fastest_that_fits,
    rounded_up,
    size_words,
    smallest_setup,
)
from hivetune.train.plan.device import Device
from hivetune.train.plan.memory import TrainingSetup, adapters_of, disk_bytes, predict_peak

# Models to compare with: one of each size that people train at home.
COMPARED = ("smollm2-135m", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct")
COMPARED_LARGE = ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct")


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
    """Predicted with every layer recomputed, streamed where it can be, and micro-batches of one row of this length."""
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
        streamed, step_s = (self.choice.setup.streamed, self.choice.step_s) if self.choice else (None, None)
        plain |= {"streamed": streamed, "step_s": step_s}
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
    streamed: bool = False
    """All frozen layers streamed, whether that is needed or not."""


def try_case(case: Case, device: Device, work: Workload, *, memory_share: float = 0.9) -> Option:
    """The case with every row as long as `case.length`, so that lengths can be compared."""
    quantized = case.precision == "nf4"
    dtype = choose_dtype("auto", device) if quantized else case.precision
    trained, active = adapters_of(case.architecture, case.rank, ALL_LINEAR)
    setup = TrainingSetup(
        case.architecture,
        trained,
        dtype,
        device.kind,
        quantized=quantized,
        active_adapter_parameters=active,
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
        choice = fastest_that_fits(setup, device, at_length, memory_share=memory_share, only_streamed=case.streamed)
    except DoesNotFit:
        choice = None
    deepest = predict_peak(smallest_setup(setup), rounded_up(case.length))
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


def _is_right(case: Case, device: Device) -> bool:
    """On a processor 4-bit weights are unpacked rightly in whole blocks only (train/worker/model/general.py)."""
    return case.precision != "nf4" or device.kind != "cpu" or case.architecture.has_whole_blocks


def what_would_fit(
    own: Case, device: Device, work: Workload, others: Mapping[str, Architecture], *, memory_share: float = 0.9
) -> list[Option]:
    """The user's model over lengths, ranks and precisions, then other models with the user's settings."""
    lengths = sorted({own.length, *(n for n in (512, 2048, 8192) if n != own.length)})
    ranks = sorted({own.rank, 8, 64})
    streamed = try_case(replace(own, streamed=True), device, work, memory_share=memory_share)
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
    tried = [try_case(case, device, work, memory_share=memory_share) for case in cases if _is_right(case, device)]
    return [streamed, *tried] if streamed.fits else tried


def advice(options: Sequence[Option], own: Case, most: int = 4) -> list[str]:
    """The nearest options that fit, in words: same model first, then precision, then rank."""
    fitting = [option for option in options if option.fits]
    near = sorted(
        fitting,
        key=lambda o: (o.model != own.model, o.precision != own.precision, abs(o.rank - own.rank), -o.peak_bytes),
    )
    return [_words(option) for option in near[:most]]


def _words(option: Option) -> str:
    streamed = option.choice.setup.streamed if option.choice else 0
    layers = f", {streamed} layers streamed" if streamed else ""
    words = f"{option.model}, length {option.length}, rank {option.rank}, {option.precision}"
    return f"{words}{layers}: {size_words(option.peak_bytes)}"


def compared(own: str, device: Device) -> dict[str, Architecture]:
    """Other models to compare with on a device of this size, by name."""
    names = COMPARED + (COMPARED_LARGE if device.kind != "cpu" or device.memory_bytes > 24e9 else ())
    found = {name: known_model(name) for name in names if name != own}
    return {name: parse_architecture(config, name) for name, config in found.items() if config}


def with_advice(error: DoesNotFit, options: Sequence[Option], own: Case) -> DoesNotFit:
    """The same error, with what would fit as its hint."""
    near = "; ".join(advice(options, own))
    return DoesNotFit(error.message, hint=f"these would fit: {near}" if near else "choose a smaller model")

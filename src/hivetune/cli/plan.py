"""`hivetune plan`: memory, time and disk of a run before anything is loaded, on this machine or on another card."""

import glob
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import home
from hivetune.cli.output import duration, emit, say, show, size, table
from hivetune.config import DataConfig, RunConfig, load_config
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.inventory import disk_free_bytes, read_machine
from hivetune.machine.knowledge import known_model
from hivetune.machine.profile import read_profile
from hivetune.models.architecture import Architecture, parse_architecture, read_architecture
from hivetune.models.prepared import find_prepared
from hivetune.plan.choose import (
    Case,
    Choice,
    Option,
    Workload,
    assumed_workload,
    choose_dtype,
    compared,
    fastest_that_fits,
    power_loss_s,
    what_would_fit,
    with_advice,
)
from hivetune.plan.device import Device, device_of_card, device_of_machine
from hivetune.plan.memory import TrainingSetup, disk_bytes, explain_memory
from hivetune.plan.speed import probe_key, read_probe, step_flops

BYTES_PER_TOKEN = 4.5  # JSON of chats in English, keys and quotes included
ASSUMED_ROWS, ASSUMED_TOKENS = 1500, 150
LOOKED_AT_BYTES = 32 << 20


@dataclass(frozen=True)
class Planned:
    """Everything that is shown. `choice` is None when nothing fits."""

    config: RunConfig
    architecture: Architecture
    device: Device
    work: Workload
    setup: TrainingSetup
    choice: Choice | None
    why_not: str
    options: Sequence[Option]


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file; only model, lengths and batch matter here.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting.")] = None,
    card: Annotated[str | None, typer.Option(help="Plan for another card or CPU: R9700, H200, zen4, avx2 ...")] = None,
    cores: Annotated[int | None, typer.Option(help="With --card of a CPU: its cores.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="With --card: its memory in GB, where there are versions.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Training rows; default: counted in the data files.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Mean tokens of a row; default: from the files' size.")] = None,
) -> None:
    """Memory, time and disk of a run before anything is loaded, and what would fit instead. Needs no torch."""
    loaded = load_config(config, overrides or [])
    planned = make(loaded, card=card, cores=cores, memory_gb=memory, rows=rows, tokens=tokens)
    show_plan(planned)
    if planned.choice is not None:
        return emit(document(planned))
    error = with_advice(DoesNotFit(planned.why_not), planned.options, _case(planned))
    say(f"hivetune: {error}")
    told = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    emit({**document(planned), "error": told})  # one document, so the error is not raised
    raise typer.Exit(error.exit_code)


def make(
    config: RunConfig,
    *,
    card: str | None = None,
    cores: int | None = None,
    memory_gb: float | None = None,
    rows: int | None = None,
    tokens: int | None = None,
) -> Planned:
    """The plan of a config. Raises UsageError for an unknown model or card."""
    architecture = find_architecture(config.model)
    machine = read_machine(folder=Path(config.output) if config.output else None)
    profile = read_profile(machine.fingerprint)
    if card:
        device = device_of_card(card, cores=cores, memory_gb=memory_gb)
    else:
        device = device_of_machine(machine, profile, config.device)
    work = guess_workload(config, rows, tokens)
    setup = TrainingSetup(
        architecture,
        architecture.adapter_parameters(config.lora.r, config.lora.target_modules),
        choose_dtype(config.dtype, device),
        device.kind,
        quantized=config.method == "qlora",
        path="fast" if architecture.exact and config.method == "lora" else "general",
    )
    probe = None if card else profile.probes.get(probe_key(setup))
    rate, correction = read_probe(setup, probe) if probe else (None, None)
    setup = replace(setup, path=probe["path"]) if probe else setup
    share = config.supervise.memory_share
    choice, why_not = None, ""
    try:
        choice = fastest_that_fits(setup, device, work, memory_share=share, correction=correction, rate=rate)
    except DoesNotFit as error:
        why_not = error.message
    own = Case(config.model, architecture, config.max_length, config.lora.r, _precision(setup))
    options = what_would_fit(own, device, work, compared(config.model, device), memory_share=share)
    return Planned(config, architecture, device, work, setup, choice, why_not, options)


def find_architecture(name: str) -> Architecture:
    """Of a prepared model, a folder with config.json, or a model that is known by its sizes."""
    if Path(name).is_dir():
        return read_architecture(Path(name))
    known = known_model(name)
    prepared = None if known else find_prepared(name)
    if prepared:
        return read_architecture(prepared.folder)
    if known is None:
        raise UsageError(f"the sizes of model {name} are not known yet", hint=f"get it first: hivetune fetch {name}")
    return parse_architecture(known, name)


def guess_workload(config: RunConfig, rows: int | None, tokens: int | None) -> Workload:
    """From what is said, else from the size of the data files, else from a stated assumption."""
    counted = None if rows and tokens else _measure_files(config.data)
    found_rows, found_tokens = counted or (ASSUMED_ROWS, ASSUMED_TOKENS)
    train_share = 1 - config.data.validation - config.data.test
    return assumed_workload(
        longest=config.max_length,
        mean=tokens or found_tokens,
        rows=rows or max(1, round(found_rows * train_share)),
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


def _measure_files(data: DataConfig) -> tuple[int, float] | None:
    """(rows, mean tokens) of JSON Lines files by their lines and bytes; None when there are none to look at."""
    paths = [data.path] if isinstance(data.path, str) else data.path
    files = [Path(name) for pattern in paths for name in sorted(glob.glob(pattern, recursive=True))]
    files = [file for file in files if file.is_file() and file.suffix in (".jsonl", ".ndjson", ".json")]
    size_bytes = sum(file.stat().st_size for file in files)
    lines, looked_at = 0, 0
    for file in files:
        with open(file, "rb") as content:
            while looked_at < LOOKED_AT_BYTES and (chunk := content.read(1 << 20)):
                lines += chunk.count(b"\n")
                looked_at += len(chunk)
    if not lines:
        return None
    rows = round(lines * size_bytes / looked_at)
    return rows, size_bytes / rows / BYTES_PER_TOKEN


def _precision(setup: TrainingSetup) -> str:
    return "nf4" if setup.quantized else setup.dtype


def _case(planned: Planned) -> Case:
    config = planned.config
    return Case(config.model, planned.architecture, config.max_length, config.lora.r, _precision(planned.setup))


def document(planned: Planned) -> dict[str, Any]:
    """The one document of `plan --json`."""
    config, setup, choice, device = planned.config, planned.setup, planned.choice, planned.device
    content: dict[str, Any] = {
        "model": config.model,
        "parameters": planned.architecture.parameters,
        "trained_parameters": setup.adapter_parameters,
        "target": {name: getattr(device, name) for name in ("name", "kind", "memory_bytes", "free_bytes", "measured")},
        "workload": {
            name: getattr(planned.work, name)
            for name in ("rows", "longest", "batch_size", "epochs", "steps", "assumed")
        },
        "fits": choice is not None,
        "disk_bytes": disk_bytes(setup),
        "options": [option.to_plain() for option in planned.options],
    }
    if choice is None:
        return {**content, "with_advice": planned.why_not}
    hours = choice.step_s * planned.work.steps / 3600
    every_s = config.supervise.checkpoint_every_s
    return {
        **content,
        "choices": {**choice.to_choices().made(), "micro_batches": choice.micro_batches},
        "memory": {"parts": dict(choice.peak.parts), "peak_bytes": choice.peak.bytes, "error": choice.peak.error},
        "limit_bytes": choice.limit_bytes,
        "step_s": choice.step_s,
        "hours": hours,
        "hours_range": [hours * (1 - choice.error), hours * (1 + choice.error)],
        "power_loss_s": power_loss_s(choice.setup, choice.step_s, every_s),
    }


def show_plan(planned: Planned) -> None:
    """For people: the choice, where memory goes, time, disk, and the table."""
    device, work, choice = planned.device, planned.work, planned.choice
    source = "measured on this machine" if device.measured else f"published: {device.source}"
    show(f"{planned.config.model} on {device.name}")
    known = "assumed" if work.assumed else "from the snapshot"
    mean = sum(work.lengths) / len(work.lengths)
    show(f"data ({known}): {work.rows:,} training rows of {mean:.0f} tokens, {work.steps:,} steps of {work.batch_size}")
    if choice is None:
        show(f"DOES NOT FIT: {planned.why_not}")
    else:
        _show_choice(planned, choice)
    show(f"GEMM rates {source}" + (f"; {device.note}" if device.note else ""))
    parts = disk_bytes(planned.setup)
    free = disk_free_bytes(Path(planned.config.output) if planned.config.output else home())
    words = ", ".join(f"{name} {size(value)}" for name, value in parts.items())
    show(f"disk: {size(sum(parts.values()))} ({words}); {size(free)} free here")
    table(
        "what fits (time if every row is as long as the column says)",
        ("model", "length", "rank", "precision", "fits", "least", "peak", "time", "disk"),
        [_option_cells(option) for option in planned.options],
        numeric=("length", "rank", "least", "peak", "time", "disk"),
    )
    if not planned.architecture.exact:
        say(f"{planned.architecture.family} is read as a Llama-like model: sizes may be off")


def _show_choice(planned: Planned, choice: Choice) -> None:
    setup, work = choice.setup, planned.work
    recompute = f", {setup.recompute} of {setup.architecture.layers} layers recomputed" if setup.recompute else ""
    packs = "one micro-batch" if choice.micro_batches == 1 else f"{choice.micro_batches:.3g} micro-batches"
    show(f"a step: {packs} of at most {choice.budget_tokens:,} tokens in {_precision(setup)}{recompute}")
    table(
        f"peak {size(choice.peak.bytes)} +- {100 * choice.peak.error:.0f} %, "
        f"of {size(choice.limit_bytes)} that may be used",
        ("memory", "size", "why"),
        [(name, size(value), why) for name, value, why in explain_memory(setup, choice.peak, choice.budget_tokens)],
        numeric=("size",),
    )
    total = choice.step_s * work.steps
    low, high = duration(total * (1 - choice.error)), duration(total * (1 + choice.error))
    tokens_per_s = sum(work.lengths) / choice.step_s
    flops = statistics.mean(
        sum(step_flops(setup, shape) for shape in shapes) for shapes in work.micro_batches(setup, choice.budget_tokens)
    )
    share = flops / choice.step_s / planned.device.rates[setup.dtype]
    show(
        f"time: {duration(total)} (between {low} and {high}), {choice.step_s:.2g} s a step, "
        f"{tokens_per_s:,.0f} tokens/s, {100 * share:.0f} % of the GEMM rate; validation and loading come on top"
    )
    lost = power_loss_s(setup, choice.step_s, planned.config.supervise.checkpoint_every_s)
    show(f"a power cut takes at most {duration(lost)} of work")


def _option_cells(option: Option) -> tuple[object, ...]:
    hours = duration(option.hours * 3600) if option.hours is not None else "-"
    fits = "yes" if option.fits else "no"
    return (
        option.model.rpartition("/")[2].removesuffix("-Instruct"),
        option.length,
        option.rank,
        option.precision,
        fits,
        size(option.least_bytes),
        size(option.peak_bytes) if option.fits else "-",
        hours,
        size(option.disk),
    )

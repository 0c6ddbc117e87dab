"""The command `plan`: predicted memory, time and disk of a run, on this machine or on another card."""

import statistics
from pathlib import Path
from typing import Annotated

import typer

from hivetune.base.disk import home
from hivetune.base.units import step_time
from hivetune.cli.arguments import ColumnsOption, ConfigArgument, ModelOption, SetOption, read_settings
from hivetune.cli.output import duration, emit, emit_failed, say, show, size, table
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.inventory import disk_free_bytes
from hivetune.train.open import check_disk
from hivetune.train.plan.choose import Choice, Option, StreamedFrom, with_advice
from hivetune.train.plan.memory import disk_bytes, explain_memory, offload_advice
from hivetune.train.plan.run import Planned, plan_document, plan_run, refuse_missing
from hivetune.train.plan.speed import step_flops


def plan(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
    card: Annotated[
        str | None, typer.Option(help="Plan for another card or CPU, such as R9700, H200, zen4 or avx2.")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Number of cores; only with --card of a CPU.")] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="Memory in GB, if the card comes in several sizes; only with --card.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of training rows; default: counted in the files.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean tokens of a row; default: estimated from the files.")
    ] = None,
) -> None:
    """Predict memory, time and disk of a run, and list what would fit instead. Needs no torch."""
    if card is None and (cores is not None or memory is not None):
        raise UsageError(
            "--cores and --memory describe another machine: give --card too", hint="for example --card zen4"
        )
    loaded, _ = read_settings(config, model, overrides, columns)
    if not (rows and tokens):
        refuse_missing(loaded.data)
    planned = plan_run(loaded, card=card, cores=cores, memory_gb=memory, rows=rows, tokens=tokens)
    show_plan(planned)
    try:
        if planned.choice is None:
            raise with_advice(DoesNotFit(planned.why_not), planned.options, planned.case)
        if card is None:
            check_disk(_folder_of(planned), planned.setup)
    except DoesNotFit as error:
        emit_failed({**plan_document(planned), "fits": False, "refusal": error.message}, error)
    emit(plan_document(planned))


def _folder_of(planned: Planned) -> Path:
    return Path(planned.config.output) if planned.config.output else home()


def show_plan(planned: Planned) -> None:
    """Show the choice, what memory is used for, time, disk, and the options."""
    device, work, choice = planned.device, planned.work, planned.choice
    source = "measured on this machine" if device.measured else f"published: {device.source}"
    show(f"{planned.config.model} on {device.name}")
    mean = sum(work.lengths) / len(work.lengths)
    show(f"data: {planned.rows_known}")
    show(f"training: {work.rows:,} rows of {mean:.0f} tokens, {work.steps:,} steps of {work.batch_size}")
    if choice is None:
        show(f"DOES NOT FIT: {planned.why_not}")
    else:
        _show_choice(planned, choice)
    show(f"GEMM rates {source}" + (f"; {device.note}" if device.note else ""))
    parts = disk_bytes(planned.setup)
    free = disk_free_bytes(_folder_of(planned))
    listed = ", ".join(f"{name} {size(value)}" for name, value in parts.items())
    show(f"disk: {size(sum(parts.values()))} ({listed}); {size(free)} free here")
    table(
        "options (time if every row has the full length)",
        ("model", "length", "rank", "precision", "streamed", "fits", "least", "peak", "step", "time", "disk"),
        [_option_cells(option) for option in planned.options],
    )
    if not planned.setup.architecture.exact:
        say(f"{planned.setup.architecture.family} is estimated as a Llama-like model; for exact sizes: hivetune fetch")


def _show_choice(planned: Planned, choice: Choice) -> None:
    setup, work = choice.setup, planned.work
    recompute = f", {setup.recompute} of {setup.architecture.layers} layers recomputed" if setup.recompute else ""
    packs = "one micro-batch" if choice.micro_batches == 1 else f"{choice.micro_batches:.3g} micro-batches"
    show(f"step: {packs} of at most {choice.budget_tokens:,} tokens in {setup.precision}{recompute}")
    if choice.streaming is not None:
        show(_streaming_text(choice, choice.streaming))
    table(
        f"peak {size(choice.peak.bytes)} +- {100 * choice.peak.error:.0f} %, of {size(choice.limit_bytes)} usable",
        ("memory", "size", "why"),
        [(name, size(value), r) for name, value, r in explain_memory(setup, choice.peak, choice.budget_tokens)],
    )
    show(offload_advice(setup, choice.peak.bytes))
    total = choice.step_s * work.steps
    low, high = duration(total * (1 - choice.error)), duration(total * (1 + choice.error))
    tokens_per_s = sum(work.lengths) / choice.step_s
    flops = statistics.mean(
        sum(step_flops(setup, shape) for shape in shapes) for shapes in work.micro_batches(setup, choice.budget_tokens)
    )
    share = flops / choice.step_s / planned.device.rates[setup.dtype]
    show(
        f"time: {duration(total)} (between {low} and {high}), {step_time(choice.step_s)} a step, "
        f"{tokens_per_s:,.0f} tokens/s, {100 * share:.0f} % of the GEMM rate; without validation and loading"
    )
    if planned.worth is not None:
        show(planned.worth.words)
    show(f"a power cut loses at most {duration(planned.power_loss_s)} of work")


def _streaming_text(choice: Choice, streaming: StreamedFrom) -> str:
    """Return the effect of streaming in words."""
    names = {"disk": "the disk", "memory": "host memory"}
    return (
        f"frozen layers streamed: {choice.setup.streamed} of {choice.setup.architecture.layers} from "
        f"{names[streaming.source]} at {streaming.bytes_per_s / 1e9:.2g} GB/s; peak {size(choice.peak.bytes)}, about "
        f"{step_time(choice.step_s)} a step, {step_time(streaming.waited_s)} of it waiting for layers; with "
        f"{streaming.hiding_tokens:,.0f} tokens a micro-batch or more, there is no wait"
    )


def _option_cells(option: Option) -> tuple[object, ...]:
    case, choice = option.case, option.choice
    return (
        case.model.rpartition("/")[2].removesuffix("-Instruct"),
        case.length,
        case.rank,
        case.precision,
        f"{choice.setup.streamed} layers" if choice and choice.setup.streamed else "-",
        "yes" if option.fits else "no",
        size(option.least_bytes),
        size(option.peak_bytes) if option.fits else "-",
        step_time(choice.step_s) if choice else "-",
        duration(option.hours * 3600) if option.hours is not None else "-",
        size(option.disk),
    )

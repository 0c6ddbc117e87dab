"""The command `plan`: predicted memory, time and disk of a run, on this machine or on another card."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hivetune.base.disk import home
from hivetune.base.units import step_time
from hivetune.cli.arguments import (
    ColumnsOption,
    ConfigArgument,
    IgnoreOption,
    SetOption,
    complete_model,
    read_settings,
)
from hivetune.cli.output import Columns, Table, answer, duration, emit, emit_failed, say, show, size, table
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.inventory import disk_free_bytes
from hivetune.train.open import check_disk
from hivetune.train.plan.choose import Choice
from hivetune.train.plan.memory import disk_bytes, explain_memory
from hivetune.train.plan.run import Planned, plan_document, plan_run, refuse_missing


def plan(
    config: ConfigArgument,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="Plan for this model; several give a row each.",
            autocompletion=complete_model,
        ),
    ] = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
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
    """Predict memory, time and disk of a run, and what would fit instead. Needs no torch."""
    if card is None and (cores is not None or memory is not None):
        raise UsageError(
            "--cores and --memory describe another machine: give --card too", hint="for example --card zen4"
        )
    plans = []
    for name in model or ("",):
        named = [*(overrides or ()), *([f"model={name}"] if name else [])]
        loaded, _ = read_settings(config, None, named, columns, ignore)
        if not (rows and tokens):
            refuse_missing(loaded.data)
        plans.append(plan_run(loaded, card=card, cores=cores, memory_gb=memory, rows=rows, tokens=tokens))
    if len(plans) > 1:
        answer({"plans": [plan_document(each) for each in plans]}, Table(ROW, plans))
        return
    (planned,) = plans
    show_plan(planned)
    document = plan_document(planned)
    if planned.refusal is not None:
        emit_failed(document, planned.refusal)
    if card is None:
        try:
            check_disk(_folder_of(planned), planned.setup)
        except DoesNotFit as error:
            emit_failed({**document, "fits": False, "refusal": error.message}, error)
    emit(document)


def _cell(planned: Planned, shown: Callable[[Choice], str]) -> str:
    return "-" if planned.choice is None else shown(planned.choice)


def _time(choice: Choice, steps: int) -> str:
    return "unknown" if choice.step_s is None else duration(choice.step_s * steps)


# One of several models.
ROW: Columns = {
    "model": lambda each: each.config.model,
    "fits": lambda each: "no" if each.choice is None else "yes",
    "precision": lambda each: each.setup.precision,
    "peak memory": lambda each: _cell(each, lambda choice: size(choice.peak.bytes)),
    "time": lambda each: _cell(each, lambda choice: _time(choice, each.work.steps)),
    "disk": lambda each: size(sum(disk_bytes(each.setup).values())),
}


def _folder_of(planned: Planned) -> Path:
    return Path(planned.config.output) if planned.config.output else home()


def show_plan(planned: Planned) -> None:
    """Show the choice, what memory is used for, time and disk."""
    device, work = planned.device, planned.work
    show(f"{planned.config.model} on {device.name}" + (f"; {device.note}" if device.note else ""))
    mean = sum(work.lengths) / len(work.lengths)
    show(f"data: {planned.rows_known}")
    show(f"training: {work.rows:,} rows of {mean:.0f} tokens, {work.steps:,} steps of {work.batch_size}")
    if planned.choice is None:
        show(f"DOES NOT FIT: {planned.refusal.message if planned.refusal else ''}")
    else:
        _show_choice(planned, planned.choice)
    parts = disk_bytes(planned.setup)
    free = disk_free_bytes(_folder_of(planned))
    listed = ", ".join(f"{name} {size(value)}" for name, value in parts.items())
    show(f"disk: {size(sum(parts.values()))} ({listed}); {size(free)} free here")
    if not planned.setup.architecture.exact:
        say(f"{planned.setup.architecture.family} is estimated as a Llama-like model; for exact sizes: hivetune fetch")


def _show_choice(planned: Planned, choice: Choice) -> None:
    setup, work = choice.setup, planned.work
    form = ", all layers recomputed" if setup.recompute else ""
    if setup.streamed:
        form += f" and streamed from {'the disk' if choice.stream_from == 'disk' else 'host memory'}"
    packs = "one micro-batch" if choice.micro_batches == 1 else f"{choice.micro_batches:.3g} micro-batches"
    show(f"step: {packs} of at most {choice.budget_tokens:,} tokens in {setup.precision}{form}")
    table(
        f"peak {size(choice.peak.bytes)} +- {100 * choice.peak.error:.0f} %, of {size(choice.limit_bytes)} usable",
        ("memory", "size", "why"),
        [(name, size(value), r) for name, value, r in explain_memory(setup, choice.peak, choice.budget_tokens)],
    )
    if choice.step_s is None:
        show("time: unknown for this device; the first steps will show it")
        return
    total = choice.step_s * work.steps
    low, high = duration(total * (1 - choice.error)), duration(total * (1 + choice.error))
    show(
        f"time: between {low} and {high} ({planned.time_known}), {step_time(choice.step_s)} a step, "
        f"{sum(work.lengths) / choice.step_s:,.0f} tokens/s; without validation and loading"
    )
    if planned.worth is not None:
        show(planned.worth.words)
    show(f"a power cut loses at most {duration(planned.power_loss_s)} of work")

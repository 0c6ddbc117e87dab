"""The command `plan`: predicted memory, time and disk of a run, on this machine or on another card."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

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
from hivetune.cli.output import Note, Table, answer, duration, size
from hivetune.errors import DoesNotFit, HivetuneError, UsageError
from hivetune.machine.findings import answers_elsewhere
from hivetune.machine.inventory import disk_free_bytes, read_cards
from hivetune.machine.look import look
from hivetune.train.open import check_disk
from hivetune.train.plan.choose import Choice
from hivetune.train.plan.memory import disk_bytes, explain_memory
from hivetune.train.plan.run import Planned, plan_document, plan_run

ROWS_HELP = "Number of training rows; default: counted in the files."
TOKENS_HELP = "Mean tokens of a row; default: estimated from the files."
MODELS_HELP = "Plan for this model; several give a row each."


def plan(
    config: ConfigArgument,
    model: Annotated[
        list[str] | None, Option("--model", "-m", metavar="M", help=MODELS_HELP, autocompletion=complete_model)
    ] = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    card: Annotated[str | None, Option(help="Plan for another card or CPU, such as R9700, H200, zen4 or avx2.")] = None,
    cores: Annotated[int | None, Option(min=1, help="Number of cores; only with --card of a CPU.")] = None,
    memory: Annotated[
        float | None, Option(min=0.1, help="Memory in GB of a --card that comes in several sizes.")
    ] = None,
    rows: Annotated[int | None, Option(min=1, help=ROWS_HELP)] = None,
    tokens: Annotated[int | None, Option(min=1, help=TOKENS_HELP)] = None,
) -> None:
    """Predict memory, time and disk of a run, and what would fit instead. Needs no torch."""
    if card is None and (cores is not None or memory is not None):
        hint = "for example --card zen4"
        raise UsageError("--cores and --memory describe another machine: give --card too", hint=hint)
    plans = []
    for name in model or ("",):
        named = [*(overrides or ()), *([f"model={name}"] if name else [])]
        loaded, _ = read_settings(config, None, named, columns, ignore)
        plans.append(plan_run(loaded, card=card, cores=cores, memory_gb=memory, rows=rows, tokens=tokens))
    documents = [plan_document(each) for each in plans]
    if len(plans) > 1:
        columns_shown = "model, fits, precision, peak memory|size, time, disk|size"
        answer({"plans": documents}, Table(columns_shown, list(map(_cells, plans))))
        return
    (planned,), (document,) = plans, documents
    error: HivetuneError | None = planned.refusal
    if error is None and card is None:
        try:
            check_disk(_folder_of(planned), planned.setup)
        except DoesNotFit as full:
            error, document = full, {**document, "fits": False, "refusal": full.message}
    elsewhere = answers_elsewhere(look()) if card is None and read_cards() else ""
    answer(document, *plan_text(planned), *([Note(elsewhere)] if elsewhere else []), error=error)


def _cells(planned: Planned) -> tuple[Any, ...]:
    """Return the line of one of several models."""
    choice, setup = planned.choice, planned.setup
    disk = sum(disk_bytes(setup).values())
    if choice is None:
        return planned.config.model, "no", setup.precision, None, None, disk
    time = "unknown" if choice.step_s is None else duration(choice.step_s * planned.work.steps)
    return planned.config.model, "yes", setup.precision, choice.peak.bytes, time, disk


def _folder_of(planned: Planned) -> Path:
    return Path(planned.config.output) if planned.config.output else home()


def plan_text(planned: Planned) -> Iterator[str | Table]:
    """Yield the choice, what memory is used for, time and disk."""
    device, work = planned.device, planned.work
    yield f"{planned.config.model} on {device.name}" + (f"; {device.note}" if device.note else "")
    yield f"data: {planned.rows_known}"
    mean = sum(work.lengths) / len(work.lengths)
    yield f"training: {work.rows:,} rows of {mean:.0f} tokens, {work.steps:,} steps of {work.batch_size}"
    if planned.choice is None:
        yield f"DOES NOT FIT: {planned.refusal.message if planned.refusal else ''}"
    else:
        yield from _choice_text(planned, planned.choice)
    disk = disk_bytes(planned.setup)
    listed = ", ".join(f"{name} {size(value)}" for name, value in disk.items())
    yield f"disk: {size(sum(disk.values()))} ({listed}); {size(disk_free_bytes(_folder_of(planned)))} free here"


def _choice_text(planned: Planned, choice: Choice) -> Iterator[str | Table]:
    setup, work = choice.setup, planned.work
    form = ", all layers recomputed" if setup.recompute else ""
    if setup.streamed:
        form += f" and streamed from {'the disk' if choice.stream_from == 'disk' else 'host memory'}"
    packs = "one micro-batch" if choice.micro_batches == 1 else f"{choice.micro_batches:.3g} micro-batches"
    yield f"step: {packs} of at most {choice.budget_tokens:,} tokens in {setup.precision}{form}"
    title = f"peak {size(choice.peak.bytes)} +- {100 * choice.peak.error:.0f} %, of {size(choice.limit_bytes)} usable"
    memory = [tuple(line) for line in explain_memory(setup, choice.peak, choice.budget_tokens)]
    yield Table("memory, size|size, why", memory, title)
    if choice.step_s is None:
        yield "time: unknown for this device; the first steps will show it"
        return
    total = choice.step_s * work.steps
    low, high = duration(total * (1 - choice.error)), duration(total * (1 + choice.error))
    yield (
        f"time: between {low} and {high} ({planned.time_known}), {step_time(choice.step_s)} a step, "
        f"{sum(work.lengths) / choice.step_s:,.0f} tokens/s; without validation and loading"
    )

"""The plan of a config: memory, time and disk from sizes alone, for rows that are checked or counted.

`init` uses it to propose settings for some rows on this machine.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.database import database_path, open_database
from hivetune.base.units import count
from hivetune.config import MAX_TOKENS_A_ROW, DataConfig, RunConfig, parse_config
from hivetune.data.files.find import check_storable, find_sources, is_pipe
from hivetune.data.mapping import check_columns
from hivetune.data.prepare.prepare import check, refuse_without_training
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.cards import known_model
from hivetune.machine.inventory import as_torch_sees, read_machine
from hivetune.machine.profile import read_profile
from hivetune.models.architecture import Architecture, parse_architecture, read_architecture
from hivetune.models.prepared import PACKAGED, find_prepared, prepared_names
from hivetune.records import Progress, silent
from hivetune.train.plan.choose import (
    BUCKET,
    LAST_RUN,
    LAST_RUN_ERROR,
    SHORTEST,
    Choice,
    Rate,
    Workload,
    assumed_workload,
    choose_dtype,
    first_that_fits,
    published_rate,
    rate_key,
    with_alternatives,
)
from hivetune.train.plan.device import Device, device_of_card, device_of_machine
from hivetune.train.plan.layout import rounded_up
from hivetune.train.plan.memory import TrainingSetup, disk_bytes, setup_of

# English prose by the vocabularies of SmolLM2 and Qwen2.5, and the tokens that templates write around a message.
CHARS_PER_TOKEN, TOKENS_A_MESSAGE = 4.4, 5
CHECKED_BYTES = 2_000_000  # the check of so many takes one to two seconds of processor time, tokens included
SAMPLED, SAMPLED_OF_MORE = 300, 50  # rows whose tokens are estimated: the first ones, and one in 50 of the others


@dataclass(frozen=True)
class Planned:
    """The result of `hivetune plan`. `choice` is None when nothing fits."""

    config: RunConfig
    device: Device
    work: Workload
    setup: TrainingSetup
    choice: Choice | None
    refusal: DoesNotFit | None
    """The reason why nothing fits, with alternatives that fit as its hint."""
    rows_known: str
    """The number of rows and how it is known, in words."""
    time_known: str = ""
    """The basis of the time estimate, in words; "" if no rate is known."""


def plan_run(
    config: RunConfig,
    *,
    card: str | None = None,
    cores: int | None = None,
    memory_gb: float | None = None,
    rows: int | None = None,
    tokens: int | None = None,
) -> Planned:
    """Return the plan of a config for this machine, or for `card` with that many cores and GB of memory.

    `rows` (their number) and `tokens` (their mean length) replace what the data would show. Raises UsageError.
    """
    architecture = find_architecture(config.model)
    machine = read_machine(folder=Path(config.output) if config.output else None)
    device = (
        device_of_card(card, cores=cores, memory_gb=memory_gb)
        if card
        else device_of_machine(as_torch_sees(machine, os.environ), config.device)
    )
    prepared = find_prepared(config.model, config.template)
    work, basis = estimate_workload(config, rows, tokens, prepared.folder if prepared else None)
    lora, dtype = config.lora, choose_dtype(config.dtype, device)
    quantized = config.method == "qlora"
    setup = setup_of(architecture, lora.r, lora.target_modules, dtype, device.kind, quantized=quantized)
    rate, last = None, None if card else read_profile(machine.fingerprint).rates.get(rate_key(setup))
    if last is not None:
        rate = Rate(last, LAST_RUN_ERROR, LAST_RUN)
    elif dtype in device.rates:
        rate = published_rate(device.rates[dtype], f"published: {device.source}")
    choice, refusal = None, None
    try:
        choice = first_that_fits(setup, device, work, memory_share=config.memory_share, rate=rate)
    except DoesNotFit as error:
        refusal = with_alternatives(error, setup, device, work, config.memory_share)
    return Planned(
        config,
        device,
        work,
        setup,
        choice,
        refusal,
        rows_known=basis,
        time_known=rate.source if rate else "",
    )


def find_architecture(name: str) -> Architecture:
    """Return the sizes of a prepared model, of a folder with config.json, or of a model in models.yaml."""
    if Path(name).is_dir():
        prepared = find_prepared(name)
        return read_architecture(prepared.folder if prepared else Path(name))
    config = known_model(name)
    prepared = None if config else find_prepared(name)
    if prepared:
        return read_architecture(prepared.folder)
    if config is None:
        raise UsageError(f"the sizes of model {name} are not known yet", hint=f"get it first: hivetune fetch {name}")
    return parse_architecture(config, name)


def estimate_workload(
    config: RunConfig, rows: int | None, tokens: int | None, model_folder: Path | None = None
) -> tuple[Workload, str]:
    """Return the workload, and what it is based on, in words: the user's numbers, or the rows of the data."""
    if tokens and tokens > config.max_length:
        message = f"rows of {tokens:,} tokens are longer than max_length, {config.max_length:,}, and are not trained"
        raise UsageError(message, hint="raise it: --set max_length=N")
    counted = None if rows and tokens else rows_to_train(config, model_folder)
    num_rows = rows or (counted.rows if counted else 1)
    basis = "as given" if rows or counted is None else counted.words
    work = assumed_workload(
        longest=config.max_length,
        mean=tokens or (counted.tokens if counted else 1),
        rows=num_rows,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    return work, basis


def plan_document(planned: Planned) -> dict[str, Any]:
    """Return the document that `plan --json` prints."""
    config, setup, choice, device = planned.config, planned.setup, planned.choice, planned.device
    content: dict[str, Any] = {
        "model": config.model,
        "parameters": setup.architecture.parameters,
        "trained_parameters": setup.adapter_parameters,
        "target": {name: getattr(device, name) for name in ("name", "kind", "memory_bytes", "free_bytes")},
        "workload": {name: getattr(planned.work, name) for name in ("rows", "longest", "batch_size", "epochs", "steps")}
        | {"rows_known": planned.rows_known},
        "fits": choice is not None,
        "disk_bytes": disk_bytes(setup),
    }
    if choice is None:
        assert planned.refusal is not None
        return {**content, "refusal": planned.refusal.message, "hint": planned.refusal.hint}
    hours = None if choice.step_s is None else choice.step_s * planned.work.steps / 3600
    made = {"device": device.torch_name, "dtype": setup.dtype, **choice.to_choices().as_dict()}
    return {
        **content,
        "choices": {**made, "micro_batches": choice.micro_batches},
        "memory": {"parts": dict(choice.peak.parts), "peak_bytes": choice.peak.bytes, "error": choice.peak.error},
        "limit_bytes": choice.limit_bytes,
        "step_s": choice.step_s,
        "hours": hours,
        "hours_range": None if hours is None else [hours * (1 - choice.error), hours * (1 + choice.error)],
        "time_known": planned.time_known,
    }


@dataclass(frozen=True)
class Proposal:
    """Proposed settings. `report`: the document of `check`. `planned`: None if the sizes of the model are unknown."""

    config: RunConfig
    report: Mapping[str, Any]
    planned: Planned | None


def initial_settings(rows: Sequence[str] | None, model: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return settings from what the user named, by default with a model on this machine. `rows`: None is the store.

    Raises UsageError if there are no rows.
    """
    if not rows and not stored_bytes():
        raise UsageError(
            "no rows are named and the store is empty",
            hint="name a file: hivetune init rows.jsonl; or collect interactions first: hivetune collect",
        )
    paths = list(rows or ["store"])
    for name in paths:
        check_storable(name)
    find_sources(paths)
    # At hand is the model that was prepared last on this machine, else the one that comes as a package.
    tree = {
        "model": model or next(iter((*prepared_names(), *PACKAGED))),
        "data": {"path": paths if len(paths) > 1 else paths[0]},
    }
    return parse_config(tree, "command line", overrides)


def propose(settings: RunConfig, folder: Path | None, progress: Progress = silent) -> Proposal:
    """Complete the settings for these rows on this machine; the user's own settings are kept.

    `folder`: the prepared model's, None if it is not on this machine, when at most its sizes are known. Nothing is
    downloaded and nothing trained. Raises DataRefused if the rows can't be trained on.
    """
    has_length = "max_length" in settings.model_fields_set
    # No row is too long here: the lengths of the rows decide the setting.
    longest = settings.max_length if has_length or folder is None else MAX_TOKENS_A_ROW
    first = check(settings.data, model_folder=folder, max_length=longest, learn=settings.learn, progress=progress)
    first.refuse(settings.data.max_rejected)
    report = first.document
    if folder and not has_length:
        settings = _with_length(settings, rounded_up(report["lengths"]["p99"], BUCKET))
    planned = _plan(settings, report)
    while not has_length and planned is not None and planned.choice is None and settings.max_length > SHORTEST:
        settings = _with_length(settings, settings.max_length // 2)
        planned = _plan(settings, report)
    if report["lengths"]["unit"] == "tokens" and report["lengths"]["max"] > settings.max_length:
        # Counted as `train` counts: rows longer than the chosen length are rejected.
        second = check(
            settings.data,
            model_folder=folder,
            max_length=settings.max_length,
            learn=settings.learn,
            progress=progress,
        )
        second.refuse(settings.data.max_rejected)
        report = {**second.document, "lengths": report["lengths"]}
        planned = _plan(settings, report)
    refuse_without_training(settings.data, report["splits"]["train"])
    return Proposal(settings, report, planned)


def _with_length(settings: RunConfig, tokens: int) -> RunConfig:
    return settings.model_copy(update={"max_length": max(BUCKET, tokens)})


def _plan(settings: RunConfig, report: Mapping[str, Any]) -> Planned | None:
    tokens = round(checked_rows(report).tokens) if report["tokens"] else None
    try:
        return plan_run(settings, rows=max(1, report["splits"]["train"]), tokens=tokens)
    except UsageError:  # the sizes of a model that is not here are not known
        return None


@dataclass(frozen=True)
class CountedRows:
    """The number of training rows. `tokens`: their mean length. `words`: the number, and how it is known, as text."""

    rows: int
    tokens: float
    words: str


def rows_to_train(config: RunConfig, model_folder: Path | None) -> CountedRows:
    """Return number and mean length of the rows that a config trains on.

    Raise UsageError for sources without a row, and for those that can be read only once.
    """
    data = config.data
    check_columns(data.columns)
    files = [name for name in find_sources(data.path) if name != "store"]
    if any(name == "-" or is_pipe(name) for name in files):
        fault = "standard input and pipes are read once, by the training itself"
        raise UsageError(fault, hint="state how many rows there will be: --rows N --tokens N")
    # Few rows are checked, with the tokens that this model gives them, as `init` does. More are counted, 100 MB of JSON
    # Lines a second, less the share that is held out.
    size_bytes = sum(map(os.path.getsize, files)) + (stored_bytes() if "store" in find_sources(data.path) else 0)
    if model_folder is not None and size_bytes <= CHECKED_BYTES:
        checked = check(data, model_folder=model_folder, max_length=config.max_length, learn=config.learn)
        if checked.document["splits"]["train"]:
            return checked_rows(checked.document)
        checked.refuse(1.0)  # which names the rows and the remedy, as `train` does
    return count_rows(data)


def checked_rows(report: Mapping[str, Any]) -> CountedRows:
    """Return the number and mean length of the training rows from the report of a `check` with a model."""
    basis = "; ".join([f"from a check of {count(report['rows_in'], 'row')}", *report["groups"]["missed"]])
    return CountedRows(report["splits"]["train"], report["tokens"] / report["usable"], basis)


def count_rows(data: DataConfig) -> CountedRows:
    """Return the number of rows of `data.path` that are not held out, and an estimate of their mean length in tokens.

    Raise UsageError if there is none, or if none can be read.
    """
    rows = 0
    sampled: list[float] = []
    for raw in rows_of_files(data.path, data.columns):
        rows += raw.problem is None
        if raw.problem is None and (rows <= SAMPLED or rows % SAMPLED_OF_MORE == 0):
            with contextlib.suppress(RowRefused, RecursionError):  # the check says why; it is not trained
                messages = read_example(raw, data.columns).example.messages
                texts = (text for m in messages for text in (m.content, m.reasoning or "", *map(str, m.tool_calls)))
                sampled.append(sum(map(len, texts)) / CHARS_PER_TOKEN + TOKENS_A_MESSAGE * len(messages))
    if not sampled:
        fault = f"{count(rows, 'row')} counted, but none can be trained" if rows else f"{data.path} contains no rows"
        raise UsageError(fault, hint="see why: hivetune check ROWS; or plan without them: --rows N --tokens N")
    trained = max(1, round(rows * (1 - data.validation - data.test)))
    return CountedRows(trained, sum(sampled) / len(sampled), f"by counting {count(rows, 'row')}")


def stored_bytes() -> int:
    """Return the size of all stored rows in bytes; 0 without a store."""
    if not database_path().exists():
        return 0
    with closing(open_database()) as database:
        [total] = database.execute("SELECT total(length(row)) FROM interactions").fetchone()
    return int(total)

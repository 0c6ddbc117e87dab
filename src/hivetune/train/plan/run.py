"""The plan of a config: memory, time and disk from sizes alone, for rows that are counted here, and what would fit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.config import RunConfig
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.cards import known_model
from hivetune.machine.inventory import Machine, read_machine
from hivetune.machine.profile import read_profile
from hivetune.models.architecture import Architecture, parse_architecture, read_architecture
from hivetune.models.prepared import find_prepared
from hivetune.train.plan.choose import (
    Choice,
    Workload,
    assumed_workload,
    choose_dtype,
    first_that_fits,
    with_advice,
)
from hivetune.train.plan.count import rows_to_train
from hivetune.train.plan.device import Device, device_of_card, device_of_machine
from hivetune.train.plan.memory import TrainingSetup, disk_bytes, setup_of
from hivetune.train.plan.speed import (
    LAST_RUN,
    LAST_RUN_ERROR,
    Rate,
    published_rate,
    rate_key,
)


@dataclass(frozen=True)
class Planned:
    """The content of `hivetune plan`. `choice` is None when nothing fits."""

    config: RunConfig
    device: Device
    work: Workload
    setup: TrainingSetup
    choice: Choice | None
    refusal: DoesNotFit | None
    """Why nothing fits, with what would as its hint."""
    rows_known: str
    """The number of rows and how it is known, in words."""
    time_known: str = ""
    """What the time is estimated from, in words; empty where nothing is known."""


def plan_run(
    config: RunConfig,
    *,
    card: str | None = None,
    cores: int | None = None,
    memory_gb: float | None = None,
    rows: int | None = None,
    tokens: int | None = None,
) -> Planned:
    """Return the plan of a config.

    Raises UsageError for an unknown model or card.
    """
    architecture = find_architecture(config.model)
    machine = read_machine(folder=Path(config.output) if config.output else None)
    device = (
        device_of_card(card, cores=cores, memory_gb=memory_gb) if card else device_of_machine(machine, config.device)
    )
    prepared = find_prepared(config.model, config.template)
    work, basis = guess_workload(config, rows, tokens, prepared.folder if prepared else None)
    lora, dtype = config.lora, choose_dtype(config.dtype, device)
    quantized = config.method == "qlora"
    setup = setup_of(architecture, lora.r, lora.target_modules, dtype, device.kind, quantized=quantized)
    rate = None if card else _last_rate(machine, setup)
    if rate is None and dtype in device.rates:
        rate = published_rate(device.rates[dtype], f"published: {device.source}")
    choice, refusal = None, None
    try:
        choice = first_that_fits(setup, device, work, memory_share=config.memory_share, rate=rate)
    except DoesNotFit as error:
        refusal = with_advice(error, setup, device, work, config.memory_share)
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


def _last_rate(machine: Machine, setup: TrainingSetup) -> Rate | None:
    known = read_profile(machine.fingerprint).rates.get(rate_key(setup))
    return None if known is None else Rate(known, LAST_RUN_ERROR, LAST_RUN)


def find_architecture(name: str) -> Architecture:
    """Return the sizes of a prepared model, of a folder with config.json, or of a model that is known by its sizes."""
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


def guess_workload(
    config: RunConfig, rows: int | None, tokens: int | None, model_folder: Path | None = None
) -> tuple[Workload, str]:
    """Return the workload and, in words, its basis: the user's numbers, else the data's rows."""
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
    """Return the one document of `plan --json`."""
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
    made = {"device": device.torch_name, "dtype": setup.dtype, **choice.to_choices().made()}
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

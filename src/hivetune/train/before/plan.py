"""The station before a run: memory, time and disk of a config, from sizes alone, and what would fit instead."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.config import RunConfig
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.inventory import CORES_A_WORKER, read_machine
from hivetune.machine.knowledge.cards import known_model
from hivetune.machine.network import link_of
from hivetune.machine.profile import read_profile
from hivetune.models.architecture import Architecture, parse_architecture, read_architecture
from hivetune.models.prepared import find_prepared
from hivetune.process.cluster import ask_cluster, cluster_of, own_address
from hivetune.train.before.count import rows_to_train
from hivetune.train.plan.choose import (
    DISK_BYTES_PER_S,
    Choice,
    Workload,
    assumed_workload,
    choose_dtype,
    fastest_that_fits,
    power_loss_s,
)
from hivetune.train.plan.device import Device, device_of_card, device_of_machine
from hivetune.train.plan.layout import pack_tokens
from hivetune.train.plan.memory import TrainingSetup, adapters_of, disk_bytes
from hivetune.train.plan.options import Case, Option, compared, what_would_fit
from hivetune.train.plan.speed import probe_key, read_probe
from hivetune.train.plan.stage2 import BAD_SHARE
from hivetune.train.plan.worth import LOCAL_BYTES_PER_S, Worth, worth_of


@dataclass(frozen=True)
class _Crew:
    """The run's own worker and those of a cluster. `link`: of this machine to the others, in words."""

    workers: int
    bytes_per_s: float
    link: str


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
    rows_known: str
    """How many rows there are and how that is known, in words."""
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    """Measured by the doctor, else assumed."""
    cards: int = 0
    crew: _Crew | None = None
    """The workers of a cluster."""

    @property
    def power_loss_s(self) -> float:
        """Most seconds of work that a power cut can lose; 0 where nothing fits."""
        if self.choice is None:
            return 0.0
        every_s = self.config.supervise.checkpoint_every_s
        return power_loss_s(self.setup, self.choice.step_s, every_s, disk_bytes_per_s=self.disk_bytes_per_s)

    @property
    def worth(self) -> Worth | None:
        """What the workers of the config are worth; None without the setting."""
        number, choice = self.config.workers, self.choice
        if number is None or choice is None:
            return None
        on_cpu = self.device.kind == "cpu"
        lengths = self.work.lengths
        aim = pack_tokens(sum(lengths), len(lengths), len(lengths), "cpu" if on_cpu else "cuda")
        packs = max(math.ceil(sum(lengths) / aim), math.ceil(choice.micro_batches))
        weights = self.setup.adapter_parameters
        if self.crew is not None:
            bytes_per_s, link = self.crew.bytes_per_s, self.crew.link
            return worth_of(self.crew.workers, packs, choice.step_s, weights, bytes_per_s=bytes_per_s, link=link)
        most = CORES_A_WORKER if on_cpu else max(1, self.cards)
        return worth_of(most if isinstance(number, str) else number, packs, choice.step_s, weights)


def plan_run(
    config: RunConfig,
    *,
    card: str | None = None,
    cores: int | None = None,
    memory_gb: float | None = None,
    rows: int | None = None,
    tokens: int | None = None,
) -> Planned:
    """The plan of a config. Raises UsageError for an unknown model or card, MachineNotFit for a cluster that does not
    answer."""
    architecture = find_architecture(config.model)
    machine = read_machine(folder=Path(config.output) if config.output else None)
    profile = read_profile(machine.fingerprint)
    if card:
        device = device_of_card(card, cores=cores, memory_gb=memory_gb)
    else:
        device = device_of_machine(machine, profile, config.device)
    prepared = find_prepared(config.model)
    work, known = guess_workload(config, rows, tokens, prepared.folder if prepared else None)
    trained, active = adapters_of(architecture, config.lora.r, config.lora.target_modules)
    setup = TrainingSetup(
        architecture,
        trained,
        choose_dtype(config.dtype, device),
        device.kind,
        quantized=config.method == "qlora",
        path="fast" if architecture.is_fast and config.method == "lora" else "general",
        active_adapter_parameters=active,
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
    own = Case(config.model, architecture, config.max_length, config.lora.r, precision_of(setup))
    options = what_would_fit(own, device, work, compared(config.model, device), memory_share=share)
    disk_bytes_per_s = profile.other_rates.get("disk", {}).get("write", DISK_BYTES_PER_S)
    cards = len(machine.cards)
    crew = _crew_of(config)
    return Planned(
        config, architecture, device, work, setup, choice, why_not, options, known, disk_bytes_per_s, cards, crew
    )


def _crew_of(config: RunConfig) -> _Crew | None:
    address = cluster_of(config)
    if address is None:
        return None
    view, here = ask_cluster(address), own_address(address)
    # The run's own worker has one of this machine's devices, where it offers some.
    offers = any(node.address == here and node.devices for node in view.nodes)
    link = link_of(here)
    workers = view.devices + (0 if offers else 1)
    return _Crew(workers, link.bytes_per_s if link else LOCAL_BYTES_PER_S, link.words if link else "")


def find_architecture(name: str) -> Architecture:
    """Of a prepared model, a folder with config.json, or a model that is known by its sizes."""
    if Path(name).is_dir():
        prepared = find_prepared(name)
        return read_architecture(prepared.folder if prepared else Path(name))
    known = known_model(name)
    prepared = None if known else find_prepared(name)
    if prepared:
        return read_architecture(prepared.folder)
    if known is None:
        raise UsageError(f"the sizes of model {name} are not known yet", hint=f"get it first: hivetune fetch {name}")
    return parse_architecture(known, name)


def guess_workload(
    config: RunConfig, rows: int | None, tokens: int | None, model_folder: Path | None = None
) -> tuple[Workload, str]:
    """From what is said, else from the rows of the data, else from a stated assumption; and in words, from which."""
    counted = None if rows and tokens else rows_to_train(config, model_folder)
    found_rows = rows or (counted.rows if counted else 1)
    known = "as you said" if rows or counted is None else counted.words
    batch_size, epochs, max_steps = config.batch_size, config.epochs, config.max_steps
    if config.learn.stage == 2:  # good rows and, beside them, bad ones; as often as the steps need
        batch_size, max_steps = math.ceil(batch_size * (1 + BAD_SHARE)), max_steps or config.learn.steps
        epochs = max(epochs, max_steps * batch_size / found_rows)
    work = assumed_workload(
        longest=config.max_length,
        mean=tokens or (counted.tokens if counted else 1),
        rows=found_rows,
        batch_size=batch_size,
        epochs=epochs,
        max_steps=max_steps,
    )
    return work, known


def precision_of(setup: TrainingSetup) -> str:
    return "nf4" if setup.quantized else setup.dtype


def case_of(planned: Planned) -> Case:
    config = planned.config
    return Case(config.model, planned.architecture, config.max_length, config.lora.r, precision_of(planned.setup))


def plan_document(planned: Planned) -> dict[str, Any]:
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
        }
        | {"rows_known": planned.rows_known},
        "fits": choice is not None,
        "disk_bytes": disk_bytes(setup),
        "options": [option.to_plain() for option in planned.options],
    }
    if choice is None:
        return {**content, "refusal": planned.why_not}
    hours = choice.step_s * planned.work.steps / 3600
    return {
        **content,
        "choices": {**choice.to_choices().made(), "micro_batches": choice.micro_batches},
        "memory": {"parts": dict(choice.peak.parts), "peak_bytes": choice.peak.bytes, "error": choice.peak.error},
        "limit_bytes": choice.limit_bytes,
        "streaming": None if choice.streaming is None else asdict(choice.streaming),
        "step_s": choice.step_s,
        "hours": hours,
        "hours_range": [hours * (1 - choice.error), hours * (1 + choice.error)],
        "workers": None if planned.worth is None else asdict(planned.worth),
        "power_loss_s": planned.power_loss_s,
    }

"""A run's choices before step 0, by rules: device, precision and kernels, then the form of its steps, then the path.

Each is a function of the config, the rows and the machine's facts, and is written to config.resolved.yaml, so a resumed
run computes as it began. Nothing is timed. Free memory only lets a run start or refuses it.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from hivetune.base.disk import MANIFEST, sha256_bytes
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import DoesNotFit
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile
from hivetune.models.architecture import read_architecture
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved
from hivetune.train.plan.choose import Workload, first_that_fits, size_text, with_advice
from hivetune.train.plan.device import device_of_machine
from hivetune.train.plan.memory import STREAM_BUFFERS, TrainingSetup, predict_peak, setup_of_run
from hivetune.train.plan.steps import Plan
from hivetune.train.worker import model as engine
from hivetune.train.worker.check import MAX_LAYERS_COMPARED, TOKENS, check_documents, right_choices
from hivetune.train.worker.device import complete, free_memory_bytes, start_with, with_threads
from hivetune.train.worker.model.load import is_known, load_model
from hivetune.train.worker.model.protocol import LoraModel

# The first steps of a plan stand for all.
STEPS_LOOKED_AT = 64


def settle(run: Path, config: RunConfig, choices: Choices, model: Path, plan: Plan, snapshot: Snapshot) -> Choices:
    """Return `choices` with all that is still to be chosen, and write them down.

    Raises MachineNotFit for a device that is not there, and DoesNotFit with what would fit.
    """
    settled = complete(config.device, config.dtype, with_threads(config, choices))
    if settled.budget_tokens is None:
        settled = _with_form(config, settled, model, plan, snapshot)
    if settled.agreement is None and settled.path is None:
        settled = _with_path(config, settled, model, plan, snapshot)
    if settled != choices:
        write_resolved(run, config, settled)
    return settled


def refuse_full_memory(choices: Choices) -> None:
    """Raise DoesNotFit where other programs hold so much memory that the run's peak has no room beside them."""
    free = free_memory_bytes(torch.device(choices.device or "cpu"))
    if choices.peak_bytes is not None and choices.peak_bytes > free:
        raise DoesNotFit(
            f"the run needs about {size_text(choices.peak_bytes)} of memory, and {size_text(free)} are free now",
            hint="end other programs, or choose smaller settings: hivetune plan CONFIG",
        )


def _with_form(config: RunConfig, settled: Choices, model: Path, plan: Plan, snapshot: Snapshot) -> Choices:
    device = device_of_machine(read_machine(), settled.device or "auto")
    setup = setup_of_run(config, read_architecture(model), settled, device.kind)
    if setup.path == "fast" and not is_known(model):
        setup = replace(setup, path="general")
    work = workload_of(config, plan, snapshot)
    try:
        chosen = first_that_fits(setup, device, work, memory_share=config.memory_share)
    except DoesNotFit as error:
        raise with_advice(error, setup, device, work, config.memory_share) from None
    # What a person or a test set in the choices stays.
    return replace(settled.over(chosen.to_choices()), budget_tokens=chosen.budget_tokens, peak_bytes=chosen.peak.bytes)


def workload_of(config: RunConfig, plan: Plan, snapshot: Snapshot) -> Workload:
    """Return the workload of a plan: the middle one of its first steps is the typical one."""
    steps = sorted(plan.steps[:STEPS_LOOKED_AT], key=lambda step: sum(snapshot.length(row) for row in step.rows))
    typical = steps[len(steps) // 2]
    return Workload(
        lengths=tuple(snapshot.length(row) for row in typical.rows),
        trained=tuple(snapshot.num_trained(row) for row in typical.rows),
        longest=max((snapshot.length(row) for row in set(plan.entry_rows)), default=2),
        rows=plan.num_rows,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


def _with_path(config: RunConfig, settled: Choices, model: Path, plan: Plan, snapshot: Snapshot) -> Choices:
    """Compare the fast path with transformers on a few rows, unless it was found right here under these conditions.

    In a process of its own: what transformers and a float64 model leave in memory would count as the run's.
    """
    if config.method == "qlora" or not is_known(model):
        return settled
    key = _conditions(model, settled)
    known = read_profile(read_machine().fingerprint).agreements.get(key)
    if known is not None:
        return replace(settled, agreement=known)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        changes = pool.submit(_compared, config, settled, model, snapshot.folder, plan.steps[0].rows).result()
    if changes.agreement is not None:
        changes = replace(changes, agreement={**changes.agreement, "key": key})
    settled = changes.over(settled)
    return unstreamed(config, settled, model, plan, snapshot) if settled.path == "general" else settled


def _compared(config: RunConfig, settled: Choices, model: Path, snapshot: Path, rows: Sequence[int]) -> Choices:
    """Return the choices under which the model computes what transformers does on some of these rows."""
    setup = setup_of_run(config, read_architecture(model), settled, torch.device(settled.device or "cpu").type)
    # Of a streamed model as many layers are compared as stay on the device.
    resident = min(setup.architecture.layers - setup.streamed + STREAM_BUFFERS, MAX_LAYERS_COMPARED)
    layers = resident if setup.streamed else None
    plain = config.lora.model_copy(update={"dropout": 0.0, "start": None})

    def load(changes: Choices) -> LoraModel:
        choices = changes.over(settled)
        device, dtype = start_with(choices)
        return load_model(
            model, plain, method=config.method, dtype=dtype, device=device, choices=choices, first_layers=layers
        )

    documents = check_documents(open_snapshot(snapshot), rows)
    return right_choices(load, documents, _truth_dtype(setup, config.memory_share))


def unstreamed(config: RunConfig, settled: Choices, model: Path, plan: Plan, snapshot: Snapshot) -> Choices:
    """Return `settled` of the general path, which streams nothing, with a form that fits without.

    Raises DoesNotFit, with the reason for the general path, where the model fits only with its layers streamed.
    """
    if not settled.streamed:
        return settled
    try:
        return _with_form(config, replace(settled, streamed=None), model, plan, snapshot)
    except DoesNotFit as error:
        why = f"only the fast path streams layers, and {settled.path_why}: {error.message}"
        raise DoesNotFit(why, hint=error.hint) from None


def _truth_dtype(setup: TrainingSetup, memory_share: float) -> str:
    """Return the widest precision in which transformers can compute the compared rows; while streaming the run's."""
    limit = read_machine().memory_bytes * memory_share
    plain = replace(setup, path="general", products=None, kind="cpu")
    wider = () if setup.streamed else ("float64", "float32")
    return next((w for w in wider if predict_peak(replace(plain, dtype=w), TOKENS).bytes <= limit), setup.dtype)


def _conditions(model: Path, settled: Choices) -> str:
    """Return the hash of what the agreement depends on: the weights, the engine's code, device, precision, kernels."""
    digest = hashlib.sha256()
    for source in sorted(Path(engine.__path__[0]).rglob("*")):
        if source.suffix in (".py", ".cpp", ".h"):
            digest.update(source.read_bytes())
    manifest = model / MANIFEST
    digest.update(sha256_bytes(manifest.read_bytes()).encode() if manifest.is_file() else str(model).encode())
    named = (settled.device, settled.dtype, settled.kernels, settled.products, settled.attention, settled.streamed)
    digest.update(repr(named).encode())
    return digest.hexdigest()[:32]

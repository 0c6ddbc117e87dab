"""The probe before a run: it measures GEMM rates and two steps, and writes profile and choices.

The formulas are in train/plan; here is only what must be measured. A probe holds for later runs with the same weights,
the same code of the engine, the same arithmetic settings and steps of like size; another driver, card or torch has
another profile. A probe whose steps contradicted each other is never used again.
"""

import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hivetune.base.disk import MANIFEST, sha256_bytes
from hivetune.base.typed import to_plain
from hivetune.config import RunConfig, parse_config
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile, write_profile
from hivetune.models.architecture import read_architecture
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Probe
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.run.folder import read_resolved, write_resolved
from hivetune.train.plan import choose
from hivetune.train.plan.device import Device, device_of_machine
from hivetune.train.plan.layout import trim_rows
from hivetune.train.plan.memory import TrainingSetup, predict_peak, setup_of_run
from hivetune.train.plan.speed import (
    PROBED_TIME_ERROR,
    Measured,
    Point,
    Prediction,
    Rate,
    Timed,
    micro_batch_shapes,
    predicted_and_actual,
    probe_key,
    read_measured,
)
from hivetune.train.plan.steps import Plan, PlanRow, make_plan, read_plan
from hivetune.train.worker import model as engine_model
from hivetune.train.worker.device import (
    complete,
    device_name,
    peak_memory_bytes,
    reset_peak_memory,
    start_with,
    with_threads,
)
from hivetune.train.worker.measure.agreement import TOKENS as COMPARED_TOKENS
from hivetune.train.worker.measure.agreement import check_documents, layers_compared, right_choices
from hivetune.train.worker.measure.rates import canary_rates, own_canary
from hivetune.train.worker.model.load import is_known, load_model
from hivetune.train.worker.model.protocol import Document, LoraModel, Streamed, read_documents
from hivetune.train.worker.optimizer import AdamW
from hivetune.train.worker.validation import VALIDATION_DOCUMENTS

# Timed rounds: two in a row that agree are enough, five where the machine is noisy. The prediction promises 10 %; two
# that differ by 5 % are each within 2.5 % of their median. 3 % was not met in two rounds by most probes (docs/log.md).
TIMED_ROUNDS, AGREE = (2, 5), 0.05
STEPS_LOOKED_AT = 64
STEPS_COMPARED = 50
CANARY_STEPS = 5
# A rate from two steps holds for steps between these multiples of the larger one.
LIKE_SIZE = (0.5, 2.0)


def conditions(model: Path, config: RunConfig, begun: Choices) -> dict[str, Any] | None:
    """Return the conditions of a probe besides its key; None where the model was not prepared and may change.

    `begun`: the choices before the probe.
    """
    manifest = model / MANIFEST
    if not manifest.is_file():
        return None
    digest = hashlib.sha256()
    for source in sorted(Path(engine_model.__path__[0]).rglob("*")):
        if source.suffix in (".py", ".cpp", ".h"):
            digest.update(source.read_bytes())
    return {
        "model": sha256_bytes(manifest.read_bytes()),
        "code": digest.hexdigest(),
        "begun": begun.made(),
    }


def known_probe(
    probe: Mapping[str, Any] | None, setup: TrainingSetup, holds: Mapping[str, Any] | None, tokens: int
) -> Measured | None:
    """Return the profile's probe as if measured now; None where it does not hold for steps of `tokens` tokens."""
    if probe is None or holds is None or probe.get("held") != to_plain(holds):
        return None
    measured = read_measured(setup, probe)
    largest = max(point.shape.tokens for point in measured.points)
    fits = LIKE_SIZE[0] <= tokens / largest <= LIKE_SIZE[1] and measured.rate().error <= PROBED_TIME_ERROR
    return measured if fits else None


def main(task: Probe, heartbeat: Heartbeat) -> dict[str, Any]:
    """Probe the run or config of `task`, and write profile and choices."""
    run = task.run
    config, choices = read_resolved(run) if run else (parse_config(dict(task.config), "task"), task.choices)
    snapshot = open_snapshot(task.snapshot)
    plan = read_plan(run) if run else _plan_of(config, snapshot)
    settled = complete(config.device, config.dtype, with_threads(config, choices))
    device, _ = start_with(settled)
    name = device_name(device)
    heartbeat.beat(Beat.PREPARING)
    architecture = read_architecture(task.model)
    machine = read_machine()
    profile = read_profile(machine.fingerprint)
    if name not in profile.rates:
        profile = profile.with_rates(name, canary_rates(device))
    target = device_of_machine(machine, profile, name)
    work, memory_share = workload_of(config, plan, snapshot), config.memory_share
    setup = setup_of_run(config, architecture, settled, target.kind)
    stored = profile.probes.get(probe_key(setup))
    first = _choose_before_loading(task.model, config, setup, target, work, stored)
    rows = _probe_rows(plan, snapshot, first.budget_tokens)
    measured_under = conditions(task.model, config, settled)
    tokens = micro_batch_shapes(setup, trim_rows(snapshot, rows[-1]), sys.maxsize, share=work.share)[0].tokens
    earlier = known_probe(stored, setup, measured_under, tokens) if run else None
    measured = earlier or _measure_right(
        task,
        config,
        settled,
        first,
        check_documents(snapshot, plan.steps[0].rows),
        lambda model: measure(model, first.setup, work, snapshot, rows, heartbeat),
        truth_dtype(first.setup, target.limit_bytes(memory_share)),
    )
    heartbeat.beat(Beat.MEASURED)
    settled = measured.changes.over(settled)
    dtype = setup.dtype
    rate = measured.rate(target.rates.get(dtype, math.inf))
    if rate.error > PROBED_TIME_ERROR:  # are the steps faster than their products were, when those were measured?
        profile = profile.with_rates(name, canary_rates(device))
        target = device_of_machine(machine, profile, name)
        rate = measured.rate(target.rates.get(dtype, math.inf))
    setup, correction = replace(setup, path=measured.setup.path), measured.correction
    chosen = choose.fastest_that_fits(setup, target, work, memory_share=memory_share, correction=correction, rate=rate)
    prediction = _predict(chosen, work, snapshot, measured, rate)
    settled = replace(_with(settled, chosen), prediction=asdict(prediction))
    if config.dtype == "auto":
        profile = profile.with_decided("dtypes", name, dtype)
    if settled.products is not None:
        profile = profile.with_decided("products", f"{name} {dtype}", settled.products)
    # What the plan reads, and what a later probe needs to skip measuring.
    write_profile(profile.with_probe(probe_key(setup), {**measured.to_plain(), "held": measured_under}))
    if run:
        write_resolved(run, config, settled)
    document = {"rates": dict(target.rates), "fingerprint": machine.fingerprint, "known": earlier is not None}
    return {"choices": settled.made(), **document}


def is_measured(step: int) -> bool:
    """Return whether the run's own canary is measured after this step: only beside steps that are compared."""
    return step <= STEPS_COMPARED and step % CANARY_STEPS == 0


def compare_with_prediction(
    run: Path,
    model_folder: Path,
    model: LoraModel,
    plan: Plan,
    snapshot: Snapshot,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """Compare prediction and result over the steps after the first, which warms up; None without a probe."""
    config, choices = read_resolved(run)
    if choices.prediction is None or choices.budget_tokens is None or choices.recompute is None:
        return None
    prediction = Prediction(**choices.prediction)
    setup = setup_of_run(config, read_architecture(model_folder), choices, model.device.type)
    setup = replace(setup, recompute=choices.recompute, path=model.path, streamed=model.num_streamed)
    timed = []
    steps = [entry for entry in metrics if entry["event"] == "step" and entry["loss"] is not None]
    for event in steps[1 : 1 + STEPS_COMPARED]:
        rows = trim_rows(snapshot, plan.steps[event["step"] - 1].rows)
        shapes = micro_batch_shapes(setup, rows, choices.budget_tokens, share=True)
        timed.append(Timed(event["tokens"], prediction.rate.seconds(setup, shapes), event["seconds"]))
    return predicted_and_actual(
        prediction,
        timed,
        peak_bytes=peak_memory_bytes(model.device),
        canary=[entry["flops_per_s"] for entry in metrics if entry["event"] == "rate"],
    )


def measure(
    model: LoraModel,
    setup: TrainingSetup,
    work: choose.Workload,
    snapshot: Snapshot,
    steps: Sequence[Sequence[int]],
    heartbeat: Heartbeat,
) -> Measured:
    """Measure a step on each of these lists of rows, smallest first."""
    setup = replace(setup, path=model.path, streamed=model.num_streamed)
    load_peak_bytes = peak_memory_bytes(model.device)
    optimizer = AdamW(model.master_N, model.grad_N, weight_decay=0.0)  # its buffers are part of the peak
    optimizer.update(rate=0.0, number=1)
    documents = [read_documents(snapshot, rows) for rows in steps]
    peaks = []
    for step in documents:
        reset_peak_memory(model.device)
        model.backward(step, 0.0)  # buffers grow, kernels are chosen
        heartbeat.beat(Beat.PREPARING)
        peaks.append(peak_memory_bytes(model.device))
    seconds: list[list[float]] = [[] for _ in steps]
    rates: list[float] = []
    read: list[Streamed] = []
    model.streamed()  # forget what was read before
    while len(rates) < TIMED_ROUNDS[1] and not _agree(seconds):  # in turns, so that a slow second hits all
        for step, of_step in zip(documents, seconds, strict=True):
            started = time.perf_counter()
            model.grad_N.zero_()
            model.backward(step, 0.0)
            torch.linalg.vector_norm(model.grad_N, dtype=torch.float64).item()  # waits for the device
            optimizer.update(rate=0.0, number=1)
            took_s = time.perf_counter() - started
            read.append(model.streamed())
            of_step.append(took_s - read[-1].waited_s)
            heartbeat.beat(Beat.PREPARING)
        rates.append(own_canary(setup.architecture, setup.dtype, model.device))
    shapes = [micro_batch_shapes(setup, trim_rows(snapshot, rows), sys.maxsize, share=work.share)[0] for rows in steps]
    points = [Point(*point) for point in zip(shapes, map(statistics.median, seconds), peaks, strict=True)]
    if model.device.type == "cpu":  # a card's steps are timed again when they are replayed
        heartbeat.beat(Beat.MEASURED)
    read_s, read_bytes = sum(part.read_s for part in read), sum(part.size_bytes for part in read)
    read_bytes_per_s = read_bytes / read_s if read_s else None
    return Measured(setup, points, load_peak_bytes, statistics.median(rates), read_bytes_per_s=read_bytes_per_s)


def _agree(seconds: Sequence[Sequence[float]]) -> bool:
    """Return whether the last rounds took each step equally long. A slow first round is common and drops out."""
    last = [of_step[-TIMED_ROUNDS[0] :] for of_step in seconds]
    return all(len(s) == TIMED_ROUNDS[0] and max(s) <= (1 + AGREE) * min(s) for s in last)


def workload_of(config: RunConfig, plan: Plan, snapshot: Snapshot) -> choose.Workload:
    """Return the workload of a plan: its first steps stand for all, the middle one of them is the typical one."""
    steps = sorted(plan.steps[:STEPS_LOOKED_AT], key=lambda step: sum(snapshot.length(row) for row in step.rows))
    if not steps:
        raise UsageError("the plan has no steps: there is nothing to measure")
    typical = steps[len(steps) // 2]
    return choose.Workload(
        lengths=tuple(snapshot.length(row) for row in typical.rows),
        trained=tuple(snapshot.num_trained(row) for row in typical.rows),
        documents=tuple(trim_rows(snapshot, step.rows) for step in steps),
        share=True,
        longest=max(snapshot.length(row) for row in set(plan.entry_rows)),
        rows=plan.num_rows,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


def _measure_right(
    task: Probe,
    config: RunConfig,
    settled: Choices,
    first: choose.Choice,
    documents: Sequence[Document],
    timed: Callable[[LoraModel], Measured],
    truth: str | None,
) -> Measured:
    """Measure steps of the model, then choose the path that computes right.

    The comparison comes second, so that no measured peak contains a second model. A model that has to be streamed is
    compared by as many of its layers as transformers can hold too.
    """

    def load_under(changes: Choices, config: RunConfig = config, first_layers: int | None = None) -> LoraModel:
        choices = changes.over(settled)
        device, dtype = start_with(choices)
        return load_model(
            task.model,
            config.lora,
            method=config.method,
            dtype=dtype,
            device=device,
            choices=_with(choices, first),
            first_layers=first_layers,
        )

    loaded = [load_under(NO_CHOICES)]
    measured = timed(loaded[0])
    layers = layers_compared(first.setup)
    if config.lora.dropout or layers:  # what is compared has none, or has fewer
        loaded.clear()

    def load(changes: Choices) -> LoraModel:
        if loaded and not changes.made():
            return loaded.pop()
        loaded.clear()  # no two at the same time
        return load_under(changes, plain, layers)

    plain = config.model_copy(update={"lora": config.lora.model_copy(update={"dropout": 0.0})})
    changes = right_choices(load, documents, truth_dtype=truth)
    if layers and changes.agreement is not None:
        changes = replace(changes, agreement={**changes.agreement, "first_layers": layers})
    if changes.made().keys() - {"agreement"}:
        measured = timed(load_under(changes))
    return replace(measured, changes=changes)


def truth_dtype(setup: TrainingSetup, limit_bytes: int) -> str | None:
    """Return the widest precision in which the general path can compute the compared rows within `limit_bytes`.

    None for a base in four bits, or one that is streamed.
    """
    if setup.quantized or setup.streamed:
        return None
    plain = replace(setup, path="general", products=None)
    return next(
        (
            dtype
            for dtype in ("float64", "float32")
            if predict_peak(replace(plain, dtype=dtype), COMPARED_TOKENS).bytes <= limit_bytes
        ),
        None,
    )


def _predict(
    chosen: choose.Choice,
    work: choose.Workload,
    snapshot: Snapshot,
    measured: Measured,
    rate: Rate,
) -> Prediction:
    """Predict a run. The peak is that of the largest micro-batch of the first steps, with all row counts."""
    steps = work.micro_batches(chosen.setup, chosen.budget_tokens)
    rows = snapshot.rows("validation")[: STEPS_LOOKED_AT * VALIDATION_DOCUMENTS]
    groups = [rows[start:][:VALIDATION_DOCUMENTS] for start in range(0, len(rows), VALIDATION_DOCUMENTS)]
    scored = replace(work, documents=tuple(trim_rows(snapshot, group) for group in groups))
    if groups:
        steps += scored.micro_batches(chosen.setup, chosen.budget_tokens)
    shapes = [shape for step in steps for shape in step]
    row_counts = len({shape.tokens for shape in shapes}) + len({shape.trained for shape in shapes})
    most = max(shape.tokens for step in steps[: len(work.documents)] for shape in step)
    peak = predict_peak(chosen.setup, most, measured.correction, row_counts=row_counts)
    return Prediction(
        flops_per_s=rate.flops_per_s,
        overhead_s=rate.overhead_s,
        error=rate.error,
        peak_bytes=max(peak.bytes, measured.load_peak_bytes),
        peak_error=peak.error,
        canary_flops_per_s=measured.canary_flops_per_s,
        read_bytes_per_s=chosen.streaming.bytes_per_s if chosen.streaming else None,
    )


def _probe_rows(plan: Plan, snapshot: Snapshot, budget_tokens: int) -> list[list[int]]:
    """Return half of a large step and a whole one, or half a budget and a whole one where a step is larger."""
    steps = plan.steps[:STEPS_LOOKED_AT]
    rows = list(max(steps, key=lambda step: sum(snapshot.length(row) for row in step.rows)).rows)
    while len(rows) > 1 and sum(snapshot.length(row) for row in rows) > budget_tokens:
        rows.pop()
    return [rows[: len(rows) // 2], rows] if len(rows) > 1 else [rows]


def _choose_before_loading(
    model: Path,
    config: RunConfig,
    setup: TrainingSetup,
    target: Device,
    work: choose.Workload,
    stored: Mapping[str, Any] | None,
) -> choose.Choice:
    """Choose by formula, corrected by the profile's probe as the plan is. Raises DoesNotFit with what would fit, before
    a weight is read.
    """
    share = config.memory_share
    correction = None if stored is None else read_measured(setup, stored).correction
    try:
        chosen = choose.fastest_that_fits(setup, target, work, memory_share=share, correction=correction)
        if chosen.setup.streamed and not is_known(model):
            setup = replace(setup, path="general")  # which streams nothing
            chosen = choose.fastest_that_fits(setup, target, work, memory_share=share)
        return chosen
    except DoesNotFit as error:
        case = choose.Case(config.model, setup.architecture, work.longest, config.lora.r, setup.precision)
        others = choose.compared(config.model, target)
        fitting = choose.fitting_options(case, target, work, others, memory_share=share)
        raise choose.with_advice(error, fitting, case) from None


def _with(settled: Choices, chosen: choose.Choice) -> Choices:
    """Return the choices made over the settled ones. The device stays as written: `cuda` is not a plan's `cuda:0`."""
    return replace(chosen.to_choices().over(settled), device=settled.device)


def _plan_of(config: RunConfig, snapshot: Snapshot) -> Plan:
    rows = [PlanRow(row, str(row), snapshot.length(row), snapshot.num_trained(row)) for row in snapshot.rows("train")]
    return make_plan(
        rows,
        snapshot_hash=snapshot.hash,
        settings_hash="",
        seed=config.seed,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


if __name__ == "__main__":
    run_child(main, Probe)

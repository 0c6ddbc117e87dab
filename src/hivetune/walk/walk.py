"""The walk: one function a station, in the order in which an interaction passes them. Each calls one room.

A run's folder is opened here: its identity (settings, snapshot, model), its plan and its record. What the stations
mean lives in the rooms; docs/design.md draws the whole.
"""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from hivetune import __version__
from hivetune.base.database import open_database
from hivetune.base.disk import home, lock, read_json, sha256_file, write_atomic, write_json, write_manifest
from hivetune.base.journal import read_journal
from hivetune.config import RunConfig, parse_config
from hivetune.data.prepare.prepare import prepare
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import DataRefused, HivetuneError, UsageError
from hivetune.judge.evaluate import collect, plan_evaluation
from hivetune.judge.gate import judge
from hivetune.models.prepared import find_prepared, folder_for
from hivetune.plan.steps import Plan, PlanRow, in_chunks, make_plan, read_plan, write_plan
from hivetune.process.parent import OUTCOME, run_task
from hivetune.records import Accounting, Verdict
from hivetune.run import checkpoints
from hivetune.run.folder import ADAPTER, CONFIG, EVALUATION, EVENTS, METRICS, PROBE, RECORD, SCORING, VERDICT
from hivetune.supervise.supervisor import supervise_run

Progress = Callable[[int, int | None], None]
# What huggingface_hub takes for yes in HF_HUB_OFFLINE.
OFFLINE = ("1", "on", "yes", "true")
# Of the worker's result, what `train --json` tells.
REPORTED = (
    "loss_first",
    "loss_last",
    "best",
    "adapter_step",
    "stopped_early",
    "tokens",
    "train_seconds",
    "tokens_per_second",
    "samples_per_second",
    "peak_memory_bytes",
    "prediction",
    "path",
    "why",
)
# What says where or how carefully, not what: changing it does not make another run.
NOT_IDENTITY = ("output", "supervise", "eval", "gate")


def silent(done: int, total: int | None) -> None:
    """The progress of whoever does not look."""


@dataclass(frozen=True)
class Run:
    """An opened run folder."""

    folder: Path
    config: RunConfig
    model: Path
    snapshot: Snapshot
    plan: Plan

    @property
    def record(self) -> dict[str, Any]:
        document: dict[str, Any] = read_json(self.folder / RECORD)
        return document


def fetch_model(name: str, progress: Progress = silent) -> Path:
    """The prepared folder of a model (Hub id, folder, GGUF file, smollm2-135m), made on first use.

    Raises UsageError for a name that is nothing, MachineNotFit without the packages or the network that it takes.
    """
    prepared = find_prepared(name)
    if prepared is not None:
        return prepared.folder
    folder = folder_for(name)
    beats = itertools.count(1)
    run_task(
        "prepare_model",
        {"model": name, "target": str(folder), "offline": os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE},
        folder.with_name(f".{folder.name}.task"),
        on_beat=lambda kind: progress(next(beats), None),
    ).check(f"preparing {name}")
    return folder


def prepare_data(config: RunConfig, model: Path, progress: Progress = silent) -> Snapshot:
    """The snapshot of the config's rows, made or found. Raises DataRefused when too few rows are usable."""
    snapshot = prepare(config, model, None, progress)
    if not snapshot.rows("train"):
        raise DataRefused(f"no row of {config.data.path} is left to train on", hint="see why: hivetune data check")
    return snapshot


def open_run(config: RunConfig, name: str, progress: Progress = silent) -> Run:
    """The run of this config and data: found when it exists, else made with its plan. Trains nothing.

    Raises UsageError when the folder belongs to another config or other data, naming the difference.
    """
    model = fetch_model(config.model, progress)
    snapshot = prepare_data(config, model, progress)
    identity = {"settings": settings_of(config), "snapshot": snapshot.hash, "model": _model_hash(model)}
    settings_hash = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = Path(config.output).expanduser() if config.output else home() / "runs" / f"{name}-{settings_hash[:10]}"
    folder = folder.resolve()
    if (folder / RECORD).exists():
        _refuse_other(folder, identity)
        return load_run(folder)
    if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
        raise UsageError(f"{folder} is neither empty nor a run", hint="choose another output folder")
    plan = _plan_of(config, snapshot, settings_hash)
    folder.mkdir(parents=True, exist_ok=True)
    resolved = {"config": config.model_dump(mode="json"), "choices": {}}
    write_atomic(folder / CONFIG, yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).encode())
    write_plan(folder, plan)
    record = {
        "schema": 1,
        "name": name,
        "created": round(time.time(), 3),
        "hivetune": __version__,
        "model": str(model),
        "snapshot": str(snapshot.folder),
        "identity": identity,
        "status": "new",
    }
    write_json(folder / RECORD, record)
    with open_database() as database:
        database.execute(
            "INSERT OR REPLACE INTO runs (path, name, created, snapshot) VALUES (?, ?, ?, ?)",
            (str(folder), name, record["created"], snapshot.hash),
        )
    return Run(folder, config, model, snapshot, plan)


def load_run(folder: Path) -> Run:
    """An existing run. Raises UsageError when the folder is none, or lost its snapshot or model."""
    if not (folder / RECORD).exists():
        raise UsageError(f"{folder} is no run folder", hint="see the runs: hivetune runs")
    record = read_json(folder / RECORD)
    resolved = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    model = Path(record["model"])
    if not model.exists():
        raise UsageError(
            f"the model of {folder} is gone: {model}", hint=f"hivetune fetch {resolved['config']['model']}"
        )
    snapshot = open_snapshot(Path(record["snapshot"]))
    return Run(folder, parse_config(resolved["config"], str(folder / CONFIG)), model, snapshot, read_plan(folder))


def update_record(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change fields of run.json atomically; only the process that holds the run's lock may."""
    record = {**read_json(folder / RECORD), **changes}
    write_json(folder / RECORD, record)
    return record


def probe(run: Run, progress: Progress = silent) -> None:
    """Measure this machine with the run's own shapes and write the choices down, once, before step 0.

    Raises DoesNotFit with what would fit. A probe that dies leaves the run without measured choices: finding out why
    workers die is the supervisor's business.
    """
    with lock(run.folder):
        if (run.folder / PROBE / OUTCOME).exists() or checkpoints.steps(run.folder):
            return
        beats = itertools.count(1)
        task = {"run": str(run.folder), "model": str(run.model), "snapshot": str(run.snapshot.folder)}
        outcome = run_task("probe", task, run.folder / PROBE, on_beat=lambda kind: progress(next(beats), None))
        if outcome.error is not None and outcome.error.exit_code != 1:
            (run.folder / PROBE / OUTCOME).unlink()
            outcome.check("the probe")


def train(run: Run, on_step: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Train to the end under the supervisor; the document of `train --json`. A finished run is only reported.

    Raises: Stopped, RecoveryExhausted, Busy and what else ends a run; the folder holds what was reached.
    """
    record = run.record
    if record["status"] == "done":
        return {**record["result"], "already_done": True}
    outcome = supervise_run(run.folder, run.config, model=run.model, snapshot=run.snapshot.folder, on_step=on_step)
    run = load_run(run.folder)  # with the amendments that were made
    result = outcome.result
    # Of the whole run: a resumed one does not forget what happened before.
    events = list(read_journal(run.folder / EVENTS))
    document = {
        "schema": 1,
        "run": str(run.folder),
        "status": outcome.status,
        "steps": outcome.steps,
        "steps_planned": len(run.plan.steps),
        "trained_tokens": result.get("trained_tokens", 0),
        "rows": asdict(account(run, outcome.steps)),
        **{key: result.get(key) for key in REPORTED},
        "restarts": sum(entry["event"] == "attempt" and entry["number"] > 1 for entry in events),
        "faults": [entry["fault"] for entry in events if entry["event"] == "failure"],
        "rungs": list(outcome.rungs),
        "useful_share": outcome.useful_share,
        "quarantined": quarantined_rows(run),
        "already_done": False,
    }
    with lock(run.folder):
        update_record(run.folder, status=outcome.status, result=document)
        if outcome.status == "done":
            write_manifest(run.folder, {"kind": "run"})
    outcome.check()
    return document


def quarantined_rows(run: Run) -> list[str]:
    """`file:line: reason` of each row that was taken out at run time."""
    return [
        f"{run.snapshot.info(row).source}: {amendment.reason}"
        for amendment in run.plan.amendments
        if amendment.until_step is None
        for row in amendment.rows
    ]


def account(run: Run, steps_done: int) -> Accounting:
    """Law 1 for a run: the snapshot's accounting with its training rows divided by what became of them."""
    counts = run.plan.count_rows(steps_done)
    taken_in = run.snapshot.manifest["accounting"]
    return Accounting(
        rows_in=taken_in["rows_in"],
        trained=counts.trained,
        held_out=len(run.snapshot.rows("validation")) + len(run.snapshot.rows("test")),
        duplicates=taken_in["duplicates"],
        rejected=taken_in["rejected"],
        set_aside=taken_in["set_aside"],
        quarantined=counts.quarantined,
        not_reached=counts.not_reached,
    )


def evaluate(run: Run, progress: Progress = silent) -> dict[str, Any]:
    """Base and tuned model on the held-out test rows: `eval.json`. Raises UsageError when nothing was trained."""
    if not (run.folder / ADAPTER).exists():
        raise UsageError(f"{run.folder} has no adapter yet", hint="train it first: hivetune train CONFIG")
    planned = plan_evaluation(run.snapshot, run.config.eval)
    folder = run.folder / SCORING
    task = {
        "model": str(run.model),
        "adapter": str(run.folder),
        "snapshot": str(run.snapshot.folder),
        "dtype": run.config.dtype,
        "device": run.config.device,
        **planned,
    }
    total = 2 * (len(planned["rows"]) + len(planned["generate"]["rows"]))
    done = 0

    def beat(kind: str) -> None:
        nonlocal done
        if kind == "t":
            done += 1
            progress(min(done, total), total)

    result = run_task("score", task, folder, on_beat=beat).check("evaluation")
    about = {"run": str(run.folder), "model": run.config.model, "adapter_sha256": _adapter_hash(run.folder)}
    evaluation = collect(run.snapshot, run.config.eval, read_scores(folder / "scores.jsonl"), result, about)
    write_json(run.folder / EVALUATION, evaluation)
    return evaluation


def read_scores(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def decide(run: Run) -> Verdict:
    """The verdict on `eval.json` by the config's thresholds: `gate.json`. Raises UsageError without an evaluation."""
    path = run.folder / EVALUATION
    evaluation = read_json(path) if path.exists() else None
    if evaluation is None or evaluation.get("adapter_sha256") != _adapter_hash(run.folder):
        raise UsageError(f"{run.folder} has no evaluation of its present adapter", hint=f"hivetune eval {run.folder}")
    verdict = judge(evaluation, run.config.gate)
    write_json(run.folder / VERDICT, verdict_document(verdict))
    return verdict


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """The JSON of `gate --json` and gate.json."""
    metrics = []
    for metric in verdict.metrics:
        fields = {name: getattr(metric, name) for name in metric.__dataclass_fields__}
        metrics.append({**fields, "ci95": list(metric.ci95) if metric.ci95 else None})
    return {"schema": 1, "verdict": verdict.verdict, "reasons": list(verdict.reasons), "metrics": metrics}


def loss_curve(run: Run) -> list[tuple[int, float, str]]:
    """(step, nats per token, "step" or "validation"), the newest line of a step that was repeated after a crash."""
    points: dict[tuple[str, int], float] = {}
    for entry in read_journal(run.folder / METRICS):
        if entry["event"] in ("step", "validation"):
            points[entry["event"], entry["step"]] = entry["loss"]
    return sorted((step, loss, kind) for (kind, step), loss in points.items())


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings that make a run what it is."""
    settings = {key: value for key, value in config.model_dump(mode="json").items() if key not in NOT_IDENTITY}
    chunk_rows = config.supervise.chunk_rows  # the one of its section that changes the plan
    return settings if chunk_rows is None else {**settings, "supervise": {"chunk_rows": chunk_rows}}


def _plan_of(config: RunConfig, snapshot: Snapshot, settings_hash: str) -> Plan:
    rows = [PlanRow(*row) for row in snapshot.plan_rows("train")]

    def make(part: Sequence[PlanRow]) -> Plan:
        return make_plan(
            part,
            snapshot_hash=snapshot.hash,
            settings_hash=settings_hash,
            seed=config.seed,
            batch_size=config.batch_size,
            epochs=config.epochs,
            max_steps=config.max_steps,
        )

    chunk_rows = config.supervise.chunk_rows
    return make(rows) if chunk_rows is None else in_chunks(rows, chunk_rows, make)


def _refuse_other(folder: Path, identity: Mapping[str, Any]) -> None:
    known = read_json(folder / RECORD)["identity"]
    if known == identity:
        return
    differences = [
        f"{key}: {_at(known['settings'], key)!r} there, {_at(identity['settings'], key)!r} here"
        for key in sorted(_leaves(known["settings"]) | _leaves(identity["settings"]))
        if _at(known["settings"], key) != _at(identity["settings"], key)
    ]
    differences += [f"another {part}" for part in ("snapshot", "model") if known[part] != identity[part]]
    raise UsageError(
        f"{folder} holds a run with other settings or data: {'; '.join(differences)}",
        hint="choose another output folder, or go on with the old config",
    )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return found


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _model_hash(folder: Path) -> str:
    return sha256_file(folder / "manifest.json")


def _adapter_hash(folder: Path) -> str:
    path = folder / ADAPTER
    if not path.exists():
        raise HivetuneError(f"{path} is missing", hint="train again, or resume: hivetune resume")
    return sha256_file(path)

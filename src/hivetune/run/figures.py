"""The figures of a run for the tools of `report_to`: settings, points, verdict; each written by the tool's own client.

TensorBoard's points are written by the worker while it trains (train/worker/session.py). The other tools get a run when
it has ended, and again when it has a verdict, each in a child process: `python -m hivetune.run.figures RUN TOOL`. If a
tool fails, a message names it, and the run is not affected.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, sha256_bytes
from hivetune.base.documents import read_document
from hivetune.base.journal import read_journal
from hivetune.base.paths import install_command
from hivetune.base.private import make_folder
from hivetune.run.folder import EVALUATION, METRICS, read_record, read_resolved

TENSORBOARD = "tensorboard"  # folder of the event files in a run
PROJECT = "hivetune"
SEND_TIMEOUT_S = 300.0
# Field of the journal's line -> name in every tool. Their pages make a section of the part before the slash.
_NAMES = {
    "step": {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate"},
    "validation": {"loss": "validation/loss"},
}
_POINTS_A_REQUEST, _PARAMETERS_A_REQUEST, _MAX_PARAMETER_CHARS = 200, 100, 6000  # MLflow's limits


@dataclass(frozen=True)
class RunPoint:
    """The finite values of one line of metrics.jsonl, by their names in the tools. `step`: number of finished steps."""

    step: int
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Figures:
    """The content of a run's report. `id` distinguishes the run from another one of the same name. `settings`: dotted
    names and values. `outcome`: status, verdict and measures in words.
    """

    id: str
    name: str
    created_s: float
    settings: Mapping[str, Any]
    points: Sequence[RunPoint]
    outcome: Mapping[str, str]


def point_of(entry: Mapping[str, Any]) -> RunPoint | None:
    """Return the figures in a line of metrics.jsonl; None for lines of other events, and for a step without a loss, all
    of whose rows had been removed."""
    kind = entry["event"]
    if kind not in _NAMES or entry.get("loss") is None:
        return None
    values = {name: float(entry[field]) for field, name in _NAMES[kind].items() if entry.get(field) is not None}
    if kind == "step" and entry.get("tokens") and entry.get("seconds"):
        values["train/tokens_per_second"] = entry["tokens"] / entry["seconds"]
    return RunPoint(entry["step"], entry["time"], values)


def figures_of(run: Path) -> Figures:
    """Return the figures of a run. Raises UsageError where its record, settings or verdict are damaged."""
    record = read_record(run)
    config, choices = read_resolved(run)
    settings = flat_settings({**config.model_dump(mode="json", exclude_none=True), "chosen": choices.as_dict()})
    identity = sha256_bytes(f"{run.resolve()} {record['created']}".encode())[:16]
    points = [point for entry in read_journal(run / METRICS) if (point := point_of(entry))]
    outcome = {"status": str(record["status"])}
    if (run / EVALUATION).exists():
        verdict = read_document(run / EVALUATION)
        outcome["verdict"] = str(verdict["verdict"])
        gains = {metric["name"]: metric["gain"] for metric in verdict["metrics"]}
        outcome |= {f"verdict.{name}": f"{value:+.4g}" for name, value in gains.items() if value is not None}
    return Figures(identity, f"{run.name}-{identity[:8]}", record["created"], settings, points, outcome)


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names; lists stay as they are, empty sections are left out."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def missing_tools(targets: Sequence[str]) -> list[str]:
    """Return a sentence for each of the `targets` whose package is not installed."""
    return [
        f"nothing is reported to {target}: its package is not installed ({install_command(target)})"
        for target in dict.fromkeys(targets)
        if importlib.util.find_spec(target) is None
    ]


def report(run: Path, targets: Sequence[str]) -> list[str]:
    """Send a run to its tools, each in a child, and return the problems in words. Takes at most SEND_TIMEOUT_S each."""
    problems = []
    for target in dict.fromkeys(targets):
        if target == TENSORBOARD or importlib.util.find_spec(target) is None:
            continue  # the worker has written its points; `missing_tools` told the other before the run
        command = [sys.executable, "-m", "hivetune.run.figures", str(run), target]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=SEND_TIMEOUT_S, check=False)
        except (subprocess.TimeoutExpired, OSError) as error:
            problems.append(f"the run was not reported to {target}: {error}")
            continue
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1][:300]
            problems.append(f"the run was not reported to {target}: {last}")
    return problems


def to_mlflow(figures: Figures) -> None:
    """Write the MLflow run, replacing an earlier one, to $MLFLOW_TRACKING_URI, or to SQLite in the home."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each migration of a new SQLite file
    uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
    if uri is None:
        folder = home() / "mlflow"
        make_folder(folder)
        uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
    client: Any = MlflowClient(tracking_uri=uri)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name, artifacts) if known is None else known.experiment_id
    # A run can't be emptied, so one that was sent before is replaced.
    for earlier in client.search_runs([experiment], f"tags.`hivetune.run` = '{figures.id}'"):
        client.delete_run(earlier.info.run_id)
    tags = {"hivetune.run": figures.id, **{f"hivetune.{key}": value for key, value in figures.outcome.items()}}
    created_ms = round(figures.created_s * 1000)
    identity = client.create_run(experiment, created_ms, tags, run_name=figures.name).info.run_id
    parameters = [Param(key, str(value)[:_MAX_PARAMETER_CHARS]) for key, value in figures.settings.items()]
    for begin in range(0, len(parameters), _PARAMETERS_A_REQUEST):
        client.log_batch(identity, params=parameters[begin : begin + _PARAMETERS_A_REQUEST])
    metrics = [
        Metric(key, value, round(point.time_s * 1000), point.step)
        for point in figures.points
        for key, value in point.values.items()
    ]
    for begin in range(0, len(metrics), _POINTS_A_REQUEST):
        client.log_batch(identity, metrics=metrics[begin : begin + _POINTS_A_REQUEST])
    ended = {"done": "FINISHED", "failed": "FAILED"}.get(figures.outcome["status"], "KILLED")
    last_s = figures.points[-1].time_s if figures.points else figures.created_s
    client.set_terminated(identity, ended, end_time=round(last_s * 1000))


def to_trackio(figures: Figures) -> None:
    """Write the trackio run, replacing an earlier one, to $TRACKIO_DIR or the home."""
    folder = os.environ.setdefault("TRACKIO_DIR", str(home() / "trackio"))  # read when trackio is imported
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    make_folder(Path(folder))
    from trackio import SQLiteStorage

    # Not by init, log and finish: their points have no time but that of the call, and a write that fails is a warning.
    storage: Any = SQLiteStorage
    storage.delete_run(PROJECT, figures.name, run_id=figures.id)
    storage.bulk_log(
        PROJECT,
        figures.name,
        [dict(point.values) for point in figures.points],
        steps=[point.step for point in figures.points],
        timestamps=[datetime.fromtimestamp(point.time_s, UTC).isoformat() for point in figures.points],
        config={**figures.settings, **figures.outcome},
        run_id=figures.id,
    )


def to_wandb(figures: Figures) -> None:
    """Write an offline W&B run for `wandb sync`, replacing an earlier one, to $WANDB_DIR or the home."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    folder = Path(os.environ.get("WANDB_DIR") or home() / "wandb")
    make_folder(folder)
    earlier = list((folder / "wandb").glob(f"offline-run-*-{figures.id}"))
    # Nothing but the figures leaves the run: no code, no command, no machine, no list of packages.
    kept_out = ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta", "x_disable_machine_info")
    quiet = dict.fromkeys(("silent", *kept_out), True) | {"x_save_requirements": False}
    about = {"project": PROJECT, "id": figures.id, "name": figures.name, "config": dict(figures.settings)}
    settings = wandb.Settings(console="off", **quiet)
    wandb_run = wandb.init(dir=str(folder), mode="offline", settings=settings, **about)
    rows: dict[int, dict[str, float]] = {}  # a validation belongs to the row of its step
    for point in figures.points:
        row = rows.setdefault(point.step, {"_timestamp": 0.0})
        row |= {**point.values, "_timestamp": max(row["_timestamp"], point.time_s)}
    for step, row in sorted(rows.items()):
        wandb_run.log(row, step=step)
    wandb_run.summary.update(dict(figures.outcome))
    wandb_run.finish(exit_code=1 if figures.outcome["status"] == "failed" else 0)
    for path in earlier:  # the new one is whole by now
        shutil.rmtree(path)


_TOOLS = {"mlflow": to_mlflow, "trackio": to_trackio, "wandb": to_wandb}


if __name__ == "__main__":
    _TOOLS[sys.argv[2]](figures_of(Path(sys.argv[1])))

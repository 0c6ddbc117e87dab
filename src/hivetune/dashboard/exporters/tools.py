"""The tools whose own libraries take the points of a run: MLflow, trackio and W&B.

MLflow: a tracking server, or a SQLite file that `mlflow ui` shows. trackio: its local database, which `trackio show`
draws. W&B: a run on the disk for `wandb sync`, written whole when the run ends. Only MLflow's server is over a network.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hivetune.base.disk import read_json, write_json
from hivetune.base.paths import real_path
from hivetune.dashboard.exporters.points import PROJECT, HeldPoints, RunPoint, Subject, main_value, point_kind

RUN_TAG = "hivetune.run"
# MLflow's limits of one request: 1,000 metrics, 100 parameters, 6,000 characters of a parameter.
_POINTS_A_REQUEST, _PARAMETERS_A_REQUEST, _MAX_PARAMETER_CHARS, _MAX_TAG_CHARS = 200, 100, 6000, 5000
_ENDED = {"done": "FINISHED", "failed": "FAILED"}
# The exporter retries itself, and says so; the client alone would be silent for minutes.
_CLIENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def tracking_uri(target: str) -> str:
    """Return MLflow's URI. A folder or a file means a SQLite database."""
    if "://" in target:
        return target
    path = real_path(target)
    return f"sqlite:///{path if path.suffix == '.db' else path / 'mlflow.db'}"


class MLflow:
    """One MLflow run for each run, found again by its tag. MLflow can't remove points: a step that was made again after
    it was sent keeps its first values, which on a CPU are the same."""

    def __init__(self, subject: Subject, target: str):
        os.environ.update({name: value for name, value in _CLIENT.items() if name not in os.environ})
        from mlflow import MlflowClient  # takes seconds

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri = tracking_uri(target)
        artifacts = None
        if uri.startswith("sqlite:///"):
            folder = Path(uri.removeprefix("sqlite:///")).parent
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            artifacts = (folder / "artifacts").as_uri()  # its default is below whatever folder the command ran in
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._run = self._find_or_make(subject, artifacts)

    def held(self) -> HeldPoints:
        points: HeldPoints = {}
        for kind in ("step", "validation"):
            for metric in self._client.get_metric_history(self._run, main_value(kind)):
                points[kind, metric.step] = metric.timestamp
        return points

    def take_back(self, step: int, held: HeldPoints) -> HeldPoints:
        return held

    def add(self, points: Sequence[RunPoint]) -> None:
        """Send all values of a point in one request, which is one transaction: a kill leaves no half point."""
        from mlflow.entities import Metric

        for begin in range(0, len(points), _POINTS_A_REQUEST):
            metrics = [
                Metric(name, value, point.time_ms, point.step)
                for point in points[begin : begin + _POINTS_A_REQUEST]
                for name, value in point.values.items()
            ]
            self._client.log_batch(self._run, metrics=metrics)

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        for name, value in outcome.items():
            self._client.set_tag(self._run, f"hivetune.{name}", value[:_MAX_TAG_CHARS])
        if status == "running":
            return
        ended = max(self.held().values(), default=None)  # with the time of this report, a run would last until now
        self._client.set_terminated(self._run, _ENDED.get(status, "KILLED"), end_time=ended)

    def _find_or_make(self, subject: Subject, artifacts: str | None) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        earlier = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name, artifacts) if earlier is None else earlier.experiment_id
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{subject.id}'", max_results=1)
        if runs:
            run = runs[0]
            self._client.update_run(run.info.run_id, "RUNNING")
        else:
            tags = {RUN_TAG: subject.id}
            run = self._client.create_run(experiment, subject.created_ms, tags, run_name=subject.name)
        # Measured choices come later than settings, and none changes: what MLflow lacks is sent.
        parameters = [
            Param(name, str(value)[:_MAX_PARAMETER_CHARS])
            for name, value in subject.settings.items()
            if name not in run.data.params
        ]
        for begin in range(0, len(parameters), _PARAMETERS_A_REQUEST):
            self._client.log_batch(run.info.run_id, params=parameters[begin : begin + _PARAMETERS_A_REQUEST])
        return str(run.info.run_id)


_POINTS = "hivetune.json"


class WandB:
    """One W&B run for each run. Its file only grows, in the order of the steps, and a process of W&B's own writes
    it. So the run is written into a temporary folder and renamed when it is whole. A kill leaves the earlier one,
    or none."""

    def __init__(self, subject: Subject, folder: str):
        self._subject, self._folder = subject, Path(folder) / "wandb"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._before = sorted(self._folder.glob(f"offline-run-*-{subject.id}"))
        written = self._before[-1] / _POINTS if self._before else None
        document = read_json(written) if written is not None and written.exists() else {"status": None, "points": []}
        self._points = [RunPoint(*fields) for fields in document["points"]]
        written_before = (document["status"], len(self._points), document.get("outcome"))
        self._written = written_before if len(self._before) == 1 else None
        self._changed = False

    def held(self) -> HeldPoints:
        return {point.key: point.time_ms for point in self._points}

    def take_back(self, step: int, held: HeldPoints) -> HeldPoints:
        self._points = [point for point in self._points if point.step < step]
        self._changed = True
        return self.held()

    def add(self, points: Sequence[RunPoint]) -> None:
        self._points += points

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        """Replace an earlier report, unless it is equal."""
        if not self._changed and self._written == (status, len(self._points), dict(outcome)):
            return
        for rest in self._folder.glob(f".{self._subject.id}-*"):  # of an exporter that was killed
            shutil.rmtree(rest)
        with tempfile.TemporaryDirectory(prefix=f".{self._subject.id}-", dir=self._folder) as staging:
            self._write(Path(staging), outcome, failed=status == "failed")
            [new_run] = Path(staging).glob("wandb/offline-run-*")
            points = [[point.kind, point.step, point.time_ms, dict(point.values)] for point in self._points]
            write_json(new_run / _POINTS, {"schema": 1, "status": status, "points": points, "outcome": dict(outcome)})
            for earlier in self._before:
                shutil.rmtree(earlier)
            os.rename(new_run, self._folder / new_run.name)

    def _write(self, staging: Path, outcome: Mapping[str, str], *, failed: bool) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        run = wandb.init(
            project=PROJECT,
            id=self._subject.id,
            name=self._subject.name,
            config=self._subject.settings,
            dir=str(staging),
            mode="offline",
            settings=quiet,
        )
        rows: dict[int, dict[str, float]] = {}  # a validation belongs to the row of its step
        for point in self._points:
            row = rows.setdefault(point.step, {"_timestamp": 0.0})
            row |= {**point.values, "_timestamp": max(row["_timestamp"], point.time_ms / 1000)}
        for step, row in sorted(rows.items()):
            run.log(row, step=step)
        run.summary.update(dict(outcome))
        run.finish(exit_code=1 if failed else 0)


class Trackio:
    """One trackio run for each run. Each row has its own id, so a row that is sent twice is stored once."""

    def __init__(self, subject: Subject, folder: str):
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        # Read when trackio is imported.
        os.environ |= {"TRACKIO_DIR": folder, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        from trackio import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._subject = subject

    def held(self) -> HeldPoints:
        rows = self._storage.get_logs(PROJECT, self._subject.name, run_id=self._subject.id)
        return {(_kind_of(row), row["step"]): _time_ms(row["timestamp"]) for row in rows}

    def take_back(self, step: int, held: HeldPoints) -> HeldPoints:
        """Remove the run, because trackio removes no rows: all of it is sent again."""
        self._storage.delete_run(PROJECT, self._subject.name, run_id=self._subject.id)
        return {}

    def add(self, points: Sequence[RunPoint]) -> None:
        self._send(points, self._subject.settings)

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        """Store the outcome as settings. trackio takes them only with points, so the last one is sent again, and stored
        once."""
        rows = self._storage.get_logs(PROJECT, self._subject.name, run_id=self._subject.id)
        if rows:
            row = rows[-1]
            values = {name: value for name, value in row.items() if "/" in name}
            last = RunPoint(_kind_of(row), row["step"], _time_ms(row["timestamp"]), values)
            self._send([last], {**self._subject.settings, "status": status, **outcome})

    def _send(self, points: Sequence[RunPoint], settings: Mapping[str, Any]) -> None:
        identity = self._subject.id
        self._storage.bulk_log(
            PROJECT,
            self._subject.name,
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time_ms / 1000, UTC).isoformat() for point in points],
            config={key: value for key, value in settings.items() if value != {}},
            log_ids=[f"{identity}-{point.kind}-{point.step}-{point.time_ms}" for point in points],
            run_id=identity,
        )


def _kind_of(row: dict[str, Any]) -> Any:
    return point_kind(next(name for name in row if "/" in name))


def _time_ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)

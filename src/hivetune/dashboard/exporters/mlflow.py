"""Points in MLflow: a tracking server, or a SQLite file that `mlflow ui` shows. MLflow's own client does the work."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.paths import real_path
from hivetune.dashboard.exporters.points import PROJECT, HeldPoints, RunPoint, Subject, main_value

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
        self._client.set_terminated(self._run, _ENDED.get(status, "KILLED"), end_time=round(time.time() * 1000))

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

"""Which tools there are, what each needs, and where its points lie when nobody says where."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import home
from hivetune.base.packages import install_command
from hivetune.base.paths import quoted, real_path
from hivetune.config import ReportTarget
from hivetune.dashboard.exporters.sink import Sink, Subject
from hivetune.errors import MachineNotFit, UsageError

# The package that has to be there; TensorBoard's file is written here.
_NEEDS: dict[ReportTarget, str | None] = {
    "tensorboard": None,
    "mlflow": "mlflow",
    "trackio": "trackio",
    "wandb": "wandb",
}


@dataclass(frozen=True)
class Destination:
    """`place`: a folder; for MLflow also a URI."""

    target: ReportTarget
    place: str


def destination_of(target: ReportTarget, place: str | None) -> Destination:
    """`place`, else what the tool's own variable says, else below the home. Raises MachineNotFit when the package
    of the tool is missing, UsageError for a file where a folder belongs."""
    if problem := what_is_missing(target):
        raise MachineNotFit(problem, hint=install_command(target))
    if target == "mlflow":
        return Destination(target, place or os.environ.get("MLFLOW_TRACKING_URI") or str(home() / "mlflow"))
    variable = {"trackio": "TRACKIO_DIR", "wandb": "WANDB_DIR"}.get(target, "")
    folder = real_path(place or os.environ.get(variable) or home() / target)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint=f"give a folder for {target}")
    return Destination(target, str(folder))


def what_is_missing(target: ReportTarget) -> str:
    """Empty when nothing is. Imports no package: some take seconds."""
    package = _NEEDS[target]
    found = package is None or importlib.util.find_spec(package) is not None
    return "" if found else f"nothing can be reported to {target}: its package is not installed"


def open_sink(subject: Subject, destination: Destination) -> Sink:
    """Raises what the tool's library raises when its server or its file can't be reached."""
    folder = Path(destination.place)
    if destination.target == "tensorboard":
        from hivetune.dashboard.exporters.tensorboard import TensorBoard

        return TensorBoard(subject, folder)
    if destination.target == "mlflow":
        from hivetune.dashboard.exporters.mlflow import MLflow

        return MLflow(subject, destination.place)
    if destination.target == "trackio":
        from hivetune.dashboard.exporters.trackio import Trackio

        return Trackio(subject, folder)
    from hivetune.dashboard.exporters.wandb import WandB

    return WandB(subject, folder)


def how_to_look(destination: Destination) -> str:
    """The command that shows what was written."""
    place = quoted(destination.place)
    if destination.target == "tensorboard":
        return f"tensorboard --logdir {place}"
    if destination.target == "mlflow":
        from hivetune.dashboard.exporters.mlflow import tracking_uri

        uri = tracking_uri(destination.place)
        return f"open {uri}" if uri.startswith("http") else f"mlflow ui --backend-store-uri {quoted(uri)}"
    if destination.target == "trackio":
        return f"TRACKIO_DIR={place} trackio show --project hivetune"
    return f"wandb sync {place}/wandb/offline-run-*"

"""The report of a run to one tool: what the journal has and the tool lacks is sent, once or as long as the run
continues."""

import contextlib
import importlib.util
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hivetune.base.disk import FULL_DISK_ERROR, home, lock, lock_holder, sha256_bytes, write_json
from hivetune.base.paths import install_command, quoted, real_path
from hivetune.base.sealed import read_sealed
from hivetune.base.typed import from_plain
from hivetune.config import ReportTarget
from hivetune.dashboard.exporters.points import (
    HeldPoints,
    JournalReader,
    Sink,
    Subject,
    first_difference,
    missing,
    outcome_of,
    subject_of,
)
from hivetune.dashboard.exporters.tensorboard import TensorBoard
from hivetune.dashboard.exporters.tools import MLflow, Trackio, WandB, tracking_uri
from hivetune.errors import DoesNotFit, HivetuneError, MachineNotFit, UsageError
from hivetune.run.folder import METRICS
from hivetune.run.status import State, run_status

_LOOK_S = 1.0
# Pauses between retries while a server does not answer, and how long retries go on after the run's end.
_FIRST_PAUSE_S, MAX_PAUSE_S, TRIES_AFTER_END_S = 2.0, 60.0, 600.0
_WRITE_EVERY_S = 10.0
_STATE = "state.json"
_MAX_AT_ONCE = 2000  # points


# How each tool is opened for a run. Its library is imported then: some take seconds.
_SINKS: dict[ReportTarget, Callable[[Subject, str], Sink]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "trackio": Trackio,
    "wandb": WandB,
}


@dataclass(frozen=True)
class Destination:
    """A tool and its place: a folder, for MLflow also a URI."""

    target: ReportTarget
    place: str


def destination_of(target: ReportTarget, destination: str | None) -> Destination:
    """Return where a tool's points go: `destination`, else the tool's own environment variable, else below the home.

    Raises MachineNotFit when the package of the tool is missing, UsageError for a file where a folder belongs.
    """
    if problem := exporter_problem(target):
        raise MachineNotFit(problem, hint=install_command(target))
    if target == "mlflow":
        return Destination(target, destination or os.environ.get("MLFLOW_TRACKING_URI") or str(home() / "mlflow"))
    variable = {"trackio": "TRACKIO_DIR", "wandb": "WANDB_DIR"}.get(target, "")
    folder = real_path(destination or os.environ.get(variable) or home() / target)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint=f"give a folder for {target}")
    return Destination(target, str(folder))


def exporter_problem(target: ReportTarget) -> str:
    """Return what is missing, or "". TensorBoard's file is written here; another tool needs the package of its name."""
    is_installed = target == "tensorboard" or importlib.util.find_spec(target) is not None
    return "" if is_installed else f"nothing can be reported to {target}: its package is not installed"


def view_command(destination: Destination) -> str:
    """Return the command that shows the written figures."""
    path, uri = quoted(destination.place), tracking_uri(destination.place)
    commands: dict[ReportTarget, str] = {
        "tensorboard": f"tensorboard --logdir {path}",
        "mlflow": f"open {uri}" if uri.startswith("http") else f"mlflow ui --backend-store-uri {quoted(uri)}",
        "trackio": f"TRACKIO_DIR={path} trackio show --project hivetune",
        "wandb": f"wandb sync {path}/wandb/offline-run-*",
    }
    return commands[destination.target]


@dataclass(frozen=True)
class ReportState:
    """The state of a report. `points`: held by the tool now; this process sent `sent` of them. `problem`: the last one,
    or ""."""

    run: str
    target: str
    place: str
    points: int
    sent: int
    problem: str
    time: float


class Exporter:
    """One tool, kept up to date with one journal. `send` may raise what the tool's library raises. The next `send`
    continues where the tool stands then."""

    def __init__(self, subject: Subject, destination: Destination):
        self._subject, self._destination = subject, destination
        self._reader = JournalReader(subject.run / METRICS)
        self._sink: Sink | None = None
        self._held: HeldPoints = {}
        self.sent = 0

    def send(self) -> int:
        """Send what the tool lacks and return how many points. Ask a tool first at the first contact, or after an
        error."""
        new, replaced = self._reader.read()
        if self._sink is None:
            sink = _SINKS[self._destination.target](self._subject, self._destination.place)
            self._held, self._sink, replaced = sink.held(), sink, True
        if replaced or any(point.key in self._held for point in new):
            step = first_difference(self._held, self._reader.points)
            if step is not None:
                self._held = self._sink.take_back(step, self._held)
            new = list(self._reader.points.values())
        points = missing(self._held, new)
        for begin in range(0, len(points), _MAX_AT_ONCE):
            part = points[begin : begin + _MAX_AT_ONCE]
            self._sink.add(part)
            self._held |= {point.key: point.time_ms for point in part}
            self.sent += len(part)
        return len(points)

    def finish(self, state: State) -> None:
        if self._sink is not None:
            self._sink.finish(state, outcome_of(self._subject.run))

    def lose(self) -> None:
        """Forget the tool's content: after an error it must be asked again."""
        self._sink = None

    def write(self, problem: str = "") -> ReportState:
        """Write the state that `hivetune show` reads."""
        run, target, place = self._subject.run, self._destination.target, self._destination.place
        now = round(time.time(), 3)
        report = ReportState(str(run), target, place, len(self._held), self.sent, problem, now)
        write_json(_folder(run, self._destination) / _STATE, {"schema": 1, **asdict(report)})
        return report

    def write_problem(self, error: Exception) -> None:
        with contextlib.suppress(OSError):  # the home may be what is full: the problem is said by who calls this
            self.write(_error_text(error))


def report_once(run: Path, destination: Destination) -> ReportState:
    """Send all of a run's points now. Raises Busy while another process sends the same report, MachineNotFit when the
    tool can't be reached, DoesNotFit when its disk is full."""
    with lock(_folder(run, destination), hint="it continues by itself while the run does"):
        exporter = Exporter(subject_of(run), destination)
        try:
            exporter.send()
            exporter.finish(run_status(run).state)
        except Exception as error:  # noqa: BLE001 (each tool's library has errors of its own)
            exporter.write_problem(error)
            raise _unreachable(destination, error) from None
        return exporter.write()


def report_on(
    run: Path,
    destination: Destination,
    say: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> ReportState:
    """Send points as they come until the run ends. A tool that can't be reached is retried: for ever while the run goes
    on, then for TRIES_AFTER_END_S. Raises as `report_once`."""
    with lock(_folder(run, destination), hint="it continues by itself while the run does"):
        exporter = Exporter(subject_of(run), destination)
        pause_s, ended, problem, written = _FIRST_PAUSE_S, math.inf, "", -math.inf
        while True:
            running = lock_holder(run) is not None  # before the look: what comes until its end is read below
            ended = math.inf if running else min(ended, clock())
            try:
                exporter.send()
                if not running:
                    exporter.finish(run_status(run).state)
                    return exporter.write()
                if problem or clock() - written >= _WRITE_EVERY_S:
                    exporter.write()
                    written = clock()
            except Exception as error:  # noqa: BLE001 (each tool's library has errors of its own)
                exporter.lose()
                if _error_text(error) != problem:
                    problem = _error_text(error)
                    say(f"{destination.target} at {destination.place}: {problem}: trying again")
                    exporter.write_problem(error)
                if clock() - ended > TRIES_AFTER_END_S:
                    raise _unreachable(destination, error) from None
                sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            pause_s, problem = _FIRST_PAUSE_S, ""
            sleep(_LOOK_S)


def reports_of(run: Path) -> list[ReportState]:
    """Return the reports of a run so far, by any process."""
    states = []
    for path in sorted((home() / "reports").glob("*/state.json")):
        try:
            fields = {name: value for name, value in read_sealed(path).items() if name != "schema"}
            state = from_plain(ReportState, fields)
        except (UsageError, ValueError):  # damaged: the next report writes it again
            continue
        if state.run == str(run):
            states.append(state)
    return states


def _folder(run: Path, destination: Destination) -> Path:
    key = sha256_bytes("\n".join((str(run), destination.target, destination.place)).encode())[:8]
    return home() / "reports" / f"{run.name}-{destination.target}-{key}"


def _unreachable(destination: Destination, error: Exception) -> HivetuneError:
    if isinstance(error, HivetuneError):
        return error
    kind = DoesNotFit if FULL_DISK_ERROR.search(str(error)) else MachineNotFit
    return kind(
        f"{destination.target} at {destination.place}: {_error_text(error)}",
        hint="what it has is kept; the same command sends the rest",
    )


def _error_text(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

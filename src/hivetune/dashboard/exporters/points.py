"""The points of a run: what its journal has now, how that differs from what a tool holds, and what a tool must be able
to do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hivetune.base.disk import sha256_bytes
from hivetune.base.journal import JournalPlace, read_after
from hivetune.base.sealed import read_sealed
from hivetune.run.folder import ADAPTER, EXPORTS, VERDICT, read_record, read_resolved

PointKind = Literal["step", "validation"]
PointKey = tuple[PointKind, int]
# Kind and number of each step that a tool holds, and when it was made (milliseconds since 1970).
HeldPoints = dict[PointKey, int]

# Field of the journal's line -> name in every tool. Their pages make a section of the part before the slash.
_NAMES: dict[PointKind, dict[str, str]] = {
    "step": {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate"},
    "validation": {"loss": "validation/loss"},
}
SPEED = "train/tokens_per_second"


@dataclass(frozen=True)
class RunPoint:
    """A line of metrics.jsonl: its finite values by their names in the tools. `step` counts finished steps."""

    kind: PointKind
    step: int
    time_ms: int
    values: Mapping[str, float]

    @property
    def key(self) -> PointKey:
        return self.kind, self.step


def point_kind(name: str) -> PointKind:
    """Return the kind of the point that a value of this name belongs to."""
    return "validation" if name in _NAMES["validation"].values() else "step"


def main_value(kind: PointKind) -> str:
    """Return the name of the value that every point of this kind has."""
    return _NAMES[kind]["loss"]


def point_of(entry: Mapping[str, Any]) -> RunPoint | None:
    """Return the point of a line. None for another event, and for a step without a loss (it had lost all its rows)."""
    kind = entry["event"]
    if kind not in _NAMES or entry.get("loss") is None:
        return None
    values = {name: float(entry[field]) for field, name in _NAMES[kind].items() if entry.get(field) is not None}
    if kind == "step" and entry.get("tokens") and entry.get("seconds"):
        values[SPEED] = entry["tokens"] / entry["seconds"]
    return RunPoint(kind, entry["step"], round(entry["time"] * 1000), values)


class JournalReader:
    """A reader of metrics.jsonl that continues where it stopped, and begins again when the worker has rewritten the
    file because steps are made again after a crash. `points`: the newest of each step."""

    def __init__(self, path: Path):
        self._path, self._place = path, JournalPlace()
        self.points: dict[PointKey, RunPoint] = {}

    def read(self) -> tuple[list[RunPoint], bool]:
        """Return the points since the last read, and whether older ones may be gone."""
        new: list[RunPoint] = []
        replaced = False
        while True:
            followed = read_after(self._path, self._place)
            self._place = followed.place
            if followed.anew:
                self.points, new, replaced = {}, [], True
            if not followed.entries:
                return new, replaced
            points = [point for entry in followed.entries if (point := point_of(entry))]
            self.points |= {point.key: point for point in points}
            new += points


def first_difference(held: Mapping[PointKey, int], points: Mapping[PointKey, RunPoint]) -> int | None:
    """Return the first step that a tool holds and the journal lacks, or has from another time; None if there is no such
    step."""
    differing = [key[1] for key, time_ms in held.items() if key not in points or points[key].time_ms != time_ms]
    return min(differing, default=None)


def missing(held: Mapping[PointKey, int], points: Iterable[RunPoint]) -> list[RunPoint]:
    """Return the points that a tool lacks, by step; a training step comes before the validation after it."""
    return sorted((point for point in points if point.key not in held), key=lambda point: (point.step, point.kind))


PROJECT = "hivetune"  # what MLflow calls an experiment


@dataclass(frozen=True)
class Subject:
    """The run of a report. `id` distinguishes it from another run of the same name. `settings`: dotted names and
    values.
    """

    run: Path
    id: str
    created_ms: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the run in every tool: its folder and part of its id, since each cycle's run is called
        `run`."""
        return f"{self.run.name}-{self.id[:8]}"


class Sink(Protocol):
    """A tool, opened for one run. Only one process at a time has it open (follow.py holds the lock)."""

    def held(self) -> HeldPoints:
        """Return the tool's points of this run, also from an exporter that was killed."""

    def take_back(self, step: int, held: HeldPoints) -> HeldPoints:
        """Remove steps from `step` on, because they were repeated, and return the rest. A tool that can't remove points
        returns `held`."""

    def add(self, points: Sequence[RunPoint]) -> None:
        """Return when the tool has the points. Raises the errors of the tool's library."""

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        """End the run in the tool. `status`: done, stopped, failed, interrupted, or still running. `outcome` as
        `outcome_of`."""


def subject_of(run: Path) -> Subject:
    """Return the run of a report. Raises UsageError when `run` is not a run folder, or its record or settings are
    damaged."""
    record = read_record(run)
    config, choices = read_resolved(run)
    created_ms = round(record["created"] * 1000)
    identity = sha256_bytes(f"{run.resolve()} {created_ms}".encode())[:16]
    settings = flat_settings(config.model_dump(mode="json", exclude_none=True))
    settings |= flat_settings({"chosen": choices.made()})
    return Subject(run, identity, created_ms, settings)


def outcome_of(run: Path) -> dict[str, str]:
    """Return verdict, measures and files of a run in words. Later ones come with the next report. Raises UsageError for
    a damaged verdict."""
    outcome: dict[str, str] = {}
    if (run / VERDICT).exists():
        verdict = read_sealed(run / VERDICT)
        outcome["verdict"] = str(verdict["verdict"])
        for metric in verdict["metrics"]:
            if metric["difference"] is not None:
                outcome[f"verdict.{metric['name']}"] = f"{metric['difference']:+.4g}"
    paths = [run / ADAPTER, *sorted((run / EXPORTS).glob("*"))]
    if files := [str(path.relative_to(run)) for path in paths if path.exists()]:
        outcome["artefacts"] = ", ".join(files)
    return outcome


def flat_settings(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names; lists and empty sections stay as they are."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            flat_settings(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{name}": value}
        )
    return flat

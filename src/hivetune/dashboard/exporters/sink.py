"""What a tool has to do to get points, and what it is told about their run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hivetune.base.disk import sha256_bytes
from hivetune.base.sealed import read_sealed
from hivetune.dashboard.exporters.points import Held, RunPoint
from hivetune.run.choices import read_resolved
from hivetune.run.folder import ADAPTER, EXPORTS, VERDICT
from hivetune.run.record import read_record

PROJECT = "hivetune"  # what MLflow calls an experiment


@dataclass(frozen=True)
class Subject:
    """The run of a report. `id` tells it from another run of the same name; `settings`: dotted names and values."""

    run: Path
    id: str
    created_ms: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the run in every tool: its folder, and what tells it from others of that name (each cycle has a `run`)."""
        return f"{self.run.name}-{self.id[:8]}"


class Sink(Protocol):
    """A tool, opened for one run. Only one process at a time has it open (follow.py holds the lock)."""

    def held(self) -> Held:
        """What the tool has of this run, also of an exporter that was killed."""

    def take_back(self, step: int, held: Held) -> Held:
        """Steps from `step` on were made again: what it holds now. A tool that can't remove points returns `held`."""

    def add(self, points: Sequence[RunPoint]) -> None:
        """Returns when the tool has them. Raises what the tool's library raises."""

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        """All points were added. `status` is the run's: done, stopped, failed, interrupted, or running still;
        `outcome` as `outcome_of`."""


def subject_of(run: Path) -> Subject:
    """Raises UsageError when `run` is not a run folder, or its record or settings are damaged."""
    record = read_record(run)
    config, choices = read_resolved(run)
    created_ms = round(record["created"] * 1000)
    identity = sha256_bytes(f"{run.resolve()} {created_ms}".encode())[:16]
    settings = _flat(config.model_dump(mode="json", exclude_none=True)) | _flat({"chosen": choices.made()})
    return Subject(run, identity, created_ms, settings)


def outcome_of(run: Path) -> dict[str, str]:
    """The verdict with its measures, and the files that the run left, in words; what comes later is told by the next
    report. Raises UsageError for a damaged verdict."""
    found: dict[str, str] = {}
    if (run / VERDICT).exists():
        verdict = read_sealed(run / VERDICT)
        found["verdict"] = str(verdict["verdict"])
        for metric in verdict["metrics"]:
            if metric["difference"] is not None:
                found[f"verdict.{metric['name']}"] = f"{metric['difference']:+.4g}"
    files = [run / ADAPTER, *sorted((run / EXPORTS).glob("*"))]
    if left := [str(path.relative_to(run)) for path in files if path.exists()]:
        found["artefacts"] = ", ".join(left)
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names; lists and empty sections as they are."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found

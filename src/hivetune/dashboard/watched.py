"""The runs that the dashboard watches: each journal is read once, and after that only the lines appended to it.

Everything here is used by one thread; it holds no lock and writes no file.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hivetune.base.disk import home, sha256_bytes
from hivetune.base.journal import JournalPlace, Replaced, read_journal
from hivetune.errors import UsageError
from hivetune.run.folder import EVENTS, METRICS
from hivetune.run.status import RunStatus, RunTally, event_text, run_folders, run_status

MAX_BUCKETS = 320  # two pixels of a plot for each
SMOOTHED_BUCKETS = 10  # of the exponential mean: evens out rows of different lengths, follows a turn of the loss
MAX_EVENTS = 200  # a run in trouble writes some for each restart
CURVES = ("loss", "validation", "grad_norm", "lr", "tokens_per_second", "memory")


class Bucket(NamedTuple):
    """Neighbouring points of a series, combined. `step`: the step of the last one."""

    step: int
    mean: float
    low: float
    high: float


@dataclass
class Series:
    """A series of points (step, value, time) in order of steps."""

    # 24 bytes each: six series of 100,000 steps are 14 MB, and are joined for a plot in 45 ms.

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    times: "array[float]" = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, value: float, time: float) -> None:
        """Add a point. `step` is above that of every earlier point."""
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)

    def step_at(self, time: float) -> int:
        """Return the newest step at that time; 0 before the first."""
        number = bisect_right(self.times, time)
        return self.steps[number - 1] if number else 0

    def buckets(self) -> list[Bucket]:
        """Return the points, with neighbouring ones combined if there are too many to draw."""
        # Minimum and maximum keep a spike of one step in 100,000.
        width = -(-len(self) // MAX_BUCKETS) or 1
        parts = ((start, self.values[start : start + width]) for start in range(0, len(self), width))
        return [
            Bucket(self.steps[start + len(part) - 1], sum(part) / len(part), min(part), max(part))
            for start, part in parts
        ]


def smoothed(buckets: list[Bucket]) -> list[tuple[float, float]]:
    """Return (step, exponential mean) of each bucket."""
    mean, points = 0.0, []
    for number, bucket in enumerate(buckets, 1):
        # The first ones weigh as much as in a plain mean.
        mean += (bucket.mean - mean) / min(number, SMOOTHED_BUCKETS)
        points.append((float(bucket.step), mean))
    return points


@dataclass
class RunReading:
    """The content of a run's journals up to the last reading. `num_events`: number of events that have a text;
    `events`: the newest of them. `sample`: the newest sample of machine and cards. `stopping`: a stop was requested; a
    second request would end the run without a checkpoint.
    """

    tally: RunTally = field(default_factory=RunTally)
    curves: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in CURVES})
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    num_events: int = 0
    quarantined: list[str] = field(default_factory=list)
    sample: Mapping[str, Any] = field(default_factory=dict)
    last_time: float = 0.0
    stopping: bool = False

    def add_metric(self, entry: Mapping[str, Any]) -> None:
        self.tally.add(entry)
        if entry["event"] == "validation":
            self._add("validation", entry, entry["loss"])
        if entry["event"] != "step":
            return
        self.last_time = entry["time"]
        speed = entry["tokens"] / entry["seconds"] if entry.get("tokens") and entry.get("seconds") else None
        for name in ("loss", "grad_norm", "lr"):
            self._add(name, entry, entry.get(name))
        self._add("tokens_per_second", entry, speed)

    def _add(self, name: str, entry: Mapping[str, Any], value: float | None) -> None:
        if value is not None:
            self.curves[name].add(entry["step"], value, entry["time"])

    def add_event(self, entry: Mapping[str, Any]) -> None:
        self.tally.add(entry)
        if text := event_text(entry):
            self.events.append((entry["time"], text))
            self.num_events += 1
        match entry["event"]:
            case "stop_requested" | "supervisor_started" | "supervisor_ended":
                self.stopping = entry["event"] == "stop_requested"
            case "quarantined":
                self.quarantined.append(f"{entry['source']}: {entry['reason']}")
            case "sample":
                self.sample = entry
                # Of cards where there are any: there the model is, and the process's own memory says little.
                used = [card["used_bytes"] for card in entry.get("cards", ()) if "used_bytes" in card]
                step = self.curves["loss"].step_at(entry["time"])
                self._add("memory", {**entry, "step": step}, max(used, default=entry.get("resident_bytes")))


class WatchedRun:
    """One run folder. `read`: the content of its journals up to the last reading."""

    def __init__(self, path: Path):
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.read, self._metrics, self._events = RunReading(), JournalPlace(), JournalPlace()

    def refresh(self) -> RunTally:
        """Read the lines appended since the last reading, and return the sums. Raises OSError."""
        try:
            for entry in read_journal(self.path / METRICS, self._metrics):
                self.read.add_metric(entry)
            for entry in read_journal(self.path / EVENTS, self._events):
                self.read.add_event(entry)
        except Replaced:  # as by a run that makes steps again: from the start, so that no step is missing or doubled
            self._begin()
            return self.refresh()
        return self.read.tally

    def status(self) -> RunStatus:
        """Return the current status of the run. Raises UsageError if its folder is gone."""
        # Read from its files each time: a page of 50 runs takes 30 ms.
        return run_status(self.path, self.refresh)


class Watcher:
    """The watched runs of this home, by a short id of their folder."""

    def __init__(self) -> None:
        self._runs: dict[str, WatchedRun] = {}

    def runs(self) -> list[tuple[str, WatchedRun, RunStatus]]:
        """Return (id, watched run, status) of every run that is still on disk, newest first."""
        found = []
        for path in run_folders():
            run = self._runs.setdefault(run_id(path), WatchedRun(path))
            try:
                found.append((run_id(path), run, run.status()))
            except UsageError:  # deleted by a person
                del self._runs[run_id(path)]
        return sorted(found, key=lambda entry: entry[2].created, reverse=True)

    def run(self, identity: str) -> WatchedRun | None:
        """Return the run with this id, read up to now, or None if the id is unknown. Raises OSError."""
        path = next((path for path in run_folders() if run_id(path) == identity), None)
        if path is None:
            return None
        run = self._runs.setdefault(identity, WatchedRun(path))
        run.refresh()
        return run


def run_id(path: Path) -> str:
    """Return a short id of a run folder for addresses of pages; equal folders have equal ids."""
    return sha256_bytes(str(path).encode("utf-8", "surrogateescape"))[:12]


def short_path(path: Path) -> str:
    """Return the path, relative to the home if it is inside."""
    return str(path.relative_to(home())) if path.is_relative_to(home()) else str(path)

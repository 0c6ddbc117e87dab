"""The runs that the dashboard watches: each journal is read once, and after that only what was appended to it.

One thread uses these. Nothing here holds a lock or writes a file. A curve stays small however long its run is: when it
has too many points, neighbours are joined.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, lock_holder, sha256_bytes
from hivetune.base.journal import JournalPlace, Replaced, read_journal
from hivetune.errors import UsageError
from hivetune.run.folder import AMENDMENTS, EVENTS, METRICS, PLAN, RECORD
from hivetune.run.status import RunStatus, RunTally, damaged_status, event_text, run_folders, run_status

MAX_BUCKETS = 320  # two pixels of a chart for each
# The smoothed line is an exponential mean over so many steps, or over this share of all so far if that is more.
SMOOTHED_STEPS, SMOOTHED_SHARE = 10, 0.02
MAX_EVENTS = 200
_FILES = (METRICS, EVENTS, AMENDMENTS, RECORD, PLAN)
CURVES = ("loss", "validation", "grad_norm", "lr", "tokens_per_second", "memory")


@dataclass
class Bucket:
    """Neighbouring points. `step` and `time` are those of the last one. `smoothed`: the exponential mean there."""

    step: int
    time: float
    total: float
    low: float
    high: float
    smoothed: float
    count: int = 1

    @property
    def mean(self) -> float:
        return self.total / self.count

    def join(self, later: "Bucket") -> None:
        """Add the points of the next bucket."""
        self.step, self.time, self.smoothed = later.step, later.time, later.smoothed
        self.total += later.total
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.count += later.count


@dataclass
class Series:
    """Points in the order of their steps. `count`: how many there are. `last`: the newest value.

    A bucket keeps mean, minimum and maximum, so that a spike of one step in 100,000 is still drawn. Adding a point
    costs the same for the first as for the millionth.
    """

    buckets: list[Bucket] = field(default_factory=list)
    count: int = 0
    last: float | None = None
    _width: int = 1
    _smoothed: float = 0.0

    def add(self, step: int, value: float, time: float = 0.0) -> None:
        """Add a point. `step` is above that of every point before."""
        self.count += 1
        self.last = value
        share = 1 / min(self.count, max(SMOOTHED_STEPS, self.count * SMOOTHED_SHARE))
        self._smoothed += share * (value - self._smoothed)
        point = Bucket(step, time, value, value, value, self._smoothed)
        if self.buckets and self.buckets[-1].count < self._width:
            self.buckets[-1].join(point)
            return
        self.buckets.append(point)
        if len(self.buckets) > MAX_BUCKETS:  # join each two neighbours; an odd last one is filled further
            joined = self.buckets[::2]
            for bucket, later in zip(joined, self.buckets[1::2], strict=False):
                bucket.join(later)
            self.buckets, self._width = joined, self._width * 2

    def step_at(self, time: float) -> int:
        """Return the newest step at that time, 0 before the first."""
        number = bisect_right(self.buckets, time, key=lambda bucket: bucket.time)
        return self.buckets[number - 1].step if number else 0


@dataclass
class RunReading:
    """The content of a run's journals that was read so far. `num_events`: how many had a text; `events` holds the
    newest. `stopping`: it was asked to stop; asked again it would end without a checkpoint."""

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
        if entry["event"] == "validation" and entry["loss"] is not None:
            self.curves["validation"].add(entry["step"], entry["loss"], entry["time"])
        if entry["event"] != "step":
            return
        self.last_time = entry["time"]
        speed = entry["tokens"] / entry["seconds"] if entry.get("tokens") and entry.get("seconds") else None
        measured = {name: entry.get(name) for name in ("loss", "grad_norm", "lr")} | {"tokens_per_second": speed}
        for name, value in measured.items():
            if value is not None:
                self.curves[name].add(entry["step"], value, entry["time"])

    def add_event(self, entry: Mapping[str, Any]) -> None:
        self.tally.add(entry)
        if entry["event"] in ("stop_requested", "supervisor_started", "supervisor_ended"):
            self.stopping = entry["event"] == "stop_requested"
        if text := event_text(entry):
            self.events.append((entry["time"], text))
            self.num_events += 1
        if entry["event"] == "quarantined":
            self.quarantined.append(f"{entry['source']}: {entry['reason']}")
        if entry["event"] == "sample":
            self.sample = entry
            used = [card["used_bytes"] for card in entry.get("cards", ()) if "used_bytes" in card]
            if used or "resident_bytes" in entry:
                step = self.curves["loss"].step_at(entry["time"])
                self.curves["memory"].add(step, max(used or [entry["resident_bytes"]]), entry["time"])


class WatchedRun:
    """One run folder. `read`: the content of its journals up to now."""

    def __init__(self, path: Path):
        self.path = path
        self.read = RunReading()
        self._metrics, self._events = JournalPlace(), JournalPlace()
        self._stamp: tuple[object, ...] = ()
        self._status: RunStatus | None = None

    def refresh(self) -> None:
        """Read what was appended. Raises OSError."""
        try:
            for entry in read_journal(self.path / METRICS, self._metrics):
                self.read.add_metric(entry)
            for entry in read_journal(self.path / EVENTS, self._events):
                self.read.add_event(entry)
        except Replaced:  # as by a run that makes steps again: from the start, so that no step is missing or doubled
            self.read, self._metrics, self._events = RunReading(), JournalPlace(), JournalPlace()
            self.refresh()

    def status(self) -> RunStatus:
        """Return the status, computed again only when a file of it changed or its supervisor came or went. Raises
        UsageError when its folder is gone, OSError."""
        stamp = (lock_holder(self.path), *(_identity(self.path / name) for name in _FILES))
        if self._status is None or stamp != self._stamp:
            self._stamp, self._status = stamp, run_status(self.path, self._tally)
        return self._status

    def _tally(self) -> RunTally:
        self.refresh()
        return self.read.tally


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        status = path.lstat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


class Watcher:
    """All runs of this home that were looked at, by a short id of their folder."""

    def __init__(self) -> None:
        self._runs: dict[str, WatchedRun] = {}

    def runs(self) -> list[tuple[str, WatchedRun, RunStatus]]:
        """Return every run that is still on disk, newest first: id, reading, status."""
        readings = []
        for path in run_folders():
            identity = run_id(path)
            run = self._runs.setdefault(identity, WatchedRun(path))
            try:
                run.refresh()
                readings.append((identity, run, run.status()))
            except UsageError:  # deleted by a person
                self._runs.pop(identity)
            except OSError as error:
                readings.append((identity, run, damaged_status(path, f"{error.filename}: {error.strerror}")))
        return sorted(readings, key=lambda entry: entry[2].created, reverse=True)

    def run(self, identity: str) -> WatchedRun | None:
        """Return the run with this id, read up to now, or None for an unknown one. Raises OSError."""
        if identity not in self._runs:
            path = next((path for path in run_folders() if run_id(path) == identity), None)
            if path is None:
                return None
            self._runs[identity] = WatchedRun(path)
        self._runs[identity].refresh()
        return self._runs[identity]


def run_id(path: Path) -> str:
    """Return a short id that is the same for the same folder. Addresses of pages use it."""
    return sha256_bytes(str(path).encode("utf-8", "surrogateescape"))[:12]


def short_path(path: Path) -> str:
    """Return the path relative to the home, if the folder is inside it."""
    return str(path.relative_to(home())) if path.is_relative_to(home()) else str(path)

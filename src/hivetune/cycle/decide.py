"""What comes next: one pure function from what was observed, the settings and the time to one action. First match wins.

The states are artefacts: files, rows of the registry and kernel locks that are there or not. No status is kept, so a
loop that was killed anywhere decides the same again, and a decision in the journal can be replayed from its own line.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from hivetune.config import CycleConfig

# What an open cycle passes, in this order, each known by what it leaves. Lease taken, lease returned: kernel locks
# of the worker, there exactly as long as it lives (process/lease.py), so no station stands for them.
Station = Literal["snapshot", "train", "evaluate", "gate", "export", "register", "warm", "promote", "watch"]
STATIONS: tuple[Station, ...] = get_args(Station)
# Stations that compute for minutes or hours: only while `Observed.allowed` says so.
HEAVY: frozenset[Station] = frozenset(("snapshot", "train", "evaluate", "gate", "export", "register"))
ActionKind = Literal["wait", "restore", "roll_back", "rebuild", "open", "close", Station]
OpenedFor = Literal["rows", "rebuild", "request"]

LOOK_AGAIN_S = 60.0  # a wait for something that has no time of its own ends with the next look
MOST_FAILURES = 3  # of one station in a row; then the cycle is closed
FIRST_RETRY_S, LONGEST_RETRY_S = 60.0, 3600.0
FIRST_COOL_S, LONGEST_COOL_S = 3600.0, 7 * 86400.0


@dataclass(frozen=True)
class Allowed:
    """Whether long work may go on now (window.py). `until`: when it must have ended, None for no end. `again`: when it
    may next, if not now. `reason`: in words, also when it may."""

    now: bool = True
    until: float | None = None
    again: float | None = None
    reason: str = "no window is set"


@dataclass(frozen=True)
class Opened:
    """The open cycle as its artefacts show it.

    `done`: the stations whose artefact is there and whole. `passed`: what the gate said, None before it. `void`: why
    it must not go on (its rows were forgotten, its base model changed), in words. `withdrawn`: why its release was
    rolled back. `asked`: a person has to promote it (`promote: ask`). `failures`: of the next station, in a row;
    `fatal`: trying again would give the same; `patient`: it waits for a disk or for another process, and is never given
    up for that.
    `spent_hours`, `spent_kwh`: of training so far. `promoted_at`: since when its release is the champion.
    """

    id: str
    opened_for: OpenedFor = "rows"
    done: frozenset[Station] = frozenset()
    passed: bool | None = None
    void: str = ""
    withdrawn: str = ""
    asked: bool = False
    failures: int = 0
    failed_at: float = 0.0
    failure: str = ""
    fatal: bool = False
    patient: bool = False
    spent_hours: float = 0.0
    spent_kwh: float = 0.0
    promoted_at: float = 0.0


@dataclass(frozen=True)
class Observed:
    """All that a decision rests on. Times are seconds since 1970.

    `desired`: the release that should be served, None before the first; `served`: the one that can be; `problem`: why
    they differ. `watch_failed`: why the champion is worse than the one before it, which there is. `forgotten_rows`: of
    the champion's snapshot. `known`: a cycle of these rows, settings and champion was closed already, so that opening
    it again is nothing. `new_groups`: usable groups that no cycle has trained on. `failed_cycles`: in a row, the last
    at `failed_at`. `predicted_hours`, `predicted_kwh`: the upper end of the plan; None: not known.
    """

    paused: bool = False
    desired: str | None = None
    served: str | None = None
    problem: str = ""
    watch_failed: str = ""
    open: Opened | None = None
    forgotten_rows: int = 0
    known: bool = False
    asked: bool = False
    new_groups: int = 0
    failed_cycles: int = 0
    failed_at: float = 0.0
    allowed: Allowed = Allowed()
    predicted_hours: float | None = None
    predicted_kwh: float | None = None
    disk_free_bytes: int = 0
    disk_needed_bytes: int = 0


@dataclass(frozen=True)
class Action:
    """One thing to do, why, and not before when: the moment of the decision itself for all that is no wait."""

    kind: ActionKind
    reason: str
    not_before: float


def decide(observed: Observed, settings: CycleConfig, now: float) -> Action:
    """The next action. Every state has one; all but a wait make progress, and a wait ends at a time after `now`.

    A time that lies in the future of something past means that the clock was set back: it holds nothing up.
    """
    if observed.paused:
        return Action("wait", "paused", now + LOOK_AGAIN_S)
    if observed.served != observed.desired:
        return Action("restore", f"{observed.desired} can't be served: {observed.problem}", now)
    if observed.watch_failed:
        return Action("roll_back", f"{observed.desired} is worse: {observed.watch_failed}", now)
    if observed.open is not None:
        return _go_on(observed.open, observed.allowed, settings, now)
    return _begin(observed, settings, now)


def _go_on(cycle: Opened, allowed: Allowed, settings: CycleConfig, now: float) -> Action:
    """The next missing artefact of an open cycle, or its end."""
    end = _end_of(cycle, settings)
    if end:
        return Action("close", end, now)
    station = next(station for station in STATIONS if station not in cycle.done)
    if cycle.failures:
        retry_at = cycle.failed_at + _doubled(FIRST_RETRY_S, cycle.failures, LONGEST_RETRY_S)
        if cycle.failed_at <= now < retry_at:
            return Action("wait", f"{station} failed and is tried again: {cycle.failure}", retry_at)
    if station in HEAVY and not allowed.now:
        return Action("wait", f"{station}: {allowed.reason}", _later(allowed.again, now))
    watch_until = cycle.promoted_at + settings.watch.hours * 3600
    if station == "watch" and cycle.promoted_at <= now < watch_until:
        return Action("wait", "the new champion is watched", watch_until)
    return Action(station, f"the next missing artefact of cycle {cycle.id}", now)


def _end_of(cycle: Opened, settings: CycleConfig) -> str:
    """Why the cycle is to be closed now; empty while it goes on."""
    if cycle.withdrawn:
        return f"rolled back: {cycle.withdrawn}"
    if len(cycle.done) == len(STATIONS):
        return "promoted and watched"
    if "promote" in cycle.done:
        return ""
    if cycle.void:
        return f"given up: {cycle.void}"
    if cycle.fatal or (cycle.failures >= MOST_FAILURES and not cycle.patient):
        return f"failed {cycle.failures} times: {cycle.failure}"
    if "gate" in cycle.done and not cycle.passed:
        return "the gate refused it; the champion stays"
    if cycle.asked and "warm" in cycle.done:
        return "ready, and waits for a person to promote it"
    return "" if "train" in cycle.done else _over_budget(cycle.spent_hours, cycle.spent_kwh, settings)


def _begin(observed: Observed, settings: CycleConfig, now: float) -> Action:
    """Without an open cycle: what opens one, or until when to wait."""
    if observed.forgotten_rows and not observed.known:
        return Action("rebuild", f"{observed.desired} holds {observed.forgotten_rows} forgotten rows", now)
    if observed.failed_cycles and not observed.asked:
        cool_at = observed.failed_at + _doubled(FIRST_COOL_S, observed.failed_cycles, LONGEST_COOL_S)
        if observed.failed_at <= now < cool_at:
            return Action("wait", f"{observed.failed_cycles} cycles failed in a row", cool_at)
    if observed.known:
        return Action("wait", "a cycle of these rows, settings and champion is closed already", now + LOOK_AGAIN_S)
    enough = 1 if observed.asked else settings.after_rows
    if observed.new_groups < enough:
        return Action("wait", f"{observed.new_groups} of {enough} new groups", now + LOOK_AGAIN_S)
    if not observed.allowed.now and not observed.asked:
        return Action("wait", observed.allowed.reason, _later(observed.allowed.again, now))
    over = _over_budget(observed.predicted_hours, observed.predicted_kwh, settings)
    if over:
        return Action("wait", f"the plan: {over}", now + LOOK_AGAIN_S)
    if observed.disk_free_bytes < observed.disk_needed_bytes:
        free, needed = observed.disk_free_bytes >> 20, observed.disk_needed_bytes >> 20
        return Action("wait", f"the disk has {free:,} MiB free, a cycle needs {needed:,} MiB", now + LOOK_AGAIN_S)
    why = "asked for by a person" if observed.asked else f"{observed.new_groups} new groups, {observed.allowed.reason}"
    return Action("open", why, now)


def _over_budget(hours: float | None, kwh: float | None, settings: CycleConfig) -> str:
    for value, budget, unit in ((hours, settings.budget_hours, "hours"), (kwh, settings.budget_kwh, "kWh")):
        if value is not None and budget is not None and value > budget:
            return f"{value:.2f} {unit} of training are above the budget of {budget:g}"
    return ""


def _doubled(first_s: float, times: int, longest_s: float) -> float:
    return min(longest_s, first_s * 2.0 ** min(times - 1, 32))


def _later(moment: float | None, now: float) -> float:
    """The time that a wait ends at: never in the past, whatever the clock did."""
    return now + LOOK_AGAIN_S if moment is None or moment <= now else moment

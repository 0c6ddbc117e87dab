"""What comes next: one pure function from an observation, the settings and the time to one action. The first match
wins.

The states are artefacts: files, rows of hive.db and kernel locks that are there or not. No status is stored. So a loop
that was killed anywhere decides the same again, and a decision in the journal can be replayed from its own line.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from hivetune.config import CycleConfig

# An open cycle passes these in order; each is known by what it leaves. Taking and returning the card's lease is no
# station: the worker's kernel lock exists exactly as long as the worker lives (process/lease.py).
Station = Literal["snapshot", "train", "evaluate", "gate", "export", "register", "warm", "promote", "watch"]
STATIONS: tuple[Station, ...] = get_args(Station)
ActionKind = Literal["wait", "restore", "roll_back", "rebuild", "open", "close", "replay", Station]
# What computes for minutes or hours, only while `Observation.allowed` says so.
HEAVY: frozenset[ActionKind] = frozenset(("snapshot", "train", "evaluate", "gate", "export", "register", "replay"))
OpenedFor = Literal["rows", "rebuild", "request"]
# How a cycle ends. `failed` and `rolled_back` make the next one wait; only `failed` may be opened again.
CycleEnd = Literal["promoted", "refused", "ready", "failed", "given_up", "rolled_back"]

MIN_SLICE_S = 60.0  # or a tenth of the budget; a worker needs a third of it to start
LOOK_AGAIN_S = 60.0  # a wait for something that has no time of its own ends with the next look
MAX_FAILURES = 3  # of one station in a row; then the cycle is closed
FIRST_RETRY_S, MAX_RETRY_S = 60.0, 3600.0
FIRST_COOL_S, MAX_COOL_S = 3600.0, 7 * 86400.0


@dataclass(frozen=True)
class Permission:
    """Permission for long work now (window.py). `until`: when it must end, None for never. `again`: when it may
    continue, if not now. `reason`: why, in words, also when it may."""

    now: bool = True
    until: float | None = None
    again: float | None = None
    reason: str = "no window is set"


@dataclass(frozen=True)
class FailedAct:
    """The last act, which failed `times` in a row. `final`: a retry would fail too. `patient`: it waits for a disk or
    another process, which ends no cycle."""

    kind: ActionKind
    times: int
    at: float
    words: str
    final: bool = False
    patient: bool = False


@dataclass(frozen=True)
class OpenCycle:
    """The open cycle as its artefacts show it.

    `done`: the stations whose artefact is there and whole. `passed`: the gate's answer, None before it. `void`: why the
    cycle must not continue (its rows were forgotten, its base model changed). `withdrawn`: why its release was rolled
    back. `spent_hours`: of training so far. `promoted_at`: since when its release is the champion.
    `replay_due`: its model was worse, and whether its new rows are the cause is unknown yet. `retired`: a person took
    the champion out of service, so only a person brings its name back.
    """

    id: str
    opened_for: OpenedFor = "rows"
    done: frozenset[Station] = frozenset()
    passed: bool | None = None
    void: str = ""
    withdrawn: str = ""
    spent_hours: float = 0.0
    promoted_at: float = 0.0
    replay_due: bool = False
    retired: bool = False


@dataclass(frozen=True)
class Observation:
    """The facts that a decision is based on. Times are seconds since 1970.

    `desired`: the release that should be served, None before the first. `served`: the one that can be. `problem`: why
    they differ. `watch_failed`: why the champion is worse than the one before it. `forgotten_rows`: of the champion's
    snapshot. `known`: a cycle of these rows, settings and champion is closed already, so opening it again would change
    nothing. `asked`: a person wants a cycle now. `new_groups`: usable groups that no cycle has trained on. `unusable`:
    why no rows can be trained on now.
    `failed_cycles`: how many failed in a row, the last at `failed_at`. `predicted_hours` and `predicted_kwh`: the upper
    end of the plan, None if unknown.
    """

    paused: bool = False
    desired: str | None = None
    served: str | None = None
    problem: str = ""
    watch_failed: str = ""
    open: OpenCycle | None = None
    forgotten_rows: int = 0
    known: bool = False
    asked: bool = False
    new_groups: int = 0
    unusable: str = ""
    failed: FailedAct | None = None
    failed_cycles: int = 0
    failed_at: float = 0.0
    allowed: Permission = Permission()
    predicted_hours: float | None = None
    predicted_kwh: float | None = None
    disk_free_bytes: int = 0
    disk_needed_bytes: int = 0


@dataclass(frozen=True)
class Action:
    """One thing to do, why, and the earliest time for it. That is the moment of the decision for everything but a
    wait."""

    kind: ActionKind
    reason: str
    not_before: float


def decide(observed: Observation, settings: CycleConfig, now: float) -> Action:
    """Return the next action. Every state has one. All but a wait make progress, and a wait ends at a time after `now`.

    When something past has a time in the future, the clock was set back; it delays nothing.
    """
    action = _first_match(observed, settings, now)
    failed = observed.failed
    if failed is None or action.kind != failed.kind:
        return action
    retry_at = failed.at + _doubled(FIRST_RETRY_S, failed.times, MAX_RETRY_S)
    if failed.at <= now < retry_at:
        return Action("wait", f"{failed.kind} failed and is tried again: {failed.words}", retry_at)
    return action


def ending(cycle: OpenCycle, settings: CycleConfig, failed: FailedAct | None) -> tuple[CycleEnd, str] | None:
    """Return how and why an open cycle is to be closed now, or None if it stays open."""
    if _replays(cycle) and not (failed is not None and failed.kind == "replay" and _is_enough(failed)):
        return None
    if cycle.withdrawn:
        return "rolled_back", cycle.withdrawn
    if len(cycle.done) == len(STATIONS):
        return "promoted", "its release was promoted and watched"
    if "promote" in cycle.done:
        return None
    if cycle.void:
        return "given_up", cycle.void
    if "gate" in cycle.done and not cycle.passed:
        return "refused", "the gate refused it; the champion stays"
    if failed is not None and failed.kind == _next(cycle) and _is_enough(failed):
        return "failed", f"{failed.kind} failed: {failed.words}"
    if (settings.promote == "ask" or cycle.retired) and {"gate", "warm"} <= cycle.done:
        return "ready", "it passed the gate and waits for a person to promote it"
    if "train" in cycle.done or not cycle.spent_hours:
        return None
    over = _over_budget(cycle.spent_hours + _min_slice_s(settings) / 3600, settings)
    return ("failed", over) if over else None


def _is_enough(failed: FailedAct) -> bool:
    return failed.final or (failed.times >= MAX_FAILURES and not failed.patient)


def _first_match(observed: Observation, settings: CycleConfig, now: float) -> Action:
    if observed.paused:
        return Action("wait", "paused by a person", now + LOOK_AGAIN_S)
    if observed.served != observed.desired:
        return Action("restore", f"{observed.desired} can't be served: {observed.problem}", now)
    if observed.watch_failed:
        return Action("roll_back", f"{observed.desired} is worse: {observed.watch_failed}", now)
    if observed.open is not None:
        return _go_on(observed.open, observed, settings, now)
    return _begin(observed, settings, now)


def _go_on(cycle: OpenCycle, observed: Observation, settings: CycleConfig, now: float) -> Action:
    """Return the next missing artefact of an open cycle as an action, or its end."""
    end = ending(cycle, settings, observed.failed)
    if end is not None:
        return Action("close", ": ".join(end), now)
    station = _next(cycle)
    if station in HEAVY and not observed.allowed.now:
        return Action("wait", f"{station}: {observed.allowed.reason}", _later(observed.allowed.again, now))
    until = observed.allowed.until
    if station in HEAVY and until is not None and until - now < _min_slice_s(settings):
        return Action("wait", f"{station}: what is left of the window is too short", _later(until, now))
    watch_until = cycle.promoted_at + settings.watch * 3600
    if station == "watch" and cycle.promoted_at <= now < watch_until:
        return Action("wait", "the new champion is watched", watch_until)
    return Action(station, f"the next missing artefact of cycle {cycle.id}", now)


def _next(cycle: OpenCycle) -> ActionKind:
    """Return the first station whose artefact is missing. A lost earlier artefact comes before the stations that depend
    on it. A cycle whose model was worse has only its replay before it."""
    return "replay" if _replays(cycle) else next(station for station in STATIONS if station not in cycle.done)


def _replays(cycle: OpenCycle) -> bool:
    return cycle.replay_due and not cycle.void


def _begin(observed: Observation, settings: CycleConfig, now: float) -> Action:
    """Return what opens a cycle, or until when to wait."""
    if observed.forgotten_rows and not observed.known:
        return Action("rebuild", f"{observed.desired} holds {observed.forgotten_rows} forgotten rows", now)
    if observed.failed_cycles and not observed.asked:
        cool_at = observed.failed_at + _doubled(FIRST_COOL_S, observed.failed_cycles, MAX_COOL_S)
        if observed.failed_at <= now < cool_at:
            return Action("wait", f"{observed.failed_cycles} cycles failed in a row", cool_at)
    reason = _lacks(observed, settings)
    if reason:
        return Action("wait", reason, now + LOOK_AGAIN_S)
    if not observed.allowed.now:
        return Action("wait", observed.allowed.reason, _later(observed.allowed.again, now))
    why = "asked for by a person" if observed.asked else f"{observed.new_groups} new groups, {observed.allowed.reason}"
    return Action("open", why, now)


def _lacks(observed: Observation, settings: CycleConfig) -> str:
    """Return what a new cycle is waiting for, without a known time, or ""."""
    if observed.unusable:
        return f"the rows can't be used: {observed.unusable}"
    if observed.known:
        return "a cycle of these rows, settings and champion is closed already"
    enough = 1 if observed.asked else settings.after_rows
    if observed.new_groups < enough:
        return f"{observed.new_groups} of {enough} new groups"
    over = _over_budget(observed.predicted_hours, settings)
    if over:
        return f"the plan: {over}"
    if observed.disk_free_bytes < observed.disk_needed_bytes:
        # Without what is free: it moves, and each wait that reads otherwise is a line of the journal on that disk.
        return f"a cycle needs {observed.disk_needed_bytes >> 20:,} MiB, the disk has less"
    return ""


def _min_slice_s(settings: CycleConfig) -> float:
    return min(MIN_SLICE_S, 360 * settings.hours) if settings.hours is not None else MIN_SLICE_S


def _over_budget(hours: float | None, settings: CycleConfig) -> str:
    if hours is not None and settings.hours is not None and hours > settings.hours:
        return f"{hours:.3g} hours of training are above the budget of {settings.hours:g}"
    return ""


def _doubled(first_s: float, times: int, longest_s: float) -> float:
    return min(longest_s, first_s * 2.0 ** min(times - 1, 32))


def _later(moment: float | None, now: float) -> float:
    """Return the end of a wait, never in the past."""
    return moment if moment is not None and moment > now else now + LOOK_AGAIN_S

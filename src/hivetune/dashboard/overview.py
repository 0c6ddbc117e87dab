"""The overview page: running work, served releases, next steps, and problems that need a person."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hivetune.base.database import open_existing_database
from hivetune.base.disk import home, lock_holder
from hivetune.base.journal import read_tail
from hivetune.base.paths import quoted
from hivetune.base.typed import to_plain
from hivetune.cycle.record import JOURNAL, PAUSED, cycles_of, loop_folder, loop_names
from hivetune.release.registry import Release, forgotten_rows, releases
from hivetune.run.status import RunStatus, known_runs, shortest_names, works_on
from hivetune.serve.route import gateway_folder

RECENT_RUNS = 5  # the screen has 24 lines


@dataclass(frozen=True)
class Suggestion:
    """Something that a person may do: the reason, and the command that does it."""

    why: str
    command: str


@dataclass(frozen=True)
class Working:
    """A process that measures or exports a run. `doing`: "eval", "export" or "export-check". `begun`: seconds since
    1970."""

    doing: str
    run: str
    pid: int
    begun: float


@dataclass(frozen=True)
class CycleLoop:
    """A cycle's loop. `pid`: None if it is not running. `last`: its last event as text. `ended`: outcome and reason of
    its newest closed cycle. `failed`: why its newest cycle failed, else empty. `action`, `reason`: its newest decision,
    made at `decided` (seconds since 1970).
    """

    name: str
    pid: int | None
    paused: bool
    last: str
    ended: str
    failed: str
    action: str
    reason: str
    decided: float


@dataclass(frozen=True)
class Overview:
    """The content of the page. `running`: trainings. `working`: evaluations and exports. `gateway_pid`: None if no
    gateway is running. `needs`: problems that wait for a person. `next`: possible next steps.
    """

    running: tuple[RunStatus, ...]
    working: tuple[Working, ...]
    recent: tuple[RunStatus, ...]
    champions: tuple[Release, ...]
    gateway_pid: int | None
    loops: tuple[CycleLoop, ...]
    interactions: int
    needs: tuple[Suggestion, ...]
    next: tuple[Suggestion, ...]

    def document(self) -> dict[str, Any]:
        """Return the overview as plain values for JSON."""
        champions = [{"release": r.label, "model": r.model, "verdict": r.verdict} for r in self.champions]
        return {**to_plain(self), "champions": champions}


def overview(statuses: Iterable[RunStatus] | None = None) -> Overview:
    """Return the overview of this home; empty for a missing home. `statuses`: the status of every run, if it is
    known."""
    runs = sorted(known_runs() if statuses is None else statuses, key=lambda status: status.created, reverse=True)
    with open_existing_database() as database:
        registered = releases(database)
        (interactions,) = database.execute("SELECT count(*) FROM interactions").fetchone()
        loops = tuple(cycle_loop(database, name) for name in loop_names())
        tainted = {release.label: forgotten_rows(database, release.snapshot) for release in registered}
    champions = tuple(release for release in registered if "champion" in release.aliases)
    holder = lock_holder(gateway_folder())
    names = shortest_names([status.run for status in runs])
    runs = [replace(status, name=names[status.run]) for status in runs]  # as `show` takes it
    # A cycle continues its own runs without a person.
    mine = [status for status in runs if not status.run.is_relative_to(home() / "cycles")]
    needs = [
        Suggestion(f"the newest cycle of {loop.name} failed: {loop.failed}", f"hivetune cycle status {loop.name}")
        for loop in loops
        if loop.failed
    ]
    return Overview(
        running=tuple(status for status in runs if status.state == "running"),
        working=tuple(
            Working(doing, status.name, worker.pid, worker.since)
            for status in runs
            for doing, worker in works_on(status.run)
        ),
        recent=tuple(status for status in runs if status.state != "running")[:RECENT_RUNS],
        champions=champions,
        gateway_pid=holder.pid if holder else None,
        loops=loops,
        interactions=interactions,
        needs=(*needs_of(mine, registered, tainted), *needs),
        next=tuple(_next_steps(bool(mine), interactions, unserved=bool(champions) and holder is None)),
    )


def cycle_loop(database: sqlite3.Connection, name: str) -> CycleLoop:
    """Return the loop of a name from `loop_names`."""
    folder = loop_folder(name)
    # The tail alone: the journal of a loop grows for years.
    holder, cycles, entries = lock_holder(folder), cycles_of(database, name), read_tail(folder / JOURNAL)
    closed = [cycle for cycle in cycles if cycle.end is not None][-1:]
    done = [entry for entry in entries if entry["event"] == "end"][-1:]
    decisions: list[Mapping[str, Any]] = [entry for entry in entries if entry["event"] == "decision"]
    decision = decisions[-1] if decisions else {}
    return CycleLoop(
        name=name,
        pid=holder.pid if holder else None,
        paused=(folder / PAUSED).exists(),
        last="".join(f"{entry['station']} {entry['outcome']}: {entry['words']}" for entry in done),
        ended="".join(f"{cycle.id} {str(cycle.end).replace('_', ' ')}: {cycle.reason}" for cycle in closed),
        failed=cycles[-1].reason if cycles and cycles[-1].end == "failed" else "",
        action=decision.get("do", ""),
        reason=decision.get("reason", ""),
        decided=decision.get("now", 0.0),
    )


def needs_of(runs: list[RunStatus], registered: list[Release], tainted: Mapping[str, int]) -> Iterator[Suggestion]:
    """Yield the problems that need a person. Runs are named as on the command line. `tainted`: label of a release ->
    number of its rows that were forgotten after its training."""
    for status in runs:
        name = status.name
        what = {
            "interrupted": (f"was interrupted at step {status.step}", "train"),
            "failed": (f"failed: {status.last_fault}", "show"),
            "damaged": (f"is damaged: {status.problem}", "show"),
        }
        if status.state in what:
            why, command = what[status.state]
            yield Suggestion(f"{name} {why}", f"hivetune {command} {quoted(name)}")
    for release in registered:
        if "candidate" in release.aliases and release.verdict == "deploy" and not release.withdrawn:
            yield Suggestion(f"{release.label} passed the gate and waits", f"hivetune promote {release.label}")
        if "champion" in release.aliases and (count := tainted[release.label]):
            why = f"{release.label} was trained or judged on at least {count} rows that were forgotten since"
            yield Suggestion(why, f"hivetune releases {release.label}")


def _next_steps(has_runs: bool, interactions: int, *, unserved: bool) -> Iterator[Suggestion]:
    """Yield the first steps of a new home, and starting a gateway if a champion is not served."""
    # What follows a run or a release is said by the command that made it.
    if not has_runs:
        yield Suggestion("see the whole walk on a small model", "hivetune demo")
        yield Suggestion("start with your own rows", f"hivetune init {'store' if interactions else 'ROWS'}")
    if unserved:
        yield Suggestion("no gateway runs", "hivetune serve")

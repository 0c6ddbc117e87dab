"""The loop's memory: names of its files, and the tables `cycles`, `decisions` and `cycle_rows` of hive.db.

    cycles/NAME/cycle.jsonl     every decision with its observation, every intent and every outcome
    cycles/NAME/paused, now     what a person told the loop: files that are there or not
    cycles/NAME/ID/run/         the run of a cycle
    cycles/NAME/ID/replay/      the same training without its new rows, after its model was worse
    cycles/NAME/ID/*.json       what its other stations left

A cycle is open while its row has no `closed`. An act is a row of `decisions` that is written before it begins; one
without an `outcome` was interrupted by the death of its process.
"""

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database, transaction
from hivetune.base.disk import home
from hivetune.base.sealed import read_sealed
from hivetune.cycle.decide import ActionKind, CycleEnd, FailedAct, OpenedFor
from hivetune.errors import UsageError
from hivetune.run.folder import METRICS

JOURNAL, PAUSED, NOW = "cycle.jsonl", "paused", "now"
RUN, GATE, WATCHED = "run", "cycle-gate.json", "watched.json"
REPLAY, REPLAYED = "replay", "replayed.json"
AGAINST_CHAMPION, AGAINST_BEST = "against-champion.json", "against-best.json"
LEFT_OUT = "left_out.jsonl"
# A kill of the whole process is no fault of its act. But an act that takes the machine down each time must end, so this
# many deaths in a row count as one failure.
KILLS_A_FAILURE = 10


@dataclass(frozen=True)
class CycleRow:
    """A row of `cycles`. `config`: the settings that it was opened with. `pool`: the snapshot of all rows that it chose
    from. `champion`: the release that was champion then. `closed` is None while it is open."""

    id: str
    name: str
    opened: float
    opened_for: OpenedFor
    config: Mapping[str, Any]
    pool: str
    champion: str | None
    closed: float | None = None
    end: CycleEnd | None = None
    reason: str = ""

    @property
    def folder(self) -> Path:
        return loop_folder(self.name) / self.id

    @property
    def run(self) -> Path:
        return self.folder / RUN


@dataclass(frozen=True)
class Act:
    """A row of `decisions`. `outcome`: done, failed, paused (a slice that ended), interrupted (its process died), or
    None while it runs. `details`: such as the exit code of a failure, or the hours and the energy of a slice."""

    number: int
    cycle: str | None
    kind: ActionKind
    started: float
    outcome: str | None = None
    ended: float | None = None
    words: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def loop_folder(name: str) -> Path:
    """Return the folder of the loop with this name."""
    return home() / "cycles" / name


def loop_names() -> list[str]:
    """Return the names of the loops of this home, sorted."""
    return sorted(path.name for path in (home() / "cycles").glob("*") if path.is_dir())


def cycles_of(database: sqlite3.Connection, name: str) -> list[CycleRow]:
    """Return the cycles of a name, oldest first."""
    columns = "id, name, opened, opened_for, config, pool, champion, closed, ending, reason"
    rows = database.execute(f"SELECT {columns} FROM cycles WHERE name = ? ORDER BY opened, id", (name,))
    return [CycleRow(*(*row[:4], json.loads(row[4]), *row[5:])) for row in rows]


def open_cycle(database: sqlite3.Connection, name: str) -> CycleRow | None:
    """Return the open cycle of a name, or None."""
    return next((cycle for cycle in cycles_of(database, name) if cycle.closed is None), None)


def begin_cycle(database: sqlite3.Connection, cycle: CycleRow) -> bool:
    """Open a cycle; return whether that changed anything. A failed one is opened again, another stays closed."""
    with transaction(database):
        row = database.execute("SELECT ending FROM cycles WHERE id = ?", (cycle.id,)).fetchone()
        if row is not None and row[0] != "failed":
            return False
        config = json.dumps(dict(cycle.config))
        database.execute(
            "INSERT OR REPLACE INTO cycles (id, name, opened, opened_for, champion, pool, config)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (cycle.id, cycle.name, cycle.opened, cycle.opened_for, cycle.champion, cycle.pool, config),
        )
        return True


def end_cycle(
    database: sqlite3.Connection,
    cycle: CycleRow,
    end: CycleEnd,
    reason: str,
    now: float,
    *,
    trained: Collection[str] = (),
    suspect: Collection[str] = (),
) -> None:
    """Close a cycle and remember its rows, by the hash of their content.

    `trained`: those that the cycle or the champion of its time trained on or held out, which no longer count as new.
    `suspect`: those of the cycle without which its model is better.
    """
    with transaction(database):
        database.executemany(
            "INSERT OR IGNORE INTO cycle_rows VALUES (?, ?)", ((cycle.name, identity) for identity in trained)
        )
        database.executemany(
            "INSERT OR IGNORE INTO suspect_rows VALUES (?, ?, ?)",
            ((cycle.name, identity, cycle.id) for identity in suspect),
        )
        database.execute(
            "UPDATE cycles SET closed = ?, ending = ?, reason = ? WHERE id = ?", (now, end, reason, cycle.id)
        )


def trained_rows(database: sqlite3.Connection, name: str) -> frozenset[str]:
    """Return the ids of the rows that a closed cycle of this name, or its champion, trained on or held out."""
    return frozenset(row for (row,) in database.execute("SELECT row FROM cycle_rows WHERE name = ?", (name,)))


def suspect_rows(database: sqlite3.Connection, name: str) -> dict[str, str]:
    """Return the ids of the rows that no cycle of this name may train on, each with the cycle that brought it."""
    return dict(database.execute("SELECT row, cycle FROM suspect_rows WHERE name = ?", (name,)))


def admit_rows(database: sqlite3.Connection, name: str) -> int:
    """Count the suspect rows as new again, because a person says that they are right. Returns how many there were."""
    with transaction(database):
        database.execute(
            "DELETE FROM cycle_rows WHERE name = ?1 AND row IN (SELECT row FROM suspect_rows WHERE name = ?1)", (name,)
        )
        return database.execute("DELETE FROM suspect_rows WHERE name = ?", (name,)).rowcount


def begin_act(database: sqlite3.Connection, name: str, cycle: str | None, kind: ActionKind, now: float) -> int:
    """Write the intent durably and return its number."""
    with transaction(database):
        inserted = database.execute(
            "INSERT INTO decisions (name, cycle, kind, started) VALUES (?, ?, ?, ?)", (name, cycle, kind, now)
        )
        return int(inserted.lastrowid or 0)


def end_act(
    database: sqlite3.Connection, number: int, outcome: str, now: float, words: str, details: Mapping[str, Any]
) -> None:
    """Write the outcome of an act."""
    with transaction(database):
        database.execute(
            "UPDATE decisions SET outcome = ?, ended = ?, words = ?, details = ? WHERE number = ?",
            (outcome, now, words, json.dumps(dict(details)), number),
        )


def acts_of(database: sqlite3.Connection, name: str, cycle: str | None = None) -> list[Act]:
    """Return the acts of a name, or of one of its cycles, oldest first."""
    rows = database.execute(
        "SELECT number, cycle, kind, started, outcome, ended, words, details FROM decisions"
        " WHERE name = ?1 AND (?2 IS NULL OR cycle = ?2) ORDER BY number",
        (name, cycle),
    )
    return [
        Act(number, of, kind, started, outcome, ended, text, json.loads(details or "{}"))
        for number, of, kind, started, outcome, ended, text, details in rows
    ]


def outcome_of(act: Act, *, running: bool) -> str | None:
    """Return the outcome of an act. `running`: a process holds the loop; otherwise nothing runs."""
    return act.outcome or (None if running else "interrupted")


def act_text(act: Act, *, running: bool) -> str:
    """Describe an act and its outcome."""
    outcome = outcome_of(act, running=running) or "running"
    return f"{act.kind.replace('_', ' ')} {outcome}{f': {act.words}' if act.words else ''}"


def settle_interrupted(name: str) -> list[tuple[int, str]]:
    """Mark acts whose process died as interrupted and return number and words of each. The caller holds the loop's
    lock. A slice of training lasted until its last line of metrics."""
    settled = []
    with closing(open_database()) as database:
        for act in acts_of(database, name):
            if act.outcome is not None:
                continue
            metrics = loop_folder(name) / (act.cycle or "") / (REPLAY if act.kind == "replay" else RUN) / METRICS
            seconds = max(0.0, metrics.stat().st_mtime - act.started) if metrics.exists() else 0.0
            details = {"hours": round(seconds / 3600, 6)} if act.kind in ("train", "replay") else {}
            text = "its process ended in the middle"
            end_act(database, act.number, "interrupted", act.started + seconds, text, details)
            settled.append((act.number, text))
    return settled


def last_failure(acts: Iterable[Act], cycle: str | None) -> FailedAct | None:
    """Return the failures at the end of `acts` that are of one kind and of this cycle, or None when the last act
    succeeded. Interrupted acts among them count when there are many."""
    newest: ActionKind | None = None
    times = kills = 0
    last: Act | None = None
    for act in reversed(list(acts)):
        ours = act.cycle == cycle and newest in (None, act.kind)
        if not ours or act.outcome in ("done", "paused"):
            break
        newest = act.kind
        if act.outcome in (None, "interrupted"):
            kills += 1
        else:
            times += 1
            last = last or act
    times += kills // KILLS_A_FAILURE
    if newest is None or not times:
        return None
    if last is None:
        return FailedAct(newest, times, 0.0, f"its process died {kills} times")
    final, patient = (bool(last.details.get(key)) for key in ("final", "patient"))
    return FailedAct(newest, times, last.ended or 0.0, last.words, final, patient)


def failed_in_a_row(cycles: Iterable[CycleRow]) -> tuple[int, float]:
    """Return how many of the newest closed cycles failed or were rolled back, and when the last one did."""
    closed = sorted((c for c in cycles if c.closed is not None), key=lambda c: c.closed or 0.0, reverse=True)
    times = 0
    for cycle in closed:
        if cycle.end not in ("failed", "rolled_back"):
            break
        times += 1
    return times, (closed[0].closed or 0.0) if times else 0.0


# Documents that stations of a cycle left.


def gate_of(cycle: CycleRow) -> dict[str, Any]:
    """Return the gate's document, or {} before it."""
    return read_document(cycle.folder / GATE)


def read_replay(cycle: CycleRow) -> dict[str, Any]:
    """Return what a training without the cycle's new rows showed of its present candidate, or {} before it."""
    document = read_document(cycle.folder / REPLAYED)
    return document if document.get("adapter_sha256") == gate_of(cycle).get("adapter_sha256") else {}


def read_document(path: Path) -> dict[str, Any]:
    """Return a sealed document, or {} where it is missing or damaged: its content is measured again."""
    try:
        return read_sealed(path)
    except UsageError:
        return {}

"""The memory of a cycle: the names of its files, and the tables `cycles` and `cycle_rows` of hive.db.

    cycles/NAME/cycle.jsonl     decisions, the begin and end of each station, notices: for people, never read back
    cycles/NAME/paused, now     what a person told the loop: files that are there or not
    cycles/NAME/ID/run/         the run of a cycle
    cycles/NAME/ID/*.json       what its other stations left

A cycle is open while its row has no `closed`. What it has done is what its files say; the row only counts failures.
"""

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.database import transaction
from hivetune.base.disk import home
from hivetune.base.documents import read_document
from hivetune.errors import UsageError
from hivetune.release.registry import Release, releases

JOURNAL, PAUSED, NOW = "cycle.jsonl", "paused", "now"
DOMAIN = "domain.json"  # of a cycle that is for one agent or category
RUN, GATE, AGAINST_CHAMPION, LEFT_OUT = "run", "cycle-gate.json", "against-champion.json", "left_out.jsonl"
# The death of the whole process is no fault of its station. But a station that takes the machine down each time must
# end, so this many deaths in a row count as one failure.
DEATHS_A_FAILURE = 10

OpenedFor = Literal["rows", "rebuild", "request"]
# How a cycle ends. `failed` and `rolled_back` make the next one wait; only `failed` may be opened again.
CycleEnd = Literal["promoted", "refused", "ready", "failed", "given_up", "rolled_back"]


@dataclass(frozen=True)
class CycleRow:
    """A row of `cycles`. `config`: the settings that it was opened with. `pool`: the snapshot of all rows that it chose
    from. `champion`: the release that was champion then. `failures`: of `station`, in a row, the last at `failed_at`,
    seconds since 1970, because of `words`. `closed` is None while it is open."""

    id: str
    name: str
    opened: float
    opened_for: OpenedFor
    config: Mapping[str, Any]
    pool: str
    champion: str | None
    station: str = ""
    failures: int = 0
    failed_at: float | None = None
    words: str = ""
    closed: float | None = None
    end: CycleEnd | None = None
    reason: str = ""

    @property
    def folder(self) -> Path:
        return loop_folder(self.name) / self.id

    @property
    def run(self) -> Path:
        return self.folder / RUN


def loop_folder(name: str) -> Path:
    """Return the folder of the loop with this name."""
    return home() / "cycles" / name


def loop_names() -> list[str]:
    """Return the names of the loops of this home, sorted. A domain belongs to the loop of its name."""
    return sorted(path.parent.name for path in (home() / "cycles").glob(f"*/{JOURNAL}"))


def cycles_of(database: sqlite3.Connection, name: str) -> list[CycleRow]:
    """Return the cycles of a name, oldest first."""
    columns = (
        "id, name, opened, opened_for, config, pool, champion, station, failures, failed, words, closed, ending, reason"
    )
    rows = database.execute(f"SELECT {columns} FROM cycles WHERE name = ? ORDER BY opened, id", (name,))
    return [CycleRow(*(*row[:4], json.loads(row[4]), *row[5:])) for row in rows]


def begin_cycle(database: sqlite3.Connection, cycle: CycleRow) -> None:
    """Open a cycle. One that failed is opened again; one that ended otherwise stays closed."""
    with transaction(database):
        row = database.execute("SELECT ending FROM cycles WHERE id = ?", (cycle.id,)).fetchone()
        if row is not None and row[0] != "failed":
            return
        database.execute(
            "INSERT OR REPLACE INTO cycles (id, name, opened, opened_for, champion, pool, config)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(cycle.id, cycle.name, cycle.opened, cycle.opened_for, cycle.champion, cycle.pool),
                json.dumps(dict(cycle.config)),
            ),
        )


def begin_station(database: sqlite3.Connection, cycle: CycleRow, station: str, now: float) -> int:
    """Note that a station begins, and return how many of its beginnings ended by the death of the process since the
    last failure. Failures of another station are forgotten: the cycle has come further."""
    with transaction(database):
        database.execute(
            "UPDATE cycles SET failures = failures * (station = ?1), deaths = (deaths + 1) * (station = ?1),"
            " station = ?1 WHERE id = ?2",
            (station, cycle.id),
        )
        (deaths,) = database.execute("SELECT deaths FROM cycles WHERE id = ?", (cycle.id,)).fetchone()
        if deaths >= DEATHS_A_FAILURE:
            database.execute(
                "UPDATE cycles SET failures = failures + 1, deaths = 0, failed = ?, words = ? WHERE id = ?",
                (now, f"its process died {deaths} times", cycle.id),
            )
        return int(deaths)


def end_station(database: sqlite3.Connection, cycle: CycleRow) -> None:
    """Note that a station came to an end, whichever."""
    with transaction(database):
        database.execute("UPDATE cycles SET deaths = -1 WHERE id = ?", (cycle.id,))


def fail_station(database: sqlite3.Connection, cycle: CycleRow, words: str, now: float, *, counts: bool) -> int:
    """Note a failure of the present station; return how many there were in a row. `counts`: a wait for a disk or for
    another process does not."""
    with transaction(database):
        database.execute(
            "UPDATE cycles SET failures = failures + ?, deaths = -1, failed = ?, words = ? WHERE id = ?",
            (counts, now, words, cycle.id),
        )
        (failures,) = database.execute("SELECT failures FROM cycles WHERE id = ?", (cycle.id,)).fetchone()
        return int(failures)


def end_cycle(
    database: sqlite3.Connection, cycle: CycleRow, end: CycleEnd, reason: str, now: float, trained: Collection[str] = ()
) -> None:
    """Close a cycle. `trained`: ids of the rows that it or the champion of its time trained on or held out, which no
    longer count as new."""
    with transaction(database):
        database.executemany(
            "INSERT OR IGNORE INTO cycle_rows VALUES (?, ?)", ((cycle.name, identity) for identity in trained)
        )
        database.execute(
            "UPDATE cycles SET closed = ?, ending = ?, reason = ? WHERE id = ?", (now, end, reason, cycle.id)
        )


def newly_rolled_back(database: sqlite3.Connection, name: str) -> list[tuple[Release, str]]:
    """Return the releases of promoted cycles that were rolled back since, each with its reason, and mark their cycles:
    each is returned once."""
    found = []
    for cycle in cycles_of(database, name):
        release = release_of(database, cycle) if cycle.end == "promoted" else None
        if release is not None and release.withdrawn:
            with transaction(database):
                database.execute(
                    "UPDATE cycles SET ending = 'rolled_back', reason = ? WHERE id = ?", (release.withdrawn, cycle.id)
                )
            found.append((release, release.withdrawn))
    return found


def trained_rows(database: sqlite3.Connection, name: str) -> frozenset[str]:
    """Return the ids of the rows that a closed cycle of this name, or its champion, trained on or held out."""
    return frozenset(row for (row,) in database.execute("SELECT row FROM cycle_rows WHERE name = ?", (name,)))


def failed_in_a_row(cycles: Iterable[CycleRow]) -> tuple[int, float]:
    """Return how many of the newest closed cycles failed or were rolled back, and when the last one did."""
    closed = sorted((c for c in cycles if c.closed is not None), key=lambda c: c.closed or 0.0, reverse=True)
    times = 0
    for cycle in closed:
        if cycle.end not in ("failed", "rolled_back"):
            break
        times += 1
    return times, (closed[0].closed or 0.0) if times else 0.0


def release_of(database: sqlite3.Connection, cycle: CycleRow) -> Release | None:
    """Return the release that was registered from a cycle's run."""
    run = cycle.run.resolve()  # a release may be known by a name of the home that led through a link
    return next((release for release in releases(database, cycle.name) if Path(release.run).resolve() == run), None)


def gate_of(cycle: CycleRow) -> dict[str, Any]:
    """Return the verdict's document, or {} before it."""
    return measured_document(cycle.folder / GATE)


def measured_document(path: Path) -> dict[str, Any]:
    """Return a document, or {} where it is missing or damaged: its content is measured again."""
    try:
        return read_document(path)
    except UsageError:
        return {}

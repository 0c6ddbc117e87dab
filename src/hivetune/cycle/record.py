"""What a cycle remembers: the names of its files, and the tables `cycles` and `cycle_rows` of hive.db.

  cycles/NAME/cycle.jsonl     decisions, the begin and end of each station, notices: for people, never read back
  cycles/NAME/paused, now     requests of a person to the loop: files that exist or not
  cycles/NAME/ID/run/         the run of a cycle
  cycles/NAME/ID/*.json       results of its other stations

A cycle is open while its row has no `closed`. Its files show which stations are finished; the row only counts failures.
"""

import json
import re
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.database import transaction
from hivetune.base.disk import home
from hivetune.base.documents import read_document
from hivetune.data.snapshot import PoolRow
from hivetune.errors import UsageError
from hivetune.release.registry import Release, releases

JOURNAL, PAUSED, NOW = "cycle.jsonl", "paused", "now"
RUN, GATE, AGAINST_CHAMPION = "run", "cycle-gate.json", "against-champion.json"

OpenedFor = Literal["rows", "request"]
# `failed` makes the next cycle wait for a day, and may be opened again.
CycleEnd = Literal["promoted", "refused", "ready", "failed", "given_up", "rolled_back"]


@dataclass(frozen=True)
class Domain:
    """A domain of the name `of`. `by`: "agent" or "category". `shares`: number of domains that share the error
    level."""

    of: str
    by: str
    value: str
    shares: int = 1

    @property
    def name(self) -> str:
        """Return the name of the domain's releases, such as helpdesk-coder."""
        # The characters that a release's name may have.
        return f"{self.of}-{re.sub('[^a-z0-9]+', '-', self.value).strip('-')}"

    def holds(self, row: PoolRow) -> bool:
        return domain_value(row, self.by) == self.value


def domain_value(row: PoolRow, by: str) -> str:
    """Return the agent or category of a row, normalized as the gateway does before it compares the two."""
    # "Billing  TEAM" of one client and "billing team" of another are one domain.
    return " ".join(((row.agent if by == "agent" else row.category) or "").split()).casefold()


@dataclass(frozen=True)
class CycleRow:
    """A row of `cycles`. `config`: the settings that it was opened with. `champion`: the champion at that time.
    `failures`: number of consecutive failures of `station`; `failed_at` (seconds since 1970) and `words` are of the
    last one. `closed` is None while the cycle is open. `domain`: None for a name's own cycle.
    """

    id: str
    name: str
    opened: float
    opened_for: OpenedFor
    config: Mapping[str, Any]
    champion: str | None
    domain: Domain | None = None
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
    return _cycles(database, "name = ? ORDER BY opened, id", name)


def _cycles(database: sqlite3.Connection, where: str, name: str) -> list[CycleRow]:
    found = database.execute(f"SELECT * FROM cycles WHERE {where}", (name,)).fetchall()
    # The columns of the table are in the order of the fields.
    return [
        CycleRow(*(*row[:4], json.loads(row[4]), row[5], row[6] and Domain(**json.loads(row[6])), *row[7:]))
        for row in found
    ]


def begin_cycle(database: sqlite3.Connection, cycle: CycleRow) -> None:
    """Open a cycle, or open a failed one again. A cycle that ended otherwise stays closed."""
    domain = None if cycle.domain is None else json.dumps(asdict(cycle.domain))
    about = (cycle.id, cycle.name, cycle.opened, cycle.opened_for, json.dumps(dict(cycle.config)), cycle.champion)
    columns = "id, name, opened, opened_for, config, champion, domain"
    with transaction(database):
        # Not replaced in place: a cycle that failed begins anew, with today's settings and no failure.
        database.execute("DELETE FROM cycles WHERE id = ? AND ending = 'failed'", (cycle.id,))
        database.execute(f"INSERT OR IGNORE INTO cycles ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", (*about, domain))


def fail_station(
    database: sqlite3.Connection, cycle: CycleRow, station: str, words: str, now: float, *, counts: bool
) -> int:
    """Record a failure of a station; return the number of consecutive failures. `counts` False: the station only waits
    for a disk or another process, which is not a failure."""
    # Those of another station are forgotten: the cycle has come further. The death of the loop's own process is none:
    # whoever kills it, the same call continues.
    changes = "failures = failures * (station = ?1) + ?2, station = ?1, words = ?3, failed = ?4"
    with transaction(database):
        values = (station, counts, words, now, cycle.id)
        row = database.execute(f"UPDATE cycles SET {changes} WHERE id = ?5 RETURNING failures", values).fetchone()
        return int(row[0])


def end_cycle(
    database: sqlite3.Connection, cycle: CycleRow, end: CycleEnd, reason: str, now: float, trained: Collection[str] = ()
) -> None:
    """Close a cycle. `trained`: ids of the rows that it or its champion trained on or held out, which are not new any
    more."""
    # With its end, in one transaction: rows of a cycle that a kill left open are still new.
    with transaction(database):
        rows = ((cycle.name, identity) for identity in trained)
        database.executemany("INSERT OR IGNORE INTO cycle_rows VALUES (?, ?)", rows)
        values = (now, end, reason, cycle.id)
        database.execute("UPDATE cycles SET closed = ?, ending = ?, reason = ? WHERE id = ?", values)


def newly_rolled_back(database: sqlite3.Connection, name: str) -> list[Release]:
    """Return the releases of promoted cycles, of a name and its domains, that were rolled back since the last call."""
    # Written down one by one: a kill between two tells none twice and loses none but the one that it hit.
    found = []
    for cycle in _cycles(database, "ending = 'promoted' AND ?1 IN (name, domain ->> 'of') ORDER BY opened", name):
        release = release_of(database, cycle)
        if release is not None and release.withdrawn:
            with transaction(database):
                values = (release.withdrawn, cycle.id)
                database.execute("UPDATE cycles SET ending = 'rolled_back', reason = ? WHERE id = ?", values)
            found.append(release)
    return found


def trained_rows(database: sqlite3.Connection, name: str) -> frozenset[str]:
    """Return the ids of the rows that a closed cycle of this name, or its champion, trained on or held out."""
    # Not read from the snapshots: `rm --unused` deletes those of runs that are gone.
    return frozenset(row for (row,) in database.execute("SELECT row FROM cycle_rows WHERE name = ?", (name,)))


def release_of(database: sqlite3.Connection, cycle: CycleRow) -> Release | None:
    """Return the release that was registered from a cycle's run, or None."""
    run = cycle.run.resolve()  # a release may be known by a name of the home that led through a link
    return next((release for release in releases(database, cycle.name) if Path(release.run).resolve() == run), None)


def measured_document(path: Path) -> dict[str, Any]:
    """Return the JSON document that a station wrote; {} if it is missing or damaged, and will be written again."""
    try:
        return read_document(path)
    except UsageError:
        return {}


def gate_of(cycle: CycleRow) -> dict[str, Any]:
    """Return the JSON document of a cycle's verdict, {} if there is none yet."""
    return measured_document(cycle.folder / GATE)

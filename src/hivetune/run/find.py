"""The search for a run by folder, name, beginning of a name, or `last`."""

import difflib
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import lock_holder
from hivetune.base.paths import quoted
from hivetune.errors import UsageError
from hivetune.run.folder import RECORD
from hivetune.run.status import RunStatus, run_status

LAST = "last"


def find_run(name: str, or_else: str = "") -> Path:
    """Return the folder of a run by path, name, unique beginning of a name, or `last` (the newest).

    `or_else` is what else the name could mean, for the message. Raise UsageError that names similar runs.
    """
    path = Path(name).expanduser()
    if (path / RECORD).exists():
        return path.resolve()
    if "/" in name or path.exists():
        raise UsageError(f"{path} is not a run folder", hint="see the runs: hivetune runs")
    runs = sorted(known_runs(), key=lambda status: status.created)
    if name == LAST and runs:
        return runs[-1].run
    beginning = [status.run for status in runs if status.run.name.startswith(name)]
    exact = [run for run in beginning if run.name == name]
    meant = exact or beginning
    if len(meant) == 1:
        return meant[0]
    if meant:
        which = ", ".join(str(run) if exact else run.name for run in meant)
        raise UsageError(f"{name!r} could mean {len(meant)} runs", hint=f"choose one of: {which}")
    if not runs:
        raise UsageError(f"there is no run{or_else} {name!r}", hint="train the first one: hivetune train CONFIG")
    near = difflib.get_close_matches(name, [LAST, *(status.run.name for status in runs)], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"there is no run{or_else} {name!r}", hint=f"{hint}see the runs: hivetune runs")


def shortest_name(folder: Path) -> str:
    """Return the name to type for this run, quoted: its name if it is unique, else its folder."""
    if not database_path().exists():
        return quoted(folder)
    with closing(open_database()) as database:
        runs = {Path(path) for (path,) in database.execute("SELECT path FROM runs")}
    return quoted(shortest_names(runs).get(folder, folder))


def shortest_names(runs: Collection[Path]) -> dict[Path, str]:
    """Return for each of these runs its name if it is unique, else its folder."""
    times = Counter(run.name for run in runs)
    return {run: run.name if times[run.name] == 1 else str(run) for run in runs}


def known_runs(database: sqlite3.Connection | None = None) -> Iterator[RunStatus]:
    """Yield the runs of this home that still exist. `database` is `hive.db` if the caller has it open."""
    query = "SELECT path, created FROM runs"
    if database is not None:
        rows = database.execute(query).fetchall()
    elif database_path().exists():
        with closing(open_database()) as opened:
            rows = opened.execute(query).fetchall()
    else:
        return
    for path, created in rows:
        try:
            status = run_status(Path(path))
        except UsageError:  # deleted by a person
            continue
        yield status if status.created else replace(status, created=created)


def running_runs(database: sqlite3.Connection) -> list[Path]:
    """Return the runs of this home that are running now, the newest first, without reading journals."""
    paths = [Path(path) for (path,) in database.execute("SELECT path FROM runs ORDER BY created DESC")]
    return [path for path in paths if lock_holder(path) is not None]

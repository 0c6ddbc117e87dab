"""Which run is meant: every command takes a folder, a name, the beginning of one, or `last`."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import home, lock_holder
from hivetune.errors import UsageError
from hivetune.run.folder import RECORD
from hivetune.run.status import RunStatus, run_status

LAST = "last"


def find_run(name: str) -> Path:
    """The folder of a run by path, name, unique beginning of a name, or `last` (the newest).

    Raises UsageError naming what is near.
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
    raise UsageError(f"there is no run {name!r}", hint="see the runs: hivetune runs")


def known_runs() -> Iterator[RunStatus]:
    """Runs of this home that are still on disk."""
    if not (home() / "hive.db").exists():
        return
    with open_database() as database:
        paths = [Path(path) for (path,) in database.execute("SELECT path FROM runs")]
    for path in paths:
        try:
            yield run_status(path)
        except UsageError:  # deleted by a person; a damaged one is listed as such
            continue


def running_runs(database: sqlite3.Connection) -> list[Path]:
    """Runs of this home that go on now, the newest first. Reads no journal: cheap however many there are."""
    paths = [Path(path) for (path,) in database.execute("SELECT path FROM runs ORDER BY created DESC")]
    return [path for path in paths if lock_holder(path) is not None]

"""The search for files of a home that are no longer needed, their sizes, and their deletion."""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hivetune.base.database import record_then_delete, transaction
from hivetune.base.disk import MANIFEST, home, path_to_store, read_json, size_of, stored_path, write_json
from hivetune.errors import UsageError
from hivetune.release import registry
from hivetune.release.gguf import HASH_DIGITS
from hivetune.run.checkpoints import FOLDER
from hivetune.run.folder import RECORD, refuse_copied_home
from hivetune.run.status import known_runs, lock_idle_run, lock_run

# What was measured is kept for as long as a person may want to look at it, or compare again.
MEASURED_DAYS = 30
# A snapshot is made before the run that uses it, an unfinished file before it is renamed.
YOUNG_DAYS = 1
DAY_S = 86_400
TOLD = "told"  # below the home: log-probabilities of trained models and of bases, as proofs take them (prove.py)
MEASURED = {"answers": "answers", "scores": "losses", TOLD: "scores of proofs"}
LEFT_OVER = ("*/.*.tmp", "*/.*.task", "releases/*/.*.tmp")  # by killed processes


@dataclass(frozen=True)
class Unused:
    """Files that can be deleted. `what`: their kind; `why`: the reason why they are no longer needed."""

    what: str
    path: Path
    size_bytes: int
    why: str


def find_unused(database: sqlite3.Connection) -> list[Unused]:
    """Return files that are no longer needed, or that can be made again. Deletes nothing."""
    found = []
    for what, path, why in _candidates(database):
        size_bytes = size_of(path) if path.is_dir() else path.stat().st_size if path.exists() else 0
        if size_bytes:
            found.append(Unused(what, path, size_bytes, why))
    return found


# It works on a full disk, where it is needed most: without room for the note the space is freed first.
def delete(database: sqlite3.Connection, unused: Unused) -> None:
    """Delete an entry of `find_unused`. Raises Busy if a process has locked its run, UsageError if it is in use now."""
    if unused.what == "checkpoints":
        run = unused.path.parent
        with lock_run(run):
            manifest = read_json(run / MANIFEST)
            files = {name: entry for name, entry in manifest["files"].items() if not name.startswith(f"{FOLDER}/")}
            remaining = manifest | {"files": files}
            record_then_delete(lambda: write_json(run / MANIFEST, remaining), lambda: shutil.rmtree(unused.path))
    elif unused.what == "release":
        registry.prune(database, registry.find(database, "@".join(unused.path.parts[-2:])))
    elif unused.what == "snapshot":
        if unused.path not in _unused_snapshots(database):
            raise UsageError(f"{unused.path} is now in use", hint="run it again: hivetune rm --unused")
        record_then_delete(lambda: _forget_path(database, "snapshots", unused.path), lambda: shutil.rmtree(unused.path))
    elif unused.path.is_dir():
        shutil.rmtree(unused.path)
    else:
        unused.path.unlink()


def remove_run(database: sqlite3.Connection, run: Path) -> int:
    """Delete a run's folder and row; return the number of bytes freed. Its releases stay whole.

    Raises Busy while a process works on the run; UsageError for a run outside of this home that another home trained,
    since this home is then a copy.
    """
    with lock_idle_run(run):
        refuse_copied_home(run, f"hivetune rm {run}")
        size_bytes = size_of(run)
        aside = run.with_name(f".{run.name}.{os.getpid()}.tmp")  # a kill half-way leaves no half run
        os.rename(run, aside)
    record_then_delete(lambda: _forget_path(database, "runs", run), lambda: shutil.rmtree(aside))
    return size_bytes


def _forget_path(database: sqlite3.Connection, table: Literal["runs", "snapshots"], path: Path) -> None:
    with transaction(database):
        database.execute(f"DELETE FROM {table} WHERE path = ?", (path_to_store(path),))


def _candidates(database: sqlite3.Connection) -> Iterator[tuple[str, Path, str]]:
    for status in known_runs(database):
        if status.state == "done":
            yield "checkpoints", status.run / FOLDER, f"{status.run.name} is finished"
    for folder in _unused_snapshots(database):
        yield "snapshot", folder, "no run or release uses it"
    released = registry.releases(database)
    for release in released:
        if not release.pruned and not release.aliases:
            yield "release", release.folder, f"no alias names {release.label}"
    served = {release.model_sha256[:HASH_DIGITS] for release in released if release.aliases}
    for folder in sorted((home() / "bases").glob("[!.]*")):
        if folder.is_dir() and folder.name.partition("-")[0] not in served:
            yield "base", folder, "no release is served on it; it is made again when needed"
    for name, title in MEASURED.items():
        for path in sorted((home() / name).glob("[!.]*")):
            if _older(path, MEASURED_DAYS):
                yield title, path, f"older than {MEASURED_DAYS} days; can be measured again"
    for path in sorted(path for pattern in LEFT_OVER for path in home().glob(pattern)):
        if _older(path, YOUNG_DAYS):
            yield "left over", path, "a process was killed while it made this"


def _unused_snapshots(database: sqlite3.Connection) -> list[Path]:
    # `releases NAME@V` and `forget` need the others to tell which rows are in a release.
    used = {release.snapshot for release in registry.releases(database) if not release.pruned}
    runs = database.execute("SELECT path, snapshot FROM runs")  # a run with a damaged file may be restored
    used |= {snapshot for path, snapshot in runs if os.path.lexists(stored_path(path) / RECORD)}
    known = database.execute("SELECT hash, path FROM snapshots ORDER BY created").fetchall()
    folders = [stored_path(path) for snapshot, path in known if snapshot not in used]
    mine = [folder for folder in folders if folder.is_relative_to(home()) and folder.is_dir()]
    return [folder for folder in mine if _older(folder, YOUNG_DAYS)]


def _older(path: Path, days: float) -> bool:
    return time.time() - path.stat().st_mtime > days * DAY_S

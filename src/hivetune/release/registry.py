"""Releases in `hive.db`: what was registered, and the log of what became of it.

A release is NAME@VERSION. Its aliases follow from the log: `champion` is what NAME means and what should be served,
`candidate` the newest version, until it is promoted or withdrawn, `previous` what a rollback returns to: the newest
earlier champion that was not withdrawn.

The folder below `releases/NAME/VERSION/` is copied from a run, hashed, read-only and never changed again, so the run
can be deleted. A row of the table, not a folder, makes a release.

    adapter_config.json, adapter_model.safetensors   the adapter as trained
    exports/KIND/                                    the exports of that adapter that were there and whole
    config.resolved.yaml, run.json, eval.json
    manifest.json                                    name, size and SHA-256 of each file; written last
"""

import difflib
import getpass
import itertools
import json
import re
import shutil
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.database import note_and_free, transaction
from hivetune.base.disk import (
    MANIFEST,
    home,
    lock,
    path_to_store,
    problems_once,
    read_json,
    sha256_file,
    size_of,
    stored_path,
    sync,
    write_manifest,
)
from hivetune.base.documents import read_document
from hivetune.base.paths import quoted
from hivetune.base.private import make_folder
from hivetune.errors import Busy, HivetuneError, NotDeployed, UsageError
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG, CONFIG, EVALUATION, EXPORTS, PROOF, RECORD

EXPORTED = "exports"
ADAPTER_EXPORT = "gguf-adapter"  # the kind of export that is served
REQUIRED = (ADAPTER_CONFIG, ADAPTER, CONFIG, RECORD)
ALIASES = ("champion", "candidate", "previous")
RELEASE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
MAX_NAME_LENGTH = 64
RESERVED = ("base",)  # what a request names to get the model without an adapter
# returned: it is the champion again, since the one after it was withdrawn. retired: nothing is served under its name.
Action = Literal["registered", "promoted", "returned", "withdrawn", "retired"]
CROWNED = ("promoted", "returned")


@dataclass(frozen=True)
class Release:
    """One row of `releases`. `verdict` is the gate's, None where nothing was judged; hashes are SHA-256.

    pruned: its artefacts were deleted on purpose. withdrawn: why it was rolled back, else empty; as aliases it follows
    from the log.
    """

    name: str
    version: int
    run: str
    model: str
    model_sha256: str
    adapter_sha256: str
    snapshot: str
    verdict: str | None
    proof: Mapping[str, Any]
    created: float
    withdrawn: str = ""
    pruned: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def folder(self) -> Path:
        return home() / "releases" / self.name / str(self.version)

    def check(self) -> None:
        """Raise HivetuneError if a file of the release is missing or changed."""
        hint = f"register its run again: hivetune register {quoted(self.run)} --as {self.name}"
        if self.pruned:
            raise UsageError(f"the artefacts of {self.label} were pruned", hint=hint)
        problems = problems_once(self.folder)
        if not problems and read_json(self.folder / MANIFEST).get("adapter_sha256") != self.adapter_sha256:
            problems = ["it holds another adapter than was registered"]
        if problems:
            if "champion" in self.aliases:  # or a healthy champion is rolled back
                hint += f"; or serve the release before: hivetune rollback {self.name}"
            raise HivetuneError(f"{self.label} is damaged: {self.folder}: {problems[0]}", hint=hint)


@dataclass(frozen=True)
class Move:
    """One line of the log: what became of a version of a name."""

    version: int
    action: Action
    time: float
    by: str
    reason: str
    forced: bool


# What is registered.


def releases(database: sqlite3.Connection, name: str | None = None) -> list[Release]:
    """Return all releases, or those of one name, oldest version first."""
    rows = database.execute(
        "SELECT name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict, proof, created, pruned"
        " FROM releases WHERE ?1 IS NULL OR name = ?1 ORDER BY name, version",
        (name,),
    ).fetchall()
    found = []
    for each, group in itertools.groupby(rows, lambda row: str(row[0])):
        moves, of_name = history(database, each), list(group)
        last = {move.version: move for move in moves}
        withdrawn = {version: move.reason for version, move in last.items() if move.action == "withdrawn"}
        named = _aliases(moves, {row[1] for row in of_name if not row[10] and row[1] not in withdrawn})
        for row in of_name:
            aliases = tuple(sorted(alias for alias, version in named.items() if version == row[1]))
            known = (*row[:2], str(stored_path(row[2])), *row[3:8], json.loads(row[8]), row[9])
            found.append(Release(*(*known, withdrawn.get(row[1], ""), bool(row[10]), aliases)))
    return found


def history(database: sqlite3.Connection, name: str) -> list[Move]:
    """Return the log of a name, oldest move first."""
    rows = database.execute(
        "SELECT version, action, time, by, reason, forced FROM moves WHERE name = ? ORDER BY number", (name,)
    )
    return [Move(*(*row[:5], bool(row[5]))) for row in rows]


def moves_of(database: sqlite3.Connection, release: Release) -> list[Move]:
    """Return the moves of one release, oldest first."""
    return [move for move in history(database, release.name) if move.version == release.version]


def _aliases(moves: list[Move], usable: set[int]) -> dict[str, int]:
    """Return the version that each alias names after `moves`. `usable`: neither withdrawn nor pruned."""
    champion = candidate = None
    champions: list[int] = []
    for move in moves:
        if move.action == "registered":
            candidate = move.version
            continue
        if move.action in CROWNED:
            champion = move.version
            champions.append(move.version)
        elif champion == move.version:  # withdrawn or retired
            champion = None
        if candidate == move.version:
            candidate = None
    previous = next((version for version in reversed(champions) if version in usable - {champion}), None)
    named = {"champion": champion, "candidate": candidate, "previous": previous}
    return {alias: version for alias, version in named.items() if version is not None}


def find(database: sqlite3.Connection, reference: str) -> Release:
    """Return the release of NAME, NAME@VERSION or NAME@ALIAS. Raises UsageError naming the existing ones."""
    name, _, which = reference.partition("@")
    present = releases(database, name)
    if not present:
        names = [row[0] for row in database.execute("SELECT DISTINCT name FROM releases ORDER BY name")]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see them: hivetune releases"
        raise UsageError(f"no release is called {name!r}", hint=hint)
    alias = which or "champion"
    for release in present:
        if alias in (str(release.version), *release.aliases):
            return release
    existing = ", ".join(" ".join((each.label, *(f"({alias})" for alias in each.aliases))) for each in present)
    if not which:
        hint = f"there is {existing}; promote one: hivetune promote {name}@VERSION"
        raise UsageError(f"{name} has no champion yet", hint=hint)
    hint = f"there is {existing}; use a version or {', '.join(ALIASES)}"
    raise UsageError(f"{reference}: no such release", hint=hint)


def champion_of(database: sqlite3.Connection, name: str) -> Release | None:
    """Return the champion of a name, or None."""
    return _named(database, name, "champion")


def returns_to(database: sqlite3.Connection, name: str) -> Release | None:
    """Return the release that a rollback of `name` would make its champion."""
    return _named(database, name, "previous")


def desired(database: sqlite3.Connection) -> dict[str, int]:
    """Return the version that should be served of each name: its champion's."""
    return {release.name: release.version for release in releases(database) if "champion" in release.aliases}


def _named(database: sqlite3.Connection, name: str, alias: str) -> Release | None:
    return next((release for release in releases(database, name) if alias in release.aliases), None)


def forgotten_rows(database: sqlite3.Connection, snapshot: str, since: float = 0.0) -> int:
    """Return how many rows of a snapshot, at least, were forgotten after it was made, and since then."""
    query = "SELECT coalesce(sum(rows), 0) FROM tainted WHERE snapshot = ? AND time > ?"
    return int(database.execute(query, (snapshot, since)).fetchone()[0])


def snapshot_folder(database: sqlite3.Connection, snapshot: str) -> Path | None:
    """Return the folder of a snapshot by its hash, or None where it is unknown or was deleted."""
    row = database.execute("SELECT path FROM snapshots WHERE hash = ?", (snapshot,)).fetchone()
    folder = stored_path(row[0]) if row is not None else None
    return folder if folder is not None and folder.is_dir() else None


def gguf_adapter(release: Release) -> Path:
    """Return the release's adapter as GGUF. Raises UsageError when it has none, with the reason where it is known."""
    found = sorted((release.folder / EXPORTED / ADAPTER_EXPORT).glob("*.gguf"))
    if found:
        return found[0]
    unserved = release.proof.get("unserved")
    raise UsageError(
        f"{release.label} has no GGUF adapter{f': {unserved}' if unserved else ''}",
        hint=f"register its run again: hivetune register {quoted(release.run)} --as {release.name}",
    )


def exports_in(folder: Path) -> dict[str, list[str]]:
    """Return the main files of each kind of export, relative to `folder`."""
    exports = {}
    for kind in sorted(path for path in (folder / EXPORTED).glob("*") if path.is_dir()):
        names = sorted(str(path.relative_to(folder)) for path in kind.glob("*.gguf"))
        exports[kind.name] = names or [str(kind.relative_to(folder))]
    return exports


# What becomes of a release.


def promote(database: sqlite3.Connection, reference: str, *, by: str, reason: str = "", force: bool = False) -> Release:
    """Make a release the champion of its name, and what should be served. Promoting the champion changes nothing.

    Raises NotDeployed for one that the gate did not pass or that was rolled back, unless `force` with a `reason`;
    UsageError, HivetuneError for damaged artefacts.
    """
    release = find(database, reference)
    if "champion" in release.aliases:
        return release
    if force and not reason:
        raise UsageError("--force needs --reason", hint="give the reason; the registry keeps it")
    refusal = _refusal(release)
    if refusal and not force:
        raise NotDeployed(f"{release.label}: {refusal}", hint="to promote it all the same: --force --reason WORDS")
    release.check()
    with transaction(database):
        if find(database, release.label) != release:
            raise Busy(f"another process changed {release.label} at the same time", hint="try again")
        _log(database, release, "promoted", by=by, reason=reason, forced=bool(refusal))
    return find(database, release.label)


def rollback(database: sqlite3.Connection, reference: str, *, by: str, reason: str) -> tuple[Release, Release]:
    """Withdraw the champion and return to the previous release: (new champion, withdrawn).

    `reference`: the name, or one release. A withdrawn release is not promoted again without force. Raises UsageError
    when there is nothing to return to, or another release is the champion now.
    """
    # Whoever objects to one release names it, so that two objections never roll back two releases.
    champion = find(database, reference)
    moved = UsageError(f"{champion.label} is no longer the champion", hint="see the champion: hivetune releases")
    if "champion" not in champion.aliases:
        raise moved
    earlier = returns_to(database, champion.name)
    if earlier is None:
        raise UsageError(
            f"{champion.label} has no previous release to return to",
            hint=f"promote another version: hivetune promote {champion.name}@VERSION; "
            f"or take it out of service: hivetune releases --retire {champion.name}",
        )
    earlier.check()
    with transaction(database):
        if champion_of(database, champion.name) != champion:
            raise moved
        reason = reason or "rolled back"
        _log(database, champion, "withdrawn", by=by, reason=reason)
        _log(database, earlier, "returned", by=by, reason=f"{champion.label} withdrawn: {reason}")
    return find(database, earlier.label), find(database, champion.label)


def withdraw(database: sqlite3.Connection, reference: str, *, by: str, reason: str) -> Release:
    """Withdraw a candidate: it answers nothing more, and is not promoted without force. Raises UsageError where it is
    no candidate any more."""
    candidate = find(database, reference)
    with transaction(database):
        if _named(database, candidate.name, "candidate") != candidate:
            raise UsageError(f"{candidate.label} is no candidate", hint="see the releases: hivetune releases")
        _log(database, candidate, "withdrawn", by=by, reason=reason or "withdrawn")
    return find(database, candidate.label)


def retire(database: sqlite3.Connection, name: str, *, by: str, reason: str) -> Release | None:
    """Serve nothing under `name` any more; return the champion, or None when there was none. It becomes `previous`,
    so that it is kept and a promotion brings it back."""
    with transaction(database):
        champion = champion_of(database, name)
        if champion is None:
            return None
        _log(database, champion, "retired", by=by, reason=reason)
    return find(database, champion.label)


def _refusal(release: Release) -> str:
    if release.withdrawn:
        return f"it was rolled back: {release.withdrawn}"
    if release.verdict is None:
        return "it was never judged: hivetune eval RUN, then register it again"
    return "" if release.verdict == "deploy" else f"the gate said {release.verdict}"


# One transaction writes the moves of one action, so a registry that is killed, copied or restored is in an old or a new
# state, never in a third.
def _log(
    database: sqlite3.Connection, release: Release, action: Action, *, by: str, reason: str, forced: bool = False
) -> None:
    """Add a move to the log, inside a transaction."""
    database.execute(
        "INSERT INTO moves (name, version, action, time, by, reason, forced) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (release.name, release.version, action, time.time(), by, reason, forced),
    )


# Registration: the files of a run become those of a release.


def check_release_name(name: str) -> str:
    """Return a name if a release can have it. Raises UsageError."""
    if not RELEASE_NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH or name in RESERVED:
        raise UsageError(
            f"{name!r} can't be the name of a release",
            hint=f"use lower-case letters, digits and '-', at most {MAX_NAME_LENGTH} characters, not {RESERVED[0]!r}",
        )
    return name


def register(
    database: sqlite3.Connection, run: Path, name: str, facts: Mapping[str, Any], *, by: str
) -> tuple[Release, bool]:
    """Register a run's adapter under `name` as the candidate; return the release, and whether it is new.

    `facts` has model, model_sha256, adapter_sha256, snapshot, verdict and proof, and whatever else the manifest shall
    keep. An adapter that is registered under this name already keeps its version; a later verdict or export is added to
    it. Raises UsageError, Busy, OSError for the disk, HivetuneError for a file of the run that is missing or damaged.
    """
    check_release_name(name)
    with lock(home() / "releases", hint="it registers a release: wait until it has ended"):  # or two copy into one
        files, earlier = _files_of(run, facts["adapter_sha256"]), releases(database, name)
        of_adapter = (facts["adapter_sha256"], facts["model_sha256"])
        twin = next((r for r in earlier if (r.adapter_sha256, r.model_sha256) == of_adapter and not r.pruned), None)
        version = twin.version if twin is not None else max((r.version for r in earlier), default=0) + 1
        target = home() / "releases" / name / str(version)
        # An export or a verdict may be newer than the registration.
        same = twin is not None and twin.verdict == facts["verdict"] and not problems_once(target)
        if twin is not None and same and all((target / file).is_file() for file in files):
            return twin, False
        _copy(files, target, {"kind": "release", "name": name, "version": version, **facts})
        columns = ("model", "model_sha256", "adapter_sha256", "snapshot", "verdict")
        values = (name, version, path_to_store(run), *(facts[key] for key in columns), json.dumps(facts["proof"]))
        with transaction(database):
            database.execute(
                f"INSERT INTO releases (name, version, run, {', '.join(columns)}, proof, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (name, version) DO UPDATE SET verdict = excluded.verdict, proof = excluded.proof",
                (*values, time.time()),
            )
            if twin is None:
                _log(database, find(database, f"{name}@{version}"), "registered", by=by, reason="")
    return find(database, f"{name}@{version}"), twin is None


def _files_of(run: Path, adapter_sha256: str) -> dict[str, Path]:
    """Return the files of a run that a release keeps, by their names in it."""
    missing = [name for name in REQUIRED if not (run / name).is_file()]
    if missing:
        raise HivetuneError(f"{run} has no {missing[0]}", hint=f"finish the training: hivetune train {quoted(run)}")
    files = {name: run / name for name in (*REQUIRED, EVALUATION) if (run / name).is_file()}
    for folder in sorted((run / EXPORTS).glob("[!.]*")):
        manifest = folder / MANIFEST
        if not manifest.is_file() or read_json(manifest).get("adapter_sha256") != adapter_sha256:
            continue  # of an earlier adapter of this run
        problems = problems_once(folder)
        if problems:
            raise HivetuneError(
                f"{folder} is damaged: {problems[0]}", hint=f"export it again: hivetune export {quoted(run)}"
            )
        proof = read_document(folder / PROOF) if (folder / PROOF).is_file() else {}  # an export without one is taken
        if proof.get("manifest_sha256") == sha256_file(manifest) and not proof["holds"]:
            raise HivetuneError(
                f"{folder} differs from the trained model: {proof['problems'][0]}",
                hint=f"delete the folder, or export it again: see {folder / PROOF}",
            )
        for path in (path for path in folder.rglob("*") if path.is_file()):
            files[str(Path(EXPORTED) / folder.name / path.relative_to(folder))] = path
    return files


def _copy(files: Mapping[str, Path], target: Path, manifest: dict[str, Any]) -> None:
    """Make `target` of `files`: complete or absent. What is there already is replaced last."""
    work, old = (target.with_name(f".{target.name}{kind}.tmp") for kind in ("", ".old"))
    for leftover in (work, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        for name, path in files.items():
            make_folder((work / name).parent)
            shutil.copyfile(path, work / name)
            sync(work / name)
        if sha256_file(work / ADAPTER) != manifest["adapter_sha256"]:
            raise HivetuneError(f"{files[ADAPTER]} changed while it was registered", hint="register it again")
        write_manifest(work, manifest)
        for path in work.rglob("*"):
            if path.is_file():
                path.chmod(0o400)
        if target.exists():
            target.rename(old)
        work.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


# Artefacts that nothing names.


def who() -> str:
    """Return the user's name, for the history of aliases."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return "unknown"


def explain_release(database: sqlite3.Connection, reference: str) -> dict[str, Any]:
    """Return the origin and the evidence of a release, which `hivetune releases NAME@VERSION` tells. Raises UsageError,
    HivetuneError."""
    release = find(database, reference)
    stored = ("created", "run", "model", "model_sha256", "adapter_sha256")
    document: dict[str, Any] = {
        "release": release.label,
        "aliases": list(release.aliases),
        **{key: getattr(release, key) for key in stored},
        "withdrawn": release.withdrawn or None,
        "pruned": release.pruned,
        "forgotten_rows": forgotten_rows(database, release.snapshot),
        "proof": dict(release.proof),
        "history": [
            {key: getattr(move, key) for key in ("action", "time", "by", "reason", "forced")}
            for move in moves_of(database, release)
        ],
    }
    if release.pruned:
        return document
    release.check()
    manifest = read_json(release.folder / MANIFEST)
    return document | {
        "folder": str(release.folder),
        "exports": exports_in(release.folder),
        **{key: manifest[key] for key in ("verdict", "judgement", "data", "settings", "machine", "hivetune")},
    }


def unused(database: sqlite3.Connection) -> list[Release]:
    """Return the releases that no alias names and whose artefacts are there."""
    return [release for release in releases(database) if not release.pruned and not release.aliases]


def prune(database: sqlite3.Connection, release: Release) -> int:
    """Delete the artefacts of an unused release; its row and history stay. Returns the bytes freed.

    Raises UsageError when it has come into use.
    """

    # The row is changed first: a kill leaves files without a release, never a release without files.
    def refuse_used() -> None:
        if find(database, release.label).aliases:
            raise UsageError(f"{release.label} is in use", hint="see its aliases: hivetune releases")

    def note() -> None:
        with transaction(database):
            refuse_used()
            of_release = (release.name, release.version)
            database.execute("UPDATE releases SET pruned = 1 WHERE name = ? AND version = ?", of_release)

    def free() -> int:
        refuse_used()
        size_bytes = size_of(release.folder)
        shutil.rmtree(release.folder, ignore_errors=True)
        return size_bytes

    return note_and_free(note, free)

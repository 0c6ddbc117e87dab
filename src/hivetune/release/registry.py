"""Releases in `hive.db`: the registered versions, and the log of every promotion and withdrawal.

A release is NAME@VERSION. Its aliases follow from the log: `champion` is the version that NAME means and that should be
served; `candidate` is the newest version, until it is promoted or withdrawn; `previous` is the version that a rollback
returns to, the newest earlier champion that was not withdrawn.

The folder below `releases/NAME/VERSION/` is copied from a run, hashed, read-only and never changed again, so the run
can be deleted. A row of the table, not a folder, makes a release.

    adapter_config.json, adapter_model.safetensors   the adapter as trained
    exports/KIND/                                    the exports of that adapter that were there and whole
    config.resolved.yaml, run.json, eval.json
    manifest.json                                    name, size and SHA-256 of each file; written last
"""

import getpass
import json
import re
import shutil
import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hivetune.base.database import record_then_delete, transaction
from hivetune.base.disk import (
    MANIFEST,
    home,
    lock,
    path_to_store,
    problems_since_last_read,
    read_json,
    sha256_file,
    stored_path,
    sync,
    write_manifest,
)
from hivetune.base.documents import read_document
from hivetune.base.paths import quoted
from hivetune.base.private import make_folder
from hivetune.errors import HivetuneError, NotDeployed, UsageError
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG, CONFIG, EVALUATION, EXPORTS, PROOF, RECORD

EXPORTED = "exports"
ADAPTER_EXPORT = "gguf-adapter"  # the kind of export that is served
REQUIRED = (ADAPTER_CONFIG, ADAPTER, CONFIG, RECORD)
RELEASE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
MAX_NAME_LENGTH = 64
RESERVED = ("base",)  # what a request names to get the model without an adapter
# returned: it is the champion again, since the one after it was withdrawn. retired: nothing is served under its name.
Action = Literal["registered", "promoted", "returned", "withdrawn", "retired"]
CROWNED = ("promoted", "returned")
_COLUMNS = "name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict, proof, created, pruned"


@dataclass(frozen=True)
class Move:
    """One line of the log: a promotion, withdrawal or retirement of one version of a name."""

    version: int
    action: Action
    time: float
    by: str
    reason: str
    forced: bool


@dataclass(frozen=True)
class Release:
    """One row of `releases`. `verdict` is the gate's, None if it was not judged; hashes are SHA-256.

    pruned: its files were deleted on purpose. From the log: `withdrawn`, the reason of its withdrawal, else empty; its
    `aliases`; its own `moves`, oldest first.
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
    pruned: bool = False
    withdrawn: str = ""
    aliases: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def folder(self) -> Path:
        return home() / "releases" / self.name / str(self.version)

    @property
    def damage(self) -> str:
        """Return the missing or changed files, in words; "" if there are none."""
        problems = problems_since_last_read(self.folder)
        if not problems and read_json(self.folder / MANIFEST).get("adapter_sha256") != self.adapter_sha256:
            return "its adapter is not the registered one"
        return problems[0] if problems else ""

    def check(self) -> None:
        """Raise HivetuneError if a file of the release is missing or changed, UsageError if it was pruned."""
        hint = f"register its run again: hivetune register {quoted(self.run)} --as {self.name}"
        if self.pruned:
            raise UsageError(f"the files of {self.label} were deleted by hivetune rm --unused", hint=hint)
        if damage := self.damage:
            if "champion" in self.aliases:  # or a healthy champion is rolled back
                hint += f"; or serve the release before: hivetune rollback {self.name}"
            raise HivetuneError(f"{self.label} is damaged: {self.folder}: {damage}", hint=hint)


# What is registered.


def releases(database: sqlite3.Connection, name: str | None = None) -> list[Release]:
    """Return all releases, or those of one name, the oldest version first."""
    logs, found = _logs(database, name), defaultdict[str, list[Release]](list)
    for of, version, run, *known, proof, created, pruned in database.execute(
        f"SELECT {_COLUMNS} FROM releases WHERE ?1 IS NULL OR name = ?1 ORDER BY name, version", (name,)
    ):
        moves = tuple(move for move in logs[of] if move.version == version)
        withdrawn = moves[-1].reason if moves and moves[-1].action == "withdrawn" else ""
        row = [of, version, str(stored_path(run)), *known, json.loads(proof), created, bool(pruned), withdrawn]
        found[of].append(replace(Release(*row), moves=moves))
    aliased = []
    for of, group in found.items():
        named = _aliases(logs[of], {each.version for each in group if not each.pruned and not each.withdrawn})
        for each in group:
            own = sorted(alias for alias, version in named.items() if version == each.version)
            aliased.append(replace(each, aliases=tuple(own)))
    return aliased


def history(database: sqlite3.Connection, name: str) -> list[Move]:
    """Return the promotions and withdrawals of a release name, the oldest first."""
    return _logs(database, name)[name]


def _logs(database: sqlite3.Connection, name: str | None) -> Mapping[str, list[Move]]:
    logs = defaultdict[str, list[Move]](list)
    query = "SELECT name, version, action, time, by, reason, forced FROM moves WHERE ?1 IS NULL OR name = ?1"
    for of, *move, forced in database.execute(f"{query} ORDER BY number", (name,)):
        logs[of].append(Move(*[*move, bool(forced)]))
    return logs


def _aliases(moves: Sequence[Move], usable: set[int]) -> dict[str, int | None]:
    """Return alias -> version after `moves`, None for an alias without one. `usable`: versions that were neither
    withdrawn nor pruned.
    """
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
    return {"champion": champion, "candidate": candidate, "previous": previous}


def find(database: sqlite3.Connection, reference: str) -> Release:
    """Return the release of NAME, NAME@VERSION or NAME@ALIAS. Raises UsageError that names the existing ones."""
    name, _, which = reference.partition("@")
    present = releases(database, name)
    for release in present:
        if (which or "champion") in (str(release.version), *release.aliases):
            return release
    if not present:
        raise UsageError(f"no release is called {name!r}", hint="see them: hivetune releases")
    existing = ", ".join(" ".join((each.label, *(f"({alias})" for alias in each.aliases))) for each in present)
    if not which:
        hint = f"there is {existing}; promote one: hivetune promote {name}@VERSION"
        raise UsageError(f"{name} has no champion yet", hint=hint)
    hint = f"there is {existing}; use a version, champion, candidate or previous"
    raise UsageError(f"{reference}: no such release", hint=hint)


def champion_of(database: sqlite3.Connection, name: str) -> Release | None:
    """Return the champion of a name, or None."""
    return _named(database, name, "champion")


def rollback_target(database: sqlite3.Connection, name: str) -> Release | None:
    """Return the release that a rollback of `name` would make champion, or None."""
    return _named(database, name, "previous")


def _named(database: sqlite3.Connection, name: str, alias: str) -> Release | None:
    return next((release for release in releases(database, name) if alias in release.aliases), None)


def champion_versions(database: sqlite3.Connection) -> dict[str, int]:
    """Return name -> version of its champion, for each name that has one."""
    return {release.name: release.version for release in releases(database) if "champion" in release.aliases}


def forgotten_rows(database: sqlite3.Connection, snapshot: str, since: float = 0.0) -> int:
    """Return a lower bound of the number of rows of a snapshot that were forgotten after it was made, and after `since`
    (in seconds since 1970)."""
    query = "SELECT coalesce(sum(rows), 0) FROM tainted WHERE snapshot = ? AND time > ?"
    return int(database.execute(query, (snapshot, since)).fetchone()[0])


def snapshot_folder(database: sqlite3.Connection, snapshot: str) -> Path | None:
    """Return the folder of the snapshot with this hash, or None if it is unknown or deleted."""
    row = database.execute("SELECT path FROM snapshots WHERE hash = ?", (snapshot,)).fetchone()
    folder = stored_path(row[0]) if row is not None else None
    return folder if folder is not None and folder.is_dir() else None


def gguf_adapter(release: Release) -> Path:
    """Return the release's adapter as a GGUF file. Raises UsageError if it has none, with the reason if known."""
    found = sorted((release.folder / EXPORTED / ADAPTER_EXPORT).glob("*.gguf"))
    if found:
        return found[0]
    unserved = release.proof.get("unserved")
    raise UsageError(
        f"{release.label} has no GGUF adapter{f': {unserved}' if unserved else ''}",
        hint=f"register its run again: hivetune register {quoted(release.run)} --as {release.name}",
    )


def explain_release(database: sqlite3.Connection, reference: str) -> dict[str, Any]:
    """Return origin and evidence of a release, as `releases NAME@VERSION` shows them. Raises UsageError,
    HivetuneError."""
    release = find(database, reference)
    stored = ("created", "run", "model", "model_sha256", "adapter_sha256", "pruned")
    document: dict[str, Any] = {
        "release": release.label,
        "aliases": list(release.aliases),
        **{key: getattr(release, key) for key in stored},
        "withdrawn": release.withdrawn or None,
        "forgotten_rows": forgotten_rows(database, release.snapshot),
        "proof": dict(release.proof),
        "history": [{key: value for key, value in asdict(move).items() if key != "version"} for move in release.moves],
    }
    if release.pruned:
        return document
    release.check()
    manifest = read_json(release.folder / MANIFEST)
    files = {kind.name: sorted(kind.glob("*.gguf")) or [kind] for kind in (release.folder / EXPORTED).glob("*")}
    return document | {
        "folder": str(release.folder),
        "exports": {kind: [str(path.relative_to(release.folder)) for path in files[kind]] for kind in sorted(files)},
        **{key: manifest[key] for key in ("verdict", "judgement", "data", "settings", "machine", "hivetune")},
    }


# What becomes of a release. Each act reads, decides and writes in one transaction: of two at the same time the second
# sees what the first did, and a registry that is killed, copied or restored is in an old or a new state, never in a
# third.


def promote(database: sqlite3.Connection, reference: str, *, by: str, reason: str = "", force: bool = False) -> Release:
    """Make a release the champion of its name, which should be served. Promoting the champion changes nothing.

    Raises NotDeployed for a release that did not pass the gate or was rolled back, unless `force` comes with a
    `reason`; UsageError, HivetuneError for damaged files.
    """
    with transaction(database):
        release = find(database, reference)
        if "champion" in release.aliases:
            return release
        if force and not reason:
            raise UsageError("--force needs --reason", hint="give the reason; the registry keeps it")
        if release.withdrawn:
            refusal = f"it was rolled back: {release.withdrawn}"
        elif release.verdict is None:
            refusal = "it was never judged: hivetune eval RUN, then register it again"
        else:
            refusal = "" if release.verdict == "deploy" else f"the gate said {release.verdict}"
        if refusal and not force:
            raise NotDeployed(f"{release.label}: {refusal}", hint="to promote it all the same: --force --reason WORDS")
        release.check()
        _log(database, release, "promoted", by=by, reason=reason, forced=bool(refusal))
        return find(database, release.label)


def rollback(database: sqlite3.Connection, reference: str, *, by: str, reason: str) -> Release:
    """Withdraw a champion, whose predecessor returns, or a candidate; return the withdrawn release.

    A withdrawn release is not served and can't be promoted again without force. A caller who objects to one release
    names it, so that two objections never roll back two. Raises UsageError if it is neither champion nor candidate any
    more, and for a champion without a predecessor.
    """
    reason = reason or "rolled back"
    with transaction(database):
        release = find(database, reference)
        if not {"champion", "candidate"} & set(release.aliases):
            hint = "see the champion: hivetune releases"
            raise UsageError(f"{release.label} is no longer the champion or the candidate", hint=hint)
        earlier = rollback_target(database, release.name) if "champion" in release.aliases else None
        if "champion" in release.aliases and earlier is None:
            raise UsageError(
                f"{release.label} has no previous release to return to",
                hint=f"promote another version: hivetune promote {release.name}@VERSION; "
                f"or take it out of service: hivetune releases --retire {release.name}",
            )
        _log(database, release, "withdrawn", by=by, reason=reason)
        if earlier is not None:
            earlier.check()
            _log(database, earlier, "returned", by=by, reason=f"{release.label} withdrawn: {reason}")
        return find(database, release.label)


def retire(database: sqlite3.Connection, name: str, *, by: str, reason: str) -> Release | None:
    """Take `name` out of service; return its champion, or None if it had none. The champion becomes `previous`, so it
    is kept and can be promoted again."""
    with transaction(database):
        champion = champion_of(database, name)
        if champion is None:
            return None
        _log(database, champion, "retired", by=by, reason=reason)
        return find(database, champion.label)


def _log(
    database: sqlite3.Connection, release: Release, action: Action, *, by: str, reason: str = "", forced: bool = False
) -> None:
    """Append a move to the log, inside the caller's transaction."""
    database.execute(
        "INSERT INTO moves (name, version, action, time, by, reason, forced) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (release.name, release.version, action, time.time(), by, reason, forced),
    )


def prune(database: sqlite3.Connection, release: Release) -> None:
    """Delete the files of an unused release; its row in the registry is kept. Raises UsageError if it is in use now."""

    # The row is changed first: a kill leaves files without a release, never a release without files.
    def note() -> None:
        with transaction(database):
            refuse_used()
            of_release = (release.name, release.version)
            database.execute("UPDATE releases SET pruned = 1 WHERE name = ? AND version = ?", of_release)

    def refuse_used() -> None:
        if find(database, release.label).aliases:
            raise UsageError(f"{release.label} is in use", hint="see its aliases: hivetune releases")

    refuse_used()  # on a full disk, where nothing can be promoted either, the space is freed before the note
    record_then_delete(note, lambda: shutil.rmtree(release.folder, ignore_errors=True))


def who() -> str:
    """Return the user's name, for the history of aliases."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return "unknown"


# Registration: the files of a run become those of a release.


def check_release_name(name: str) -> str:
    """Return `name` if it is a valid release name, else raise UsageError."""
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

    `facts` has model, model_sha256, adapter_sha256, snapshot, verdict and proof, and other entries to keep in the
    manifest. An adapter that is already registered under this name keeps its version; a later verdict or export is
    added to it. Raises UsageError, Busy, OSError for the disk, HivetuneError for a file of the run that is missing or
    damaged.
    """
    check_release_name(name)
    with lock(home() / "releases", hint="it registers a release: wait until it has ended"):  # or two copy into one
        files, earlier = _files_of(run, facts["adapter_sha256"]), releases(database, name)
        of_adapter = (facts["adapter_sha256"], facts["model_sha256"])
        twin = next((r for r in earlier if (r.adapter_sha256, r.model_sha256) == of_adapter and not r.pruned), None)
        version = max((r.version for r in earlier), default=0) + 1 if twin is None else twin.version
        target = home() / "releases" / name / str(version)
        # A judgement or an export may be newer than the registration.
        if twin is not None and not twin.damage and all((target / file).is_file() for file in files):
            kept = read_json(target / MANIFEST)
            # Killed after its folder was replaced, a registration left the former row.
            is_recorded = (kept["verdict"], kept["proof"]) == (twin.verdict, twin.proof)
            if is_recorded and all(kept.get(key) == facts.get(key) for key in ("verdict", "judgement")):
                return twin, False
        _copy(files, target, {"kind": "release", "name": name, "version": version, **facts})
        known = [facts[key] for key in ("model", "model_sha256", "adapter_sha256", "snapshot", "verdict")]
        row = (name, version, path_to_store(run), *known, json.dumps(facts["proof"]), time.time(), False)
        with transaction(database):
            database.execute(
                f"INSERT INTO releases ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (name, version) DO UPDATE SET verdict = excluded.verdict, proof = excluded.proof",
                row,
            )
            release = find(database, f"{name}@{version}")
            if twin is None:
                _log(database, release, "registered", by=by)
            return find(database, release.label), twin is None


def _files_of(run: Path, adapter_sha256: str) -> dict[str, Path]:
    """Return name in the release -> file, for each file of a run that a release keeps."""
    missing = [name for name in REQUIRED if not (run / name).is_file()]
    if missing:
        raise HivetuneError(f"{run} has no {missing[0]}", hint=f"finish the training: hivetune train {quoted(run)}")
    files = {name: run / name for name in (*REQUIRED, EVALUATION) if (run / name).is_file()}
    for folder in sorted((run / EXPORTS).glob("[!.]*")):
        manifest = folder / MANIFEST
        if not manifest.is_file() or read_json(manifest).get("adapter_sha256") != adapter_sha256:
            continue  # of an earlier adapter of this run
        problems = problems_since_last_read(folder)
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
    """Copy `files` to the folder `target`, replacing an existing one: it is then complete, or absent after a
    failure.
    """
    work = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
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
        # A kill between these two leaves a release that is known as damaged; registered again it is whole.
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)

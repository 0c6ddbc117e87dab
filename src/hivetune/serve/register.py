"""The station after the verdict: a run becomes a release, with its verdict and all that `why` tells later."""

import getpass
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from hivetune import __version__
from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, read_json, sha256_file
from hivetune.base.journal import read_journal
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.evaluate import stored_verdict
from hivetune.release.export import export_run
from hivetune.release.prove import prove_export
from hivetune.release.registry import Release, exports_in, find, forgotten_rows, moves_of, register
from hivetune.run.folder import EVENTS, adapter_hash, require_adapter
from hivetune.run.status import refuse_older_adapter
from hivetune.serve.chat import most_prompt
from hivetune.serve.route import GREEDY
from hivetune.train.open import Run, load_run


def register_run(folder: Path, name: str, domain: Mapping[str, str] | None = None) -> tuple[Release, bool]:
    """Register the adapter of a run as the next version of `name`. Returns the release and whether it is new. `domain`:
    `of`, `by` and `value`, where it is for one agent or category of another name.

    Raises UsageError for a run without an adapter or an unusable name, DoesNotFit, Busy, HivetuneError for damage.
    """
    run = load_run(folder)
    require_adapter(folder)
    refuse_older_adapter(folder)
    # The settings that the release is judged with, which the gateway adds to a request without them. Evaluations are
    # greedy. `system`: the prompt of most rows, which the chat page sends.
    prompt = most_prompt(run.snapshot)
    generation = {**GREEDY, **({} if prompt is None else {"system": prompt})}
    proof = {**_prove(run), "generation": generation, **({} if domain is None else {"domain": dict(domain)})}
    with closing(open_database()) as database:
        return register(database, run.folder, name, _manifest(run, proof), by=who())


def who() -> str:
    """Return the user's name, for the history of aliases."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return "unknown"


def explain_release(database: sqlite3.Connection, reference: str) -> dict[str, Any]:
    """Return the origin and the evidence of a release, for `why NAME@VERSION`. Raises UsageError, HivetuneError."""
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


def _prove(run: Run) -> dict[str, Any]:
    """Prove the adapter's GGUF file. `unserved` says why this model or this machine can't serve it.

    Raises HivetuneError for a file that is not what was trained.
    """
    try:
        return {"export": prove_export(run.folder, export_run(run.folder, "gguf-adapter"))}
    except (UsageError, MachineNotFit) as error:
        return {"unserved": error.message}


def _manifest(run: Run, proof: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the release's manifest. It needs neither the run folder nor the snapshot afterwards."""
    record, manifest = run.record, run.snapshot.manifest
    verdict = stored_verdict(run)
    started = [entry for entry in read_journal(run.folder / EVENTS) if entry["event"] == "supervisor_started"]
    return {
        "model": run.config.model,
        "model_sha256": sha256_file(run.model / MANIFEST),
        "adapter_sha256": adapter_hash(run.folder),
        "snapshot": run.snapshot.hash,
        "verdict": None if verdict is None else verdict["verdict"],
        "judgement": verdict,
        "proof": dict(proof),
        "data": {
            "snapshot": run.snapshot.hash,
            "path": str(run.snapshot.folder),
            "rows": manifest["accounting"],
            **{part: record["result"]["rows"][part] for part in ("trained", "held_out", "not_reached")},
        },
        "settings": record["identity"]["settings"],
        "machine": {key: started[-1].get(key) for key in ("fingerprint", "versions")} if started else None,
        "hivetune": __version__,
    }

"""`hivetune register`, `registry`, `why`, `promote`, `rollback`, `retire`: what is kept, what is champion, and why."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.cli.arguments import ReleaseArgument, RunArgument
from hivetune.cli.judge import NEXT
from hivetune.cli.output import emit, say, show, table
from hivetune.errors import HivetuneError
from hivetune.judge.measure.frozen import freeze_wins
from hivetune.release import registry
from hivetune.release.registry import Release, forgotten_rows
from hivetune.routing.steps import retire_release
from hivetune.run.find import find_run
from hivetune.serve.register import explain_release, register_run, who

ReasonOption = Annotated[str, typer.Option("--reason", help="Why, in words; kept in the history.")]


def register(
    run: RunArgument,
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="Name of the release: a-z, 0-9 and '-'.")],
) -> None:
    """Keep a run's adapter, exports, verdict and settings as the next version of NAME. It becomes the candidate."""
    release, new = register_run(find_run(run), name)
    with _database() as database:
        document = _document(database, release)
        judgement = explain_release(database, release.label).get("judgement")
    show(f"{release.label}: {'registered' if new else 'registered already'}, {release.verdict or 'not judged'}")
    if release.verdict == "deploy":
        show(f"next: hivetune promote {release.label}")
    elif judgement is None:
        show(f"next: hivetune eval {run}")
    else:
        for reason in judgement["reasons"][: judgement.get("decisive")]:
            show(f"  {reason}")
        show(f"next: {NEXT[judgement['verdict']]}")
    emit({**document, "new": new})


def show_registry() -> None:
    """All releases with their aliases and verdicts."""
    with _database() as database:
        documents = [_document(database, release) for release in registry.releases(database)]
    if not documents:
        say("nothing is registered yet; hivetune register RUN --as NAME")
    else:
        columns = ("release", "aliases", "verdict", "model", "created", "note")
        table("", columns, [_line(document) for document in documents])
    emit({"releases": documents})


def why(release: ReleaseArgument) -> None:
    """Where a release comes from and what speaks for it: verdict, data, settings, machine, history."""
    with _database() as database:
        document = explain_release(database, release)
    show(f"{document['release']}: {', '.join(document['aliases']) or 'no alias'}")
    show(f"  adapter {document['adapter_sha256'][:16]} of {document['model']}, run {document['run']}")
    if document["withdrawn"]:
        show(f"  rolled back: {document['withdrawn']}")
    if document["forgotten_rows"]:
        show(f"  holds at least {document['forgotten_rows']} rows that were forgotten since; train again without them")
    if not document["pruned"]:
        _show_evidence(document)
    for move in document["history"]:
        forced = ", forced" if move["forced"] else ""
        show(f"  {_time(move['time'])} {move['alias']} by {move['by']}{forced}: {move['reason'] or 'no reason given'}")
    emit(document)


def promote(
    release: ReleaseArgument,
    reason: ReasonOption = "",
    force: Annotated[bool, typer.Option("--force", help="Also what the gate refused; needs --reason.")] = False,
) -> None:
    """Make a release the champion of its name: what NAME means and what is served. The old one becomes previous."""
    with _database() as database:
        promoted = registry.promote(database, release, by=who(), reason=reason, force=force)
        document = _document(database, promoted)
    show(f"{promoted.label} is the champion")  # said before what may still fail
    frozen = freeze_wins(promoted)
    if frozen:
        show(f"{frozen} of its right answers are frozen questions now: hivetune frozen {promoted.name}")
    emit({**document, "frozen": frozen})


def rollback(name: Annotated[str, typer.Argument(metavar="NAME")], reason: ReasonOption = "") -> None:
    """Return to the previous champion; the present one is withdrawn and not promoted again by itself."""
    with _database() as database:
        champion, withdrawn = registry.rollback(database, name, by=who(), reason=reason)
        document = _document(database, champion)
    show(f"{champion.label} is the champion again; {withdrawn.label} is withdrawn")
    emit({**document, "rolled_back": withdrawn.label})


def retire(name: Annotated[str, typer.Argument(metavar="NAME")], reason: ReasonOption = "") -> None:
    """Take the champion of NAME out of service. Instead of an expert its shared adapter answers."""
    with _database() as database:
        retired = retire_release(database, name, by=who(), reason=reason or "taken out of service by hand")
        document = _document(database, retired)
    show(f"{retired.label} is out of service; bring it back: hivetune promote {retired.label}")
    emit(document)


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    database = open_database()
    try:
        yield database
    finally:
        database.close()


def _document(database: sqlite3.Connection, release: Release) -> dict[str, Any]:
    return {
        "release": release.label,
        "name": release.name,
        "version": release.version,
        "aliases": list(release.aliases),
        "verdict": release.verdict,
        "model": release.model,
        "adapter_sha256": release.adapter_sha256,
        "folder": str(release.folder),
        "created": release.created,
        "withdrawn": release.withdrawn or None,
        "pruned": release.pruned,
        "damaged": _damage(release),
        "forgotten_rows": forgotten_rows(database, release.snapshot),
    }


def _damage(release: Release) -> str | None:
    """What is wrong with the files of a release that an alias names."""
    if release.pruned or not release.aliases:
        return None
    try:
        release.check()
    except HivetuneError as error:
        return error.message
    return None


def _line(document: dict[str, Any]) -> tuple[object, ...]:
    notes = [
        "rolled back" if document["withdrawn"] else "",
        "pruned" if document["pruned"] else "",
        "damaged" if document["damaged"] else "",
        f"{document['forgotten_rows']} forgotten rows" if document["forgotten_rows"] else "",
    ]
    return (
        document["release"],
        ", ".join(document["aliases"]) or "-",
        document["verdict"] or "not judged",
        document["model"],
        _time(document["created"]),
        ", ".join(note for note in notes if note) or "-",
    )


def _show_evidence(document: dict[str, Any]) -> None:
    data = document["data"]
    left = f", {data['not_reached']} not reached" if data.get("not_reached") else ""  # not in older releases
    show(f"  rows: {data['trained']} trained, {data['held_out']} held out{left}; snapshot {data['path']}")
    show(f"  verdict: {document['verdict'] or 'never judged'}")
    for reason in (document["judgement"] or {}).get("reasons", ()):
        show(f"    {reason}")
    for kind, paths in document["exports"].items():
        show(f"  export {kind}: {', '.join(paths)}")


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

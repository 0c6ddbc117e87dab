"""The commands on releases: `export`, `register`, `releases`, `promote`, `rollback`."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.base.paths import quoted
from hivetune.cli.arguments import ReleaseArgument, RunArgument, complete_release
from hivetune.cli.output import Columns, Table, answer, emit, moment, parts, progress, say, show, size
from hivetune.cli.verdict import next_step
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.frozen import freeze_wins
from hivetune.llama.backend import find_engine
from hivetune.release import registry
from hivetune.release.export import DEFAULT_QUANT, Exported, export_run
from hivetune.release.gguf import QUANTS
from hivetune.release.prove import describe_proof, export_merged, prove_export
from hivetune.release.registry import Release, find, forgotten_rows
from hivetune.run.status import find_run
from hivetune.serve.register import explain_release, register_run, who


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(help="Format: adapter, merged, gguf or gguf-adapter.")] = "gguf",
    quant: Annotated[
        str | None, typer.Option(help=f"Quantization of a GGUF file: {', '.join(QUANTS)}; default: {DEFAULT_QUANT}.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Check that the exported file computes what was trained."),
    ] = True,
) -> None:
    """Write a trained run to RUN/export: PEFT adapter, merged model, GGUF, GGUF adapter or Ollama model."""
    folder = find_run(run)
    if quant is not None and to != "gguf":
        say(f"--quant {quant} is ignored: it applies to --to gguf")
    proof: dict[str, Any] | None = None
    with progress(f"exporting {to}", "tensors") as report:
        if to == "merged" and check:
            exported, proof = export_merged(folder, report)
        else:
            exported = export_run(folder, to, quant=quant or DEFAULT_QUANT, progress=report)
    say(f"{'written' if exported.made else 'exists already'}: {exported.path} ({size(exported.size_bytes)})")
    if check and proof is None:
        proof = _proof(folder, exported)
    if proof:
        say(f"checked: {describe_proof(proof)}")
    path = quoted(exported.path)
    following = {
        "gguf": f"hivetune chat {path}",
        "gguf-adapter": f"llama-server --model BASE.gguf --lora {path}",
        "adapter": f"PeftModel.from_pretrained(base, {str(exported.path)!r})",
        "merged": f"vllm serve {path}",
    }
    show(f"next: {following[exported.to]}")
    emit({**parts(exported, "to", "path", "folder", "size_bytes", "made"), "proof": proof})


def _proof(run: Path, exported: Exported) -> dict[str, Any] | None:
    """Return the proof of an export, or None for a GGUF file if llama.cpp is not installed."""
    if exported.to not in ("adapter", "merged"):
        try:
            find_engine("auto")
        except MachineNotFit as error:
            say(f"not checked: {error.message}; {error.hint}")
            return None
    with progress("checking the export") as report:
        return prove_export(run, exported, report)


ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, kept in the history.")]


def register(
    run: RunArgument,
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="Name of the release, from a-z, 0-9 and '-'.")],
) -> None:
    """Add a run to the registry as the next version of NAME, with its adapter, exports, verdict and settings.

    The new release becomes the candidate; promote makes it the champion.
    """
    release, new = register_run(find_run(run), name)
    with closing(open_database()) as database:
        document = _document(database, release)
        judgement = explain_release(database, release.label).get("judgement")
    show(f"{release.label}: {'registered' if new else 'already registered'}, {release.verdict or 'not judged'}")
    if release.withdrawn:
        show(f"  rolled back: {release.withdrawn}")
    elif "champion" in release.aliases:
        show("  it is the champion")
    elif release.verdict == "deploy":
        show(f"next: hivetune promote {release.label}")
    elif judgement is None:
        show(f"next: hivetune eval {quoted(run)}")
    else:
        for reason in judgement["reasons"][: judgement.get("decisive")]:
            show(f"  {reason}")
        show(f"next: {next_step(judgement['verdict'], judgement.get('metrics', ()))}")
    emit({**document, "new": new})


def releases(
    release: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME@VERSION",
            help="Explain this release; default: list all.",
            autocompletion=complete_release,
        ),
    ] = None,
    retire: Annotated[
        str | None, typer.Option(metavar="NAME@VERSION", help="Take this champion out of service.")
    ] = None,
    reason: ReasonOption = "",
) -> None:
    """List releases with their aliases and verdicts, or explain where one comes from: run, data, verdict, history."""
    if retire is not None:
        if release is not None:
            raise UsageError("--retire takes the only release", hint=f"hivetune releases --retire {retire}")
        _retire(retire, reason)
    elif release is not None:
        _explain(release)
    else:
        _list()


def _list() -> None:
    with closing(open_database()) as database:
        documents = [_document(database, release) for release in registry.releases(database)]
    columns: Columns = {
        "release": "release",
        "aliases": lambda one: ", ".join(one["aliases"]) or "-",
        "verdict": lambda one: one["verdict"] or "not judged",
        "model": "model",
        "created": lambda one: moment(one["created"]),
        "note": _note,
    }
    nothing = "no releases yet; register one: hivetune register RUN --as NAME"
    answer({"releases": documents}, Table(columns, documents) if documents else nothing)


def _note(document: dict[str, Any]) -> str:
    notes = [
        note
        for note, key in (("rolled back", "withdrawn"), ("pruned", "pruned"), ("damaged", "damaged"))
        if document[key]
    ]
    notes += [f"{document['forgotten_rows']} forgotten rows"] if document["forgotten_rows"] else []
    return ", ".join(notes) or "-"


def _retire(label: str, reason: str) -> None:
    with closing(open_database()) as database:
        found = find(database, label)
        retired = None
        if "champion" in found.aliases:
            retired = registry.retire(database, found.name, by=who(), reason=reason or "taken out of service by hand")
        if retired is None:
            raise UsageError(f"{found.label} is not the champion", hint="see what is served: hivetune releases")
        document = _document(database, retired)
    show(f"{retired.label} is out of service; to bring it back: hivetune promote {retired.label}")
    emit(document)


def _explain(release: str) -> None:
    with closing(open_database()) as database:
        document = explain_release(database, release)
    lines = [
        f"{document['release']}: {', '.join(document['aliases']) or 'no alias'}",
        f"  adapter {document['adapter_sha256'][:16]} of {document['model']}, run {document['run']}",
    ]
    if document["withdrawn"]:
        lines.append(f"  rolled back: {document['withdrawn']}")
    if document["forgotten_rows"]:
        lines.append(f"  trained on {document['forgotten_rows']} or more rows that were forgotten since; train again")
    if not document["pruned"]:
        data = document["data"]
        unreached = f", {data['not_reached']} not reached" if data["not_reached"] else ""
        lines += [
            f"  rows: {data['trained']} trained, {data['held_out']} held out{unreached}; snapshot {data['path']}",
            f"  verdict: {document['verdict'] or 'never judged'}",
            *(f"    {reason}" for reason in (document["judgement"] or {}).get("reasons", ())),
            *(f"  export {kind}: {', '.join(paths)}" for kind, paths in document["exports"].items()),
        ]
    for move in document["history"]:
        by = f"{move['by']}{', forced' if move['forced'] else ''}"
        lines.append(f"  {moment(move['time'])} {move['alias']} by {by}: {move['reason'] or 'no reason given'}")
    answer(document, *lines)


def promote(
    release: ReleaseArgument,
    reason: ReasonOption = "",
    force: Annotated[bool, typer.Option("--force", help="Promote even if the gate refused; needs --reason.")] = False,
) -> None:
    """Make a release the champion of its name, which is served. The old champion becomes `previous`."""
    with closing(open_database()) as database:
        promoted = registry.promote(database, release, by=who(), reason=reason, force=force)
        document = _document(database, promoted)
        waiting = [each for each in registry.releases(database, promoted.name) if "candidate" in each.aliases]
    show(f"{promoted.label} is the champion")  # printed before the next step, which may fail
    if waiting and "@" not in release:  # a name alone means its champion
        say(f"nothing changed; to promote the candidate: hivetune promote {waiting[0].label}")
    frozen = freeze_wins(promoted)
    if frozen:
        show(f"{frozen} of its correct answers are now frozen questions, which every later release must answer too")
    emit({**document, "frozen": frozen})


def rollback(name: Annotated[str, typer.Argument(metavar="NAME")], reason: ReasonOption = "") -> None:
    """Return to the previous champion. The current one is withdrawn and not promoted again automatically."""
    with closing(open_database()) as database:
        champion, withdrawn = registry.rollback(database, name, by=who(), reason=reason)
        document = _document(database, champion)
    show(f"{champion.label} is the champion again; {withdrawn.label} is withdrawn")
    emit({**document, "rolled_back": withdrawn.label})


def _document(database: sqlite3.Connection, release: Release) -> dict[str, Any]:
    damaged = None
    if release.aliases and not release.pruned:
        try:
            release.check()
        except HivetuneError as error:
            damaged = error.message
    return {
        "release": release.label,
        **parts(release, "name", "version", "aliases", "verdict", "model", "adapter_sha256", "folder", "created"),
        "withdrawn": release.withdrawn or None,
        "pruned": release.pruned,
        "damaged": damaged,
        "forgotten_rows": forgotten_rows(database, release.snapshot),
    }

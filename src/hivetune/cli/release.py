"""The commands on releases: `export`, `register`, `releases`, `promote`, `rollback`."""

from collections.abc import Iterator
from contextlib import closing
from sqlite3 import Connection
from typing import Annotated, Any

from typer import Argument, Option

from hivetune.base.database import open_database
from hivetune.base.paths import quoted
from hivetune.cli.arguments import ReasonOption, ReleaseArgument, RunArgument
from hivetune.cli.output import Note, Table, answer, facts, moment, parts, progress, say, show, size
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.rows import freeze_wins
from hivetune.llama.backend import find_engine
from hivetune.release import registry
from hivetune.release.export import DEFAULT_QUANT, LOADED_BY, export_run
from hivetune.release.gguf import QUANTS
from hivetune.release.prove import describe_proof, prove_export
from hivetune.release.registry import Release, explain_release, forgotten_rows, who
from hivetune.run.status import find_run
from hivetune.walk import register_run

QUANT_HELP = f"Quantization of a GGUF file: {', '.join(QUANTS)}; default: {DEFAULT_QUANT}."
CHECK_HELP = "Check that the exported file computes what was trained."


def export(
    run: RunArgument,
    to: Annotated[str, Option(help="Format: adapter, merged, gguf or gguf-adapter.")] = "gguf",
    quant: Annotated[str | None, Option(help=QUANT_HELP)] = None,
    check: Annotated[bool, Option("--check/--no-check", help=CHECK_HELP)] = True,
) -> None:
    """Write a trained run to RUN/export: PEFT adapter, merged model, GGUF file (for Ollama too) or GGUF adapter."""
    folder = find_run(run)
    if quant is not None and to != "gguf":  # said, but no reason to refuse a script that exports all kinds
        say(f"--quant {quant} is ignored: it applies to --to gguf")
    proof: dict[str, Any] | None = None
    with progress(f"exporting {to}", "tensors") as report:
        exported = export_run(folder, to, quant=quant or DEFAULT_QUANT, progress=report)
    say(f"{'written' if exported.made else 'exists already'}: {exported.path} ({size(exported.size_bytes)})")
    if check:
        try:
            if exported.to in ("gguf", "gguf-adapter"):
                find_engine()  # asked first: a proof without it would fail after minutes
            with progress("checking the export") as report:
                proof = prove_export(folder, exported, report)
        except MachineNotFit as error:  # without llama.cpp the file is there all the same
            say(f"not checked: {error.message}; {error.hint}")
    answer(
        {**parts(exported, "to path folder size_bytes made"), "proof": proof},
        Note(f"checked: {describe_proof(proof)}" if proof else ""),
        f"next: {LOADED_BY[exported.to].format(path=quoted(exported.path))}",
    )


def register(
    run: RunArgument,
    name: Annotated[str, Option("--as", metavar="NAME", help="Name of the release, from a-z, 0-9 and '-'.")],
) -> None:
    """Add a run to the registry as the next version of NAME, with its adapter, exports, verdict and settings.

    The new release becomes the candidate; promote makes it the champion.
    """
    release, new = register_run(find_run(run), name)
    with closing(open_database()) as database:
        document = {**_document(database, release), "new": new}
        judgement = explain_release(database, release.label).get("judgement")
    said = f"{release.label}: {'' if new else 'already '}registered, {release.verdict or 'not judged'}"
    answer(document, said, *_after_register(release, run, judgement))


def _after_register(release: Release, run: str, judgement: dict[str, Any] | None) -> Iterator[str]:
    from hivetune.cli.judge import next_step  # only now: promotions need no evaluation

    if release.withdrawn:
        yield f"  rolled back: {release.withdrawn}"
    elif "champion" in release.aliases:
        yield "  it is the champion"
    elif release.verdict == "deploy":
        yield f"next: hivetune promote {release.label}"
    elif judgement is None:
        yield f"next: hivetune eval {quoted(run)}"
    else:
        yield from (f"  {reason}" for reason in judgement["reasons"][: judgement.get("decisive")])
        yield f"next: {next_step(judgement['verdict'], judgement.get('metrics', ()))}"


def releases(
    release: Annotated[
        str | None, Argument(metavar="NAME@VERSION", help="Release to explain; default: list all.")
    ] = None,
    retire: Annotated[str | None, Option(metavar="NAME@VERSION", help="Take this champion out of service.")] = None,
    reason: ReasonOption = "",
) -> None:
    """List releases with their aliases and verdicts, or explain one: its run, data, verdict and history."""
    if retire is not None and release is not None:
        raise UsageError(
            "--retire takes the release itself, so no other release can be given",
            hint=f"hivetune releases --retire {retire}",
        )
    with closing(open_database()) as database:
        if retire is not None:
            document = _retire(database, retire, reason)
            label = document["release"]
            answer(document, f"{label} is out of service; to bring it back: hivetune promote {label}")
        elif release is not None:
            document = explain_release(database, release)
            answer(document, *_lineage_text(document))
        else:
            documents = [_document(database, each) for each in registry.releases(database)]
            table = Table("release aliases verdict model created withdrawn pruned damaged forgotten_rows", documents)
            nothing = "no releases yet; register one: hivetune register RUN --as NAME"
            answer({"releases": documents}, table if documents else nothing)


def _retire(database: Connection, label: str, reason: str) -> dict[str, Any]:
    found, retired = registry.find(database, label), None
    if "champion" in found.aliases:
        retired = registry.retire(database, found.name, by=who(), reason=reason or "taken out of service by hand")
    if retired is None:
        raise UsageError(f"{found.label} is not the champion", hint="see what is served: hivetune releases")
    return _document(database, retired)


def _lineage_text(document: dict[str, Any]) -> Iterator[str]:
    """Yield where a release comes from; a pruned one has only its history."""
    yield facts(document, "release aliases model run adapter_sha256 verdict withdrawn forgotten_rows pruned")
    if not document["pruned"]:
        data = document["data"]
        rows = data["rows"] | {key: data[key] for key in ("trained", "held_out", "not_reached")}
        yield facts({"snapshot": data["path"], "rows": rows})
        judgement = document["judgement"] or {}
        yield from (f"  {reason}" for reason in judgement.get("reasons", ()))
        # Whoever judged by other thresholds is named: they are what a verdict rests on.
        for judged in (*judgement.get("earlier", ()), judgement) if judgement else ():
            asked = ", ".join(f"{key} {value:g}" for key, value in judged["gate"].items() if value is not None)
            yield f"  {moment(judged['judged_at'])} judged {judged['verdict']} by {judged['judged_by']} with {asked}"
        yield from (f"  export {kind}: {', '.join(paths)}" for kind, paths in document["exports"].items())
    for move in document["history"]:
        by = f"{move['by']}{', forced' if move['forced'] else ''}"
        yield f"  {moment(move['time'])} {move['action']} by {by}{': ' * bool(move['reason'])}{move['reason']}"


def promote(
    release: ReleaseArgument,
    reason: ReasonOption = "",
    force: Annotated[bool, Option("--force", help="Promote even if the gate refused; needs --reason.")] = False,
) -> None:
    """Make a release the champion of its name, which is served. The old champion becomes `previous`."""
    with closing(open_database()) as database:
        promoted = registry.promote(database, release, by=who(), reason=reason, force=force)
        document = _document(database, promoted)
        waiting = [each for each in registry.releases(database, promoted.name) if "candidate" in each.aliases]
    show(f"{promoted.label} is the champion")  # printed before the next step, which may fail
    if waiting and "@" not in release:  # a name alone means its champion
        say(f"nothing changed; to promote the candidate: hivetune promote {waiting[0].label}")
    frozen = freeze_wins(promoted)  # laws of later releases: what this one could, they have to
    kept = f"{frozen} of its correct answers are now frozen questions, which every later release must answer too"
    answer({**document, "frozen": frozen}, kept if frozen else "")


def rollback(
    name: Annotated[str, Argument(metavar="NAME", help="Name of the release.")], reason: ReasonOption = ""
) -> None:
    """Withdraw the champion and return to the previous one; NAME@candidate withdraws the candidate alone."""
    with closing(open_database()) as database:
        withdrawn = registry.rollback(database, name, by=who(), reason=reason)
        now = registry.champion_of(database, withdrawn.name)
        document = {**_document(database, now or withdrawn), "rolled_back": withdrawn.label}
    answer(document, f"{withdrawn.label} is withdrawn; the champion is {now.label if now else 'none'}")


def _document(database: Connection, release: Release) -> dict[str, Any]:
    """Return a release for a document. `damaged`: the reason why its files can't be served, None if they can."""
    damaged = None
    if release.aliases and not release.pruned:  # only these are served, and hashes of all would take seconds
        try:
            release.check()
        except HivetuneError as error:
            damaged = error.message
    return {
        "release": release.label,
        **parts(release, "name version aliases verdict model adapter_sha256 folder created pruned"),
        "withdrawn": release.withdrawn or None,
        "damaged": damaged,
        "forgotten_rows": forgotten_rows(database, release.snapshot),
    }

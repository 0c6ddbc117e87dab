"""`hivetune data check` and `hivetune data prepare`: what is wrong with the rows, and the snapshot made of the rest."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import file_to_write
from hivetune.base.paths import spelled
from hivetune.cli.arguments import ColumnsOption
from hivetune.cli.model import model_folder
from hivetune.cli.output import AFTER_ROWS, emit, progress, say, show, table
from hivetune.cli.suggestions import show_suggestion
from hivetune.config import RunConfig, load_config, override_config, parse_config
from hivetune.data.intake.files import find_sources
from hivetune.data.mapping import parse_columns
from hivetune.data.prepare.clean import duplicates_path, quarantine_path
from hivetune.data.prepare.prepare import check as check_rows
from hivetune.data.prepare.prepare import prepare as prepare_rows
from hivetune.data.prepare.prepare import read_report
from hivetune.data.prepare.report import duplicate_kinds, secrets_first
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import REPORT_PAGE
from hivetune.errors import DataRefused, UsageError

SHOWN_PROBLEMS = 10
SHOWN_PAIRS = 3
_MANY_ALIKE = 3  # rows with the same reason and hint
_SECRET = "redacted-secret"
NO_MODEL = "none"

Sources = Annotated[
    list[str] | None, typer.Argument(metavar="SRC", help="Files, folders, globs, '-' for standard input, 'store'.")
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Also check template, mask and tokens of this model.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="Take model and data settings from this YAML.")]
MaxLength = Annotated[int | None, typer.Option("--max-length", help="Tokens; longer rows: data.on_overlong.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting.")]


def check(
    sources: Sources = None,
    model: Model = None,
    config: Config = None,
    columns: ColumnsOption = None,
    max_length: MaxLength = None,
    overrides: Overrides = None,
    clean: Annotated[Path | None, typer.Option(help="Write the rows that passed, and the others beside them.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.")] = None,
) -> None:
    """What is wrong with the rows, and where. Exit code 3 when too many are rejected or none is usable."""
    settings = _settings(sources, model, config, columns, max_length, overrides)
    written = (clean, quarantine_path(clean), duplicates_path(clean), html) if clean is not None else (html,)
    for path in (path for path in written if path is not None):
        file_to_write(path, find_sources(settings.data.path))
    folder = _model_folder(settings.model) if settings.model != NO_MODEL else None
    with progress("checking", "rows", AFTER_ROWS) as report:
        found = check_rows(
            settings.data,
            model_folder=folder,
            max_length=settings.max_length,
            clean=clean,
            page=html,
            learn=settings.learn,
            progress=report,
        )
    show_report(found.document)
    if clean is not None:
        show(f"passed: {spelled(clean)}   rejected, to mend and feed again: {spelled(quarantine_path(clean))}")
        if found.document["duplicates"]:
            show(f"left out as duplicates, each with the row that stays: {spelled(duplicates_path(clean))}")
    if html is not None:
        show(f"report: {spelled(html)}")
    emit(found.document)  # the one document, also when the data is refused
    try:
        found.refuse(settings.data.max_rejected)
    except DataRefused as error:
        say(f"hivetune: {error}")
        raise typer.Exit(error.exit_code) from None


def prepare(
    sources: Sources = None,
    model: Model = None,
    config: Config = None,
    columns: ColumnsOption = None,
    max_length: MaxLength = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the snapshot; default: below the home.")] = None,
) -> None:
    """Rows into an immutable snapshot of tokens; the same rows and settings are prepared once."""
    settings = _settings(sources, model, config, columns, max_length, overrides)
    if settings.model == NO_MODEL:
        raise UsageError("which model's tokens?", hint="give --model M or --config CONFIG")
    with progress("preparing", "rows", AFTER_ROWS) as report:
        snapshot = prepare_rows(settings, _model_folder(settings.model), out, report)
    document = read_report(snapshot.folder)
    show_report(document)
    show(f"snapshot: {snapshot.folder}\nreport:   {snapshot.folder / REPORT_PAGE}")
    emit({**document, "snapshot": str(snapshot.folder), "hash": snapshot.hash})


def _settings(
    sources: list[str] | None,
    model: str | None,
    config: Path | None,
    columns: str | None,
    max_length: int | None,
    overrides: list[str] | None,
) -> RunConfig:
    """The config with what the command line says on top of it."""
    tree: dict[str, Any]
    if config is not None:
        tree = load_config(config).model_dump(mode="json")
    else:
        tree = {"model": NO_MODEL, "data": {"path": sources or []}}
    if sources:
        tree["data"]["path"] = sources
    if not tree["data"]["path"]:
        raise UsageError("no rows to read", hint="give files, folders, globs, '-' or 'store', or --config CONFIG")
    if model is not None:
        tree["model"] = model
    if max_length is not None:
        tree["max_length"] = max_length
    if columns is not None:
        tree["data"]["columns"] = parse_columns(columns)
    return override_config(parse_config(tree, "command line"), overrides or [])


def _model_folder(name: str) -> Path:
    """A folder with a tokenizer is enough to count tokens; anything else is prepared first."""
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").exists() and (folder / "tokenizer_config.json").exists():
        return folder
    return model_folder(name)


def show_report(document: dict[str, Any]) -> None:
    """The report for people: the sum first, then reasons, splits, lengths, the first problems."""
    counts = [("rows in", document["rows_in"], "")]
    for split, count in document["splits"].items():
        counts.append((split, count, "usable"))
    counts.append(("duplicates", document["duplicates"], duplicate_kinds(document)))
    for name, label in (("rejected", "rejected"), ("set_aside", "set aside")):
        for reason, count in document[name].items():
            counts.append((f"{label}: {reason}", count, REASONS[reason].meaning))
    table("", ("rows", "count", ""), [(n, f"{c:,}", why) for n, c, why in counts], numeric=("count",))
    _show_reading(document)
    for reason, count in document["changed"].items():
        show(f"changed: {count:,} {'row' if count == 1 else 'rows'}, {reason}: {REASONS[reason].meaning}")
    say_places(secrets_first(document["changes"]))
    near = [pair for pair in document["duplicate_examples"] if pair["kind"] == "near"]
    for pair in near[:SHOWN_PAIRS]:
        gone, stays = spelled(pair["source"]), spelled(pair["same_as"])
        show(f"nearly equal: {gone} is left out, {stays} stays ({pair['share']:.0%} in common)")
    _show_groups(document)
    if words := learned_words(document["learn"]):
        show(words)
    lengths = document["lengths"]
    show(
        f"length in {lengths['unit']}: median {lengths['median']:,}, 90 % up to {lengths['p90']:,}, "
        f"99 % up to {lengths['keeps_99_percent']:,}, longest {lengths['longest_seen']:,}"
    )
    if document["trained_tokens"] is not None:
        share = document["trained_tokens"] / max(1, document["tokens"])
        show(f"tokens: {document['tokens']:,}, trained {document['trained_tokens']:,} ({share:.0%})")
    if document["not_run"]:
        show(f"not checked without --model: {', '.join(document['not_run'])}")
    told = say_places(document["problems"])
    left = sum(document["rejected"].values()) + sum(document["set_aside"].values()) - told
    if left > 0:
        say(f"... and {left:,} more: --clean OUT writes each with its place, --html shows them")


def learned_words(learned: dict[str, Any]) -> str:
    """The report's `learn` in one line; empty where there are only good rows."""
    kinds = ("corrections", "pairs", "retries", "failures")
    parts = [f"{kind}: {learned[kind]:,}" for kind in kinds if learned[kind]]
    parts += [f"{count:,} {kind} not used: learn does not name them" for kind, count in learned["not_used"].items()]
    parts += [f"{count:,} worse answers left out: {reason}" for reason, count in learned["worse_left_out"].items()]
    if learned["no_lesson"]:
        parts.append(f"{learned['no_lesson']:,} failures by time-out, tool or network, which teach nothing")
    return f"to learn from beside good rows: {', '.join(parts)}" if parts else ""


def say_places(places: Sequence[Mapping[str, str]]) -> int:
    """The first places, each with its reason and hint; how many rows that was. Many with the same words take one line,
    a secret never: each has to be revoked."""
    alike = Counter((each["reason"], each["hint"]) for each in places)
    told: set[tuple[str, str]] = set()
    shown = rows = 0
    for each in places:
        words = (each["reason"], each["hint"])
        many = alike[words] > _MANY_ALIKE and each["reason"] != _SECRET
        if shown == SHOWN_PROBLEMS or words in told:
            continue
        if many:
            told.add(words)
        shown += 1
        rows += alike[words] if many else 1
        more = f" and {alike[words] - 1:,} more rows" if many else ""
        say(f"{spelled(each['source'])}{more}: {each['reason']}: {each['hint']}")
    return rows


def _show_reading(document: dict[str, Any]) -> None:
    """What the files were understood as; files that were understood alike in one line."""
    alike: dict[str, list[str]] = {}
    for name, kinds in document["understood"].items():
        for kind in kinds:
            alike.setdefault(_understood(kind), []).append(name)
    for said, names in alike.items():
        more = f" and {len(names) - 1:,} more files" if len(names) > 1 else ""
        show(f"{spelled(names[0])}{more}: {said}")
    for name, lines in document.get("unclear", {}).items():  # a snapshot that was made before has none
        show(f"{spelled(name)}: its layout has no name; it may be read as follows, once you say so:")
        for line in lines:
            show_suggestion(line)
    for name in document.get("no_header", ()):
        why = "its first line is a row, and its columns are called by their place or content"
        show(f"{spelled(name)} has no header: {why}")
    for name, encoding in document["encodings"].items():
        show(f"{spelled(name)} is {encoding.upper()}, and was read as such")
    for name in document.get("carriage_returns", ()):
        show(f"{spelled(name)}: its lines end with carriage returns alone, and were read so")


def _understood(kind: dict[str, Any]) -> str:
    """One line on how the rows of a file are read."""
    at = f", rows at {kind['rows_at']}" if kind["rows_at"] else ""
    shown = (("question", "question"), ("answer", "answer"), ("tools", "tools"), ("not read", "left_out"))
    parts = [(what, kind[key]) for what, key in shown]
    told = "; ".join(f"{what}: {', '.join(paths)}" for what, paths in parts if paths)
    return f"read as {kind['layout']}{at}; {told}"


def _show_groups(document: dict[str, Any]) -> None:
    """Synthetic rows; what could not be kept on one side, or not be held out, as it is too large a part of the rows."""
    synthetic, groups = document["synthetic"], document["groups"]
    if synthetic["rows"]:
        share = synthetic["rows"] / (synthetic["rows"] + synthetic["others"])
        show(f"synthetic: {synthetic['rows']:,} of the usable rows ({share:.0%}) were made by hivetune data synth")
    if groups["broken_up"]:
        show(
            f"splits: {groups['broken_up']:,} rows are of a session, user or question too large to be kept on one side"
        )
    if groups["too_large"]:
        show(
            f"splits: {groups['too_large']:,} rows are trained because they belong together and are more than is to be"
            f" held out"
        )

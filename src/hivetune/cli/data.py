"""The commands `check` and `forget`."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.base.disk import files_to_write
from hivetune.base.paths import expanded, spelled
from hivetune.cli.arguments import ColumnsOption, IgnoreOption, model_folder, parse_names, show_suggestion
from hivetune.cli.output import AFTER_ROWS, MODE, emit, parts, progress, say, show, table
from hivetune.config import RunConfig, load_config, override_config, parse_config
from hivetune.data.files.find import find_sources
from hivetune.data.forget import ForgetKind, Forgotten
from hivetune.data.forget import forget as run_forget
from hivetune.data.mapping import parse_columns
from hivetune.data.prepare.clean import beside
from hivetune.data.prepare.prepare import check as check_rows
from hivetune.data.prepare.report import duplicate_kinds, secrets_first
from hivetune.data.reasons import REASONS
from hivetune.errors import DataRefused, UsageError

SHOWN_PROBLEMS = 10
SHOWN_PAIRS = 3
_MANY_ALIKE = 3  # rows with the same reason and hint
_SECRET = "redacted-secret"
NO_MODEL = "none"


Sources = Annotated[
    list[str] | None, typer.Argument(metavar="SRC", help="Files, folders, globs, '-' for standard input, or 'store'.")
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Also check with this model's chat template and tokens.")
]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="Read model and data settings from this config.")]
MaxLength = Annotated[int | None, typer.Option("--max-length", help="Maximum tokens of a row.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting.")]


def check(
    sources: Sources = None,
    model: Model = None,
    config: Config = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    max_length: MaxLength = None,
    overrides: Overrides = None,
    clean: Annotated[
        Path | None, typer.Option(help="Write rows that passed to this file, and the others next to it.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as an HTML page.")] = None,
) -> None:
    """Report problems of rows with their places. Exits with 3 if too many are rejected or none is usable."""
    settings = _settings(sources, model, config, columns, ignore, max_length, overrides)
    written = (html,) if clean is None else (clean, beside(clean, "quarantine"), beside(clean, "duplicates"), html)
    files_to_write([path for path in written if path is not None], find_sources(settings.data.path))
    folder = _model_folder(settings.model) if settings.model != NO_MODEL else None
    with progress("checking", "rows", AFTER_ROWS) as report:
        checked = check_rows(
            settings.data,
            model_folder=folder,
            max_length=settings.max_length,
            clean=clean,
            page=html,
            learn=settings.learn,
            progress=report,
        )
    show_report(checked.document)
    if clean is not None:
        show(f"passed: {spelled(clean)}   rejected, to fix and read again: {spelled(beside(clean, 'quarantine'))}")
        if checked.document["duplicates"]:
            show(f"duplicates, each with the row that is kept: {spelled(beside(clean, 'duplicates'))}")
    if html is not None:
        show(f"report: {spelled(html)}")
    emit(checked.document)  # also when the data is refused
    try:
        checked.refuse(settings.data.max_rejected)
    except DataRefused as error:
        say(f"hivetune: {error}")
        raise typer.Exit(error.exit_code) from None


def _settings(
    sources: list[str] | None,
    model: str | None,
    config: Path | None,
    columns: str | None,
    ignore: str | None,
    max_length: int | None,
    overrides: list[str] | None,
) -> RunConfig:
    """Return the config with the options of the command line applied."""
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
    if ignore is not None:
        tree["data"]["ignore"] = parse_names(ignore)
    return override_config(parse_config(tree, "command line"), overrides or [])


def _model_folder(name: str) -> Path:
    """Return the folder of the model, prepared first unless it has a tokenizer, which is enough to count tokens."""
    folder = expanded(name)
    if (folder / "tokenizer.json").exists() and (folder / "tokenizer_config.json").exists():
        return folder
    return model_folder(name)


def show_report(document: dict[str, Any]) -> None:
    """Show the report: counts, reasons, splits, lengths and the first problems."""
    counts = [("rows in", document["rows_in"], "")]
    for split, count in document["splits"].items():
        counts.append((split, count, "usable"))
    counts.append(("duplicates", document["duplicates"], duplicate_kinds(document)))
    for name, label in (("rejected", "rejected"), ("set_aside", "set aside")):
        for reason, count in document[name].items():
            counts.append((f"{label}: {reason}", count, REASONS[reason].meaning))
    table("", ("rows", "count", ""), [(n, f"{c:,}", meaning) for n, c, meaning in counts])
    _show_reading(document)
    for reason, count in document["changed"].items():
        show(f"changed: {count:,} {'row' if count == 1 else 'rows'}, {reason}: {REASONS[reason].meaning}")
    print_problems(secrets_first(document["changes"]))
    for pair in [pair for pair in document["duplicate_examples"] if pair["kind"] == "near"][:SHOWN_PAIRS]:
        removed, stays = spelled(pair["source"]), spelled(pair["same_as"])
        show(f"near duplicate: {removed} is left out, {stays} is kept (Jaccard similarity {pair['share']:.0%})")
    _show_groups(document)
    _show_extremes(document)
    if line := learning_text(document["learn"]):
        show(line)
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
    shown = print_problems(document["problems"])
    unshown = sum(document["rejected"].values()) + sum(document["set_aside"].values()) - shown
    if unshown > 0:
        say(f"... and {unshown:,} more; list all: --clean OUT or --html PAGE")


def learning_text(learned: dict[str, Any]) -> str:
    """Return the report's `learn` as one line; empty if there are only good rows."""
    kinds = ("corrections", "pairs", "retries", "failures")
    lessons = [f"{kind}: {learned[kind]:,}" for kind in kinds if learned[kind]]
    lessons += [
        f"{count:,} {kind} not used, since learn.use does not name them" for kind, count in learned["not_used"].items()
    ]
    lessons += [f"{count:,} worse answers left out: {reason}" for reason, count in learned["worse_left_out"].items()]
    return f"lessons besides good rows: {', '.join(lessons)}" if lessons else ""


def print_problems(problems: Sequence[Mapping[str, str]]) -> int:
    """Print the first places with reason and hint, and return the number of their rows.

    Many places with the same words share a line, except secrets, each of which has to be revoked.
    """
    alike = Counter((problem["reason"], problem["hint"]) for problem in problems)
    repeated: set[tuple[str, str]] = set()
    shown = rows = 0
    for problem in problems:
        kind = (problem["reason"], problem["hint"])
        many = alike[kind] > _MANY_ALIKE and problem["reason"] != _SECRET
        if shown == SHOWN_PROBLEMS or kind in repeated:
            continue
        if many:
            repeated.add(kind)
        shown += 1
        rows += alike[kind] if many else 1
        more = f" and {alike[kind] - 1:,} more rows" if many else ""
        say(f"{spelled(problem['source'])}{more}: {problem['reason']}: {problem['hint']}")
    return rows


def _show_reading(document: dict[str, Any]) -> None:
    """Show the layout of the files; files of one layout share a line."""
    alike: dict[str, list[str]] = {}
    for name, kinds in document["understood"].items():
        for kind in kinds:
            alike.setdefault(_understood(kind), []).append(name)
    for reading, names in alike.items():
        more = f" and {len(names) - 1:,} more files" if len(names) > 1 else ""
        show(f"{spelled(names[0])}{more}: {reading}")
    for name, lines in document.get("unclear", {}).items():  # older snapshots have none
        show(f"{spelled(name)}: unknown layout; possible mappings, to be confirmed with --columns:")
        for line in lines:
            show_suggestion(line)
    for name, encoding in document["encodings"].items():
        show(f"{spelled(name)} was read as {encoding.upper()}")


def _understood(kind: dict[str, Any]) -> str:
    """Return how the rows of a file are read, and a line for each column that was not."""
    at = f", rows at {kind['rows_at']}" if kind["rows_at"] else ""
    lines = [f"read as {kind['layout']}{at}: {', '.join(kind['read'])}"]
    for column in kind["not_read"]:
        ignored = ", ignored" if column["ignored"] else ""
        values = f"{column['distinct']:,} different values" if column["distinct"] > 1 else "one value"
        hint = f"; {column['hint']}" if column["hint"] else ""
        lines.append(f"  not read{ignored}: {column['column']} ({values}, such as {column['example']!r}){hint}")
    return "\n".join(lines)


def _show_groups(document: dict[str, Any]) -> None:
    """Show synthetic rows, and groups too large to be held out or kept in one split."""
    synthetic, groups = document["synthetic"], document["groups"]
    if synthetic["rows"]:
        share = synthetic["rows"] / (synthetic["rows"] + synthetic["others"])
        show(f"synthetic: {synthetic['rows']:,} of the usable rows ({share:.0%}) were made by hivetune synth")
    if groups["broken_up"]:
        show(f"splits: {groups['broken_up']:,} rows belong to a session or question too large to be held out")
    if groups["too_large"]:
        show(f"splits: {groups['too_large']:,} rows are trained, since their group is too large to be held out")
    for missed in groups["missed"]:
        show(f"splits: {missed}: groups (a question, a session, near copies) are not divided")


def _show_extremes(document: dict[str, Any]) -> None:
    """Show the most frequent answers, and the shortest and longest rows."""
    answers, lengths = document["answers"], document["lengths"]
    if answers:
        most = ", ".join(f"{json.dumps(one['answer'][:40], ensure_ascii=False)} {one['rows']:,}" for one in answers)
        show(f"most frequent answers: {most}")
    for kind in ("shortest", "longest"):
        if lengths[kind]:
            places = ", ".join(f"{spelled(one['source'])} ({one['length']:,})" for one in lengths[kind])
            show(f"{kind} rows in {lengths['unit']}: {places}")
    if lengths["above_max_length"]:
        show(f"{lengths['above_max_length']:.1%} of the rows are longer than max_length")


def forget(
    user: Annotated[str | None, typer.Option(help="Delete all interactions of this user.")] = None,
    session: Annotated[str | None, typer.Option(help="Delete all interactions of this session.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Delete everything from this file, table (path#table) or stream.")
    ] = None,
    row: Annotated[str | None, typer.Option(help="Delete one interaction, by id or file:line, and its copies.")] = None,
) -> None:
    """Delete a user, session, source or row from the store, and list the snapshots, runs and releases that hold it.

    Later collections skip it. Its files, snapshots and runs are not changed: prepare and train again without it, then
    delete what is listed.
    """
    options: dict[ForgetKind, str | None] = {"user": user, "session": session, "source": source, "row": row}
    chosen = [(kind, value) for kind, value in options.items() if value]
    if len(chosen) != 1:
        named = "several things to forget are named" if chosen else "no row to forget is named"
        raise UsageError(named, hint="give one of --user, --session, --source, --row")
    with closing(open_database()) as database:
        forgotten = run_forget(database, *chosen[0])
    taints = forgotten.taints
    emit(
        {
            **parts(forgotten, "kind", "value", "interactions", "refused"),
            "snapshots": [{"hash": t.snapshot, **parts(t, "path", "rows", "runs", "releases")} for t in taints],
            "runs": sorted({run for taint in taints for run in taint.runs}),
            "releases": sorted({release for taint in taints for release in taint.releases}),
            **parts(forgotten, "past_wins", "unchecked"),
        }
    )
    if not MODE.json:
        _show(forgotten)


def _show(forgotten: Forgotten) -> None:
    say(f"{forgotten.kind} {forgotten.value}: {forgotten.interactions:,} interactions deleted, and skipped from now on")
    if forgotten.past_wins:
        say(f"{forgotten.past_wins} past wins made from them were deleted")
    if forgotten.taints:
        rows = [
            (t.path or t.snapshot, t.rows, "\n".join(t.runs) or "-", "\n".join(t.releases) or "-")
            for t in forgotten.taints
        ]
        table("Tainted", ("snapshot", "rows", "runs", "releases"), rows)
    else:
        say("no existing snapshot holds any of it")
    for path in forgotten.unchecked:
        say(f"{path}: the snapshot is missing, so its rows could not be checked")

"""The commands on rows: `collect`, `check`, `synth` and `forget`."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from typer import Argument, Option

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import files_to_write
from hivetune.base.paths import expanded, spelled
from hivetune.base.units import count
from hivetune.cli import output
from hivetune.cli.arguments import ColumnsOption, IgnoreOption, SetOption, as_overrides, model_folder
from hivetune.cli.output import Note, Table, answer, facts, parts, progress, say, value_text
from hivetune.config import load_config, parse_config
from hivetune.data.files.find import find_sources
from hivetune.data.forget import ForgetKind, set_aside
from hivetune.data.forget import forget as run_forget
from hivetune.data.intake.collect import Collected, parse_sources
from hivetune.data.intake.collect import collect as run_collect
from hivetune.data.intake.interactions import iter_refused
from hivetune.data.prepare.prepare import check as check_rows
from hivetune.data.prepare.report import duplicate_kinds
from hivetune.data.prepare.write import beside
from hivetune.data.reasons import REASONS
from hivetune.errors import DataRefused, Stopped, UsageError
from hivetune.process.stop import handle_stop_signals
from hivetune.release.registry import who

SHOWN_PLACES = 20  # a screen
SHOWN_REFUSED = 5  # the table `refused` of hive.db has all
NO_MODEL = "none"  # a config needs one, a check does not
COUNTS = "delivered stored duplicates refused forgotten reasons"


def collect(
    sources: Annotated[
        list[str],
        Argument(metavar="SRC", help="A JSONL file, folder or glob, an SQLite table or a Redis stream; see above."),
    ],
    follow: Annotated[bool, Option("--follow", "-f", help="Keep collecting until stopped.")] = False,
) -> None:
    """Copy interactions into the store, each exactly once, even if the command is killed or repeated.

    SRC is a JSON Lines file, a folder of them or a quoted glob (through rotation, .gz and .zst too);
    sqlite:PATH?table=T[&cursor=COLUMN]; redis://[:PASSWORD@]HOST:PORT/DB?stream=S; rediss:// for TLS;
    redis+cluster://HOST:PORT[,HOST:PORT]?stream=S for a Cluster
    """
    readers, started = parse_sources(sources), time.time()
    stop, heard = threading.Event(), []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        heard.append(number)
        stop.set()

    handle_stop_signals(on_signal)  # the batch in hand is committed before the end
    collected = run_collect(readers, follow=follow, stop=stop, tick=_progress_printer(follow))
    with closing(open_database()) as database:
        rows = database.execute("SELECT count(*) FROM interactions").fetchone()[0]
        found = iter_refused(database, since=started, limit=SHOWN_REFUSED)
        refused = [dict(zip(("source", "reason", "hint"), row, strict=True)) for row in found]
    total = parts(collected.total(), COUNTS)
    read = [
        {"source": reader.name, **parts(collected.tallies[reader.name], COUNTS), **parts(reader, "waiting notes")}
        for reader in collected.readers
    ]
    incomplete = [path for source in read for path in source["waiting"]]
    document = {"event": "done", "store": database_path(), "interactions": rows, **total, "sources": read}
    answer(
        {**document, "refused_rows": refused},
        Table("source delivered stored duplicates refused forgotten", read),
        Table("first_refused=source reason hint", [{**row, "source": spelled(row["source"])} for row in refused]),
        *(Note(f"{spelled(path)}: the last line is incomplete; it is read once it is finished") for path in incomplete),
        Note(f"{count(rows, 'interaction')} in {database_path()}"),
    )
    if heard:  # after the document: what was stored is told all the same
        raise Stopped("stopped; every acknowledged row is in the store", signal_number=heard[0])


def _progress_printer(follow: bool) -> Callable[[Collected], None]:
    """Return a callback that prints new notes, and the counts every ten seconds; JSON Lines when following."""
    told: set[str] = set()
    last, counted = time.monotonic(), 0
    # A program that follows wants its counts soon; a person's terminal would scroll.
    every_s = 1.0 if output.MODE.json and follow else output.PLAIN_LINE_EVERY_S

    def tell(collected: Collected) -> None:
        nonlocal last, counted
        for note in [note for reader in list(collected.readers) for note in list(reader.notes) if note not in told]:
            told.add(note)
            say(f"note: {note}")
        total = parts(collected.total(), COUNTS)
        if time.monotonic() - last >= every_s and total["delivered"] != counted:
            last, counted = time.monotonic(), total["delivered"]
            say(value_text("", total))
            if follow:
                output.emit({"event": "progress", **total})

    return tell


def check(
    sources: Annotated[
        list[str] | None, Argument(metavar="SRC", help="Files, folders, globs, '-' for standard input, or 'store'.")
    ] = None,
    model: Annotated[
        str | None, Option("--model", "-m", help="Also check with the chat template and tokens of this model.")
    ] = None,
    config: Annotated[
        Path | None, Option("--config", "-c", help="Config to read the model and data settings from.")
    ] = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    clean: Annotated[Path | None, Option(help="Write rows that passed to this file, the others next to it.")] = None,
) -> None:
    """Report what is wrong with rows, and where. Exits with 3 if too many are rejected or none is usable."""
    tree: dict[str, Any] = {"model": NO_MODEL, "data": {"path": []}}
    tree = tree if config is None else load_config(config).model_dump(mode="json")
    tree["data"]["path"] = sources or tree["data"]["path"]
    tree["model"] = model or tree["model"]
    if not tree["data"]["path"]:
        raise UsageError("no rows to read", hint="give files, folders, globs, '-' or 'store', or --config CONFIG")
    settings = parse_config(tree, "command line", [*as_overrides(columns, ignore), *(overrides or ())])
    left, copies = (beside(clean, kind) if clean else None for kind in ("quarantine", "duplicates"))
    # Refused before minutes of checking.
    files_to_write([path for path in (clean, left, copies) if path], find_sources(settings.data.path))
    folder = None if settings.model == NO_MODEL else expanded(settings.model)
    if folder is not None and not (folder / "tokenizer_config.json").exists():
        folder = model_folder(settings.model, settings.template)  # a folder with a tokenizer can count tokens as it is
    with progress("checking", "rows") as report:
        checked = check_rows(
            settings.data,
            model_folder=folder,
            max_length=settings.max_length,
            clean=clean,
            learn=settings.learn,
            progress=report,
        )
    refusal: DataRefused | None = None
    try:
        checked.refuse(settings.data.max_rejected)
    except DataRefused as error:
        refusal = error
    files = {"passed": clean, "rejected, to fix and read again": left}
    if checked.document["duplicates"]:
        files["duplicates, each with the row that is kept"] = copies
    answer(checked.document, *report_text(checked.document), facts(files), error=refusal)


def report_text(document: dict[str, Any]) -> Iterator[str | Table]:
    """Yield the report as tables: counts, formats of files, columns that were not read, figures, and the first
    places."""
    counts = [("rows in", document["rows_in"], "")]
    counts += [(split, count, "usable") for split, count in document["splits"].items()]
    counts.append(("duplicates", document["duplicates"], duplicate_kinds(document)))
    for key, title in (("rejected", "rejected"), ("set_aside", "set aside"), ("changed", "changed")):
        counts += [(f"{title}: {name}", count, REASONS[name].meaning) for name, count in document[key].items()]
    yield Table("rows count meaning", counts)
    layouts: dict[tuple[str, ...], list[str]] = {}  # a folder of a thousand logs is one line
    unread: dict[tuple[str, str], Any] = {}
    for name, kinds in document["understood"].items():
        for kind in kinds:
            layouts.setdefault((kind["layout"], kind["rows_at"], ", ".join(kind["read"])), []).append(spelled(name))
            unread |= {(kind["layout"], column["column"]): column for column in kind["not_read"]}
    yield Table("read_as rows_at columns files first_file", [(*how, len(of), of[0]) for how, of in layouts.items()])
    yield Table("not_read=column values=distinct example ignored hint", list(unread.values()))
    unclear: dict[str, list[str]] = {}
    for name, suggested in document["unclear"].items():
        unclear.setdefault(suggested["line"], []).append(name)
    for of in unclear.values():
        more = f" and {count(len(of) - 1, 'more file')}" if len(of) > 1 else ""
        mapping = suggestion_text(document["unclear"][of[0]])
        yield f"{spelled(of[0])}{more}: unknown layout; a possible mapping, to be confirmed with --columns:\n{mapping}"
    yield facts(figures(document))
    # Changes first: a secret that was in a log has to be revoked, whatever becomes of the row.
    places = [{**place, "source": spelled(place["source"])} for place in document["changes"] + document["problems"]]
    yield Table("first_place=source rows reason what_to_do=hint", places[:SHOWN_PLACES])
    yield Note("more places: --json; with the rows themselves: --clean OUT" if len(places) > SHOWN_PLACES else "")


def suggestion_text(line: Mapping[str, Any]) -> str:
    """Return a suggested mapping as text: its columns, those that it leaves out, and some rows as it reads them."""
    left_out = f"   left out: {', '.join(line['left_out'])}" if line["left_out"] else ""
    rows = [f'    "{row["question"]}" -> "{row["answer"]}"' for row in line["shown"]]
    return "\n".join([f"  {line['line']}{left_out}", *rows])


def _ends(text: str) -> str:
    """Return both ends of a text, so that answers with the same beginning can be told apart."""
    return text if len(text) <= 44 else f"{text[:22]}...{text[-19:]}"


def figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return more figures about the rows for `facts`; most of their keys are those of the document."""
    lengths, trained = document["lengths"], document["trained_tokens"]
    # As texts: the keys of a mapping lose their underscores.
    answers = [f"{json.dumps(_ends(one['answer']), ensure_ascii=False)} {one['rows']:,}" for one in document["answers"]]
    return {
        "groups": {name: value for name, value in document["groups"].items() if name != "missed" and value},
        "splits": document["groups"]["missed"],
        "learn": {name: value for name, value in document["learn"].items() if value},
        "synthetic": document["synthetic"] if document["synthetic"]["rows"] else None,
        "read as": [f"{spelled(name)} {encoding}" for name, encoding in document["encodings"].items()],
        "most frequent answers": answers,
        "shortest rows": [f"{spelled(one['source'])} {one['length']:,}" for one in lengths["shortest"]],
        "longest rows": [f"{spelled(one['source'])} {one['length']:,}" for one in lengths["longest"]],
        f"length in {lengths['unit']}": {key: lengths[key] for key in ("median", "p90", "p99", "max")},
        "longer than max_length": f"{lengths['above_max_length']:.1%}" if lengths["above_max_length"] else None,
        "tokens": None
        if not trained
        else f"{document['tokens']:,}, trained {trained:,} ({trained / document['tokens']:.0%})",
        "not checked without --model": None if document["model"] else "template, tokens and what of them is trained",
    }


WHAT_HELP = "Categories, packs (TOML), or folders of documents; default: all categories."


def synth(
    what: Annotated[list[str] | None, Argument(metavar="WHAT", help=WHAT_HELP)] = None,
    out: Annotated[Path | None, Option(help="File to write; without it the categories are listed.")] = None,
    rows: Annotated[int, Option(min=1, help="Number of rows, shared among the categories.")] = 1500,
    seed: Annotated[int, Option(help="Seed; the same seed and documentation give the same file.")] = 0,
) -> None:
    """Make training rows from manual pages, docstrings and your own documents.

    No model is needed. Each row names the pages it was made from, and was checked against them.
    """
    # Only now: the other commands on rows need no documentation.
    from hivetune.synth.packs import Library, find_packs
    from hivetune.synth.rows import DRAFT_REASONS, make_rows

    packs, library = find_packs(what or []), Library()
    if out is None:
        listed = [{**parts(pack, "category title install"), "pages": len(library.sources_of(pack))} for pack in packs]
        table = Table("category pages_here=pages topic=title install_for_more=install", listed)
        answer({"categories": listed}, table, "to make rows: hivetune synth --out rows.jsonl")
        return
    files_to_write([out], what or ())  # refused before the pages are read
    with progress("reading documentation", "rows") as report:
        document = make_rows(packs, library, out, rows=rows, seed=seed, progress=report)
    kept, empty = ([one for one in document["categories"] if bool(one["kept"]) == full] for full in (True, False))
    no_pages = "{category}: no rows, {sources} pages here; install: {install}"
    ends = [f"rejected as {reason}: {DRAFT_REASONS[reason]}" for reason in document["rejected"]]
    if document["rows"] < document["asked"]:
        ends.append(f"{document['asked']:,} rows were asked for, but this documentation yields no more")
    answer(
        document,
        Table("category asked kept rejected", kept),
        *(Note(no_pages.format(**one)) for one in empty),
        f"\n{document['rows']:,} rows, all synthetic: {document['out']}",
        *map(Note, ends),
    )


def forget(
    user: Annotated[str | None, Option(help="Delete all interactions of this user.")] = None,
    session: Annotated[str | None, Option(help="Delete all interactions of this session.")] = None,
    source: Annotated[
        str | None, Option(help="Delete all interactions from this file, table (path#table) or stream.")
    ] = None,
    row: Annotated[str | None, Option(help="Delete one interaction, by its id, and its copies.")] = None,
    aside: Annotated[
        bool, Option("--set-aside", help="Keep the rows in the store, but leave them out of later training.")
    ] = False,
) -> None:
    """Delete a user, session, source or row from the store, and list the snapshots, runs and releases that contain it.

    Later collections skip it. Its files, snapshots and runs are not changed: prepare and train again without it, then
    delete what is listed.
    """
    options: dict[ForgetKind, str | None] = {"user": user, "session": session, "source": source, "row": row}
    chosen = [(kind, value) for kind, value in options.items() if value]
    if len(chosen) != 1:  # two would mean either both or any of them
        named = "several things to forget are named" if chosen else "no row to forget is named"
        raise UsageError(named, hint="give one of --user, --session, --source, --row")
    ((kind, value),) = chosen
    with closing(open_database()) as database:
        if aside:
            kept = set_aside(database, kind, value, by=who())
            said = f"set aside: {kept:,}; the dashboard's page Review takes rows back"
            answer({"kind": kind, "value": value, "set_aside": kept}, said)
            return
        found = run_forget(database, kind, value)
    tainted = [{"hash": taint.snapshot, **parts(taint, "path rows runs releases")} for taint in found.taints]
    document = {
        **parts(found, "kind value interactions refused past_wins unchecked"),
        "snapshots": tainted,
        "runs": sorted({run for taint in found.taints for run in taint.runs}),
        "releases": sorted({release for taint in found.taints for release in taint.releases}),
    }
    holders = Table("snapshot=hash rows runs releases path", tainted, "Tainted")
    answer(
        document,
        Note(f"{kind} {value}: {count(found.interactions, 'interaction')} deleted, and skipped from now on"),
        Note(facts(document, "past_wins unchecked")),
        holders if tainted else Note("no snapshot here contains any of it"),
    )

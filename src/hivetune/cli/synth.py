"""The command `data synth`: rows made from documentation on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import files_to_write
from hivetune.cli.output import emit, progress, say, show, table
from hivetune.data.intake.files import find_sources
from hivetune.errors import UsageError
from hivetune.synth.ask_rows import AskSettings, ask_rows
from hivetune.synth.keep import Against
from hivetune.synth.maker import TEMPLATES, make_rows, sources_of
from hivetune.synth.packs.pack import Pack, find_packs
from hivetune.synth.report import page_beside, reasons_of, synth_document, write_synth_page
from hivetune.synth.sources.places import Library

_SHOWN_ROWS = 3


What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WHAT",
        help="Categories, packs (TOML), folders of documents, or folders with usr/share; default: all categories.",
    ),
]


def synth(
    what: What = None,
    out: Annotated[Path | None, typer.Option(help="File to write; without it the categories are listed.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, shared among categories by weight.")] = 1500,
    seed: Annotated[int, typer.Option(help="Seed; the same seed and documentation give the same file.")] = 0,
    run_help: Annotated[
        list[str] | None, typer.Option(metavar="CMD", help="Also read the output of CMD --help.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="SRC", help="Do not repeat rows of these files, globs or 'store'.")
    ] = None,
    ask: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Let a model write the rows: URL#MODEL, a .gguf file or a release."),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens to spend with --ask, prompts included.")
    ] = None,
) -> None:
    """Make training rows from manual pages, docstrings and your own documents.

    No model is needed unless --ask names one. Each row names the pages it was made from, and was checked against them.
    """
    packs, places = find_packs(what or [], run_help or [])
    if budget is not None and ask is None:
        raise UsageError("--budget needs --ask: no tokens are spent without a model")
    if out is None:
        _list(packs, places)
        return
    page = page_beside(out)
    files_to_write([out, page], [*find_sources(against or []), *(what or ())])
    if ask is not None:
        settings = AskSettings(ask, rows, seed, budget, tuple(against or ()))
        with progress("asking", "rows") as report:
            document = ask_rows(packs, places, out, settings, report)
    else:
        with progress("reading documentation", "pages") as report:
            compared = Against(against or ())
            counts = make_rows(packs, places, out, rows=rows, seed=seed, against=compared, progress=report)
            document = synth_document(packs, counts, out, rows=rows, seed=seed, maker=TEMPLATES, against=compared)
    write_synth_page(page, document)
    _show(document)
    show(f"report: {page}")
    emit({**document, "report": str(page)})


def _list(packs: list[Pack], places: Library) -> None:
    counted = [(pack, len(sources_of(pack, places))) for pack in packs]
    table(
        "",
        ("category", "pages here", "topic", "install for more"),
        [(pack.category, f"{count:,}", pack.title, pack.install) for pack, count in counted],
        numeric=("pages here",),
    )
    show("to make rows: hivetune data synth --out rows.jsonl")
    names = ("category", "title", "install")
    emit({"categories": [{**{name: getattr(pack, name) for name in names}, "pages": count} for pack, count in counted]})


def _show(document: dict[str, Any]) -> None:
    columns = ("category", "asked", "made", "kept", "rejected")
    table(
        "",
        columns,
        [
            (category["category"], f"{category['asked']:,}", f"{category['made']:,}", f"{category['kept']:,}",
             ", ".join(reasons_of(category["rejected"])))
            for category in document["categories"] if category["kept"]
        ],
        numeric=columns[1:4],
    )  # fmt: skip
    for category in document["categories"]:
        if not category["kept"]:
            for_more = category["install"] or "-"
            say(f"{category['category']}: no rows, {category['sources']} pages here; install: {for_more}")
        for reason, count in category["skipped"].items():
            say(f"{category['category']}: {count:,} pages skipped: {reason}")
    shown = document["diversity"]
    show(
        f"diversity of the questions: distinct-2 {shown['questions']['distinct_2']:.2f} at "
        f"{shown['questions']['words']:,} words; similarity of a row to its nearest {shown['self_similarity']:.2f}"
    )
    for row in document["samples"][:_SHOWN_ROWS]:
        pages = ", ".join(category["page"] for category in row["synth"]["sources"])
        show(f"\n[{row['category']}, {row['synth']['kind']}, {pages}]")
        for message in row["messages"]:
            show(f"{message['role']}: {message['content']}")
    if document["not_comparable"]:
        say(f"--against: {document['not_comparable']:,} rows could not be read; see: hivetune data check ROWS")
    show(f"\n{document['rows']:,} rows, all synthetic: {document['out']}")
    if "tokens" in document:
        limit = f" of {document['budget']:,}" if document["budget"] else ""
        say(f"{document['tokens']:,} tokens{limit}, {document['asked_now']:,} replies in this run, others earlier")
        if document["unanswered"]:
            say(f"{document['unanswered']:,} passages skipped: {document['maker']} failed on them")
        if document["budget"] and document["tokens"] >= document["budget"]:
            say("the budget is spent; continue with a larger --budget")
    elif document["rows"] < document["asked"]:
        say(f"{document['asked']:,} rows were asked for, but this documentation yields no more")

"""The command `synth`: rows made from documentation on this machine."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import files_to_write
from hivetune.cli.output import emit, progress, say, show, table
from hivetune.data.files.find import find_sources
from hivetune.synth.packs import Pack, find_packs
from hivetune.synth.places import Library
from hivetune.synth.rephrase import rephrasing
from hivetune.synth.rows import DRAFT_REASONS, TEMPLATES, make_rows

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
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, shared among the categories.")] = 1500,
    seed: Annotated[int, typer.Option(help="Seed; the same seed and documentation give the same file.")] = 0,
    run_help: Annotated[
        list[str] | None, typer.Option(metavar="CMD", help="Also read the output of CMD --help.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="SRC", help="Do not repeat rows of these files, globs or 'store'.")
    ] = None,
    ask: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Let a model reword the questions: URL#MODEL, a .gguf file or a release."),
    ] = None,
) -> None:
    """Make training rows from manual pages, docstrings and your own documents.

    No model is needed unless --ask names one. Each row names the pages it was made from, and was checked against them.
    """
    packs, places = find_packs(what or [], run_help or [])
    if out is None:
        _list(packs, places)
        return
    files_to_write([out], [*find_sources(against or []), *(what or ())])
    with contextlib.ExitStack() as stack:
        maker, rephrase = (TEMPLATES, None) if ask is None else stack.enter_context(rephrasing(ask))
        report = stack.enter_context(progress("reading documentation", "rows"))
        document = make_rows(
            packs,
            places,
            out,
            rows=rows,
            seed=seed,
            against=against or (),
            maker=maker,
            rephrase=rephrase,
            progress=report,
        )
    _show(document)
    emit(document)


def _list(packs: list[Pack], places: Library) -> None:
    counted = [(pack, len(places.sources_of(pack))) for pack in packs]
    table(
        "",
        ("category", "pages here", "topic", "install for more"),
        [(pack.category, f"{count:,}", pack.title, pack.install) for pack, count in counted],
    )
    show("to make rows: hivetune synth --out rows.jsonl")
    names = ("category", "title", "install")
    emit({"categories": [{**{name: getattr(pack, name) for name in names}, "pages": count} for pack, count in counted]})


def _show(document: dict[str, Any]) -> None:
    columns = ("category", "asked", "kept", "rejected")
    lines = [
        (c["category"], f"{c['asked']:,}", f"{c['kept']:,}", ", ".join(f"{k} {n:,}" for k, n in c["rejected"].items()))
        for c in document["categories"]
        if c["kept"]
    ]
    table("", columns, lines)
    for category in document["categories"]:
        if not category["kept"]:
            for_more = category["install"] or "-"
            say(f"{category['category']}: no rows, {category['sources']} pages here; install: {for_more}")
        for reason, count in category["skipped"].items():
            say(f"{category['category']}: {count:,} pages skipped: {reason}")
    for row in document["samples"][:_SHOWN_ROWS]:
        pages = ", ".join(category["page"] for category in row["synth"]["sources"])
        show(f"\n[{row['category']}, {row['synth']['kind']}, {pages}]")
        for message in row["messages"]:
            show(f"{message['role']}: {message['content']}")
    if document["not_comparable"]:
        say(f"--against: {document['not_comparable']:,} rows could not be read; see: hivetune check ROWS")
    show(f"\n{document['rows']:,} rows, all synthetic: {document['out']}")
    for reason in document["rejected"]:
        say(f"rejected as {reason}: {DRAFT_REASONS[reason]}")
    if document["rows"] < document["asked"]:
        say(f"{document['asked']:,} rows were asked for, but this documentation yields no more")

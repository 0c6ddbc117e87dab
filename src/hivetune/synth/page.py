"""The report as one HTML page that needs nothing else, in the style of the data report. Every text is escaped."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from hivetune.data.prepare.page import STYLE
from hivetune.synth.report import reasons_of
from hivetune.synth.verify.checks import DRAFT_REASONS


def write_synth_page(path: Path, document: Mapping[str, Any]) -> None:
    """Raises OSError when the page can't be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(synth_page(document), encoding="utf-8", errors="replace")


def synth_page(document: Mapping[str, Any]) -> str:
    sections = (_categories(document), _rejected(document), _diverse(document), _rows(document))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Rows from documentation</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body><main>\n"
        f"<h1>{document['rows']:,} rows made of {document['asked']:,} that were asked for</h1>"
        f'<p class="soft">{document["made"]:,} drafts, seed {document["seed"]}, maker {escape(document["maker"])}. '
        "All of these rows are synthetic: each names the pages that it rests on.</p>\n"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _categories(document: Mapping[str, Any]) -> str:
    most = max((one["kept"] for one in document["categories"]), default=0) or 1
    rows = ""
    for one in document["categories"]:
        note = escape(", ".join(reasons_of(one["rejected"])))
        if not one["kept"]:
            note = f"empty: {escape(one['install'] or 'no source found')}"
        counts = "".join(f'<td class="n">{one[name]:,}</td>' for name in ("asked", "made", "kept"))
        bar = f'<div class="meter"><i class="train" style="width:{one["kept"] / most:.3%}"></i></div>'
        rows += (
            f"<tr><td>{escape(one['category'])}</td>{counts}<td>{bar}</td>"
            f'<td class="n">{one["sources"]:,}</td><td class="soft">{note}</td></tr>'
        )
    head = '<tr><th>category</th><th class="n">asked</th><th class="n">made</th><th class="n">kept</th><th></th>'
    head += '<th class="n">pages</th><th>rejected, or what to install</th></tr>'
    return f"<section><h2>Categories</h2><table>{head}{rows}</table></section>\n"


def _rejected(document: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{escape(reason)}</td><td class="n">{count:,}</td><td>{escape(DRAFT_REASONS[reason])}</td></tr>'
        for reason, count in sorted(document["rejected"].items(), key=lambda item: -item[1])
    )
    return f"<section><h2>Rejected drafts</h2><table>{rows}</table></section>\n" if rows else ""


def _diverse(document: Mapping[str, Any]) -> str:
    found = document["diversity"]
    rows = "".join(
        f'<tr><td>{name}</td><td class="n">{found[name]["words"]:,}</td>'
        + "".join(f'<td class="n">{found[name][f"distinct_{n}"]:.3f}</td>' for n in (1, 2, 3))
        + "</tr>"
        for name in ("questions", "answers")
    )
    head = '<tr><th></th><th class="n">words</th>' + "".join(f'<th class="n">distinct-{n}</th>' for n in (1, 2, 3))
    note = (
        f"Likeness of a row to its nearest: {found['self_similarity']:.3f} on average (0: nothing in common, 1: equal)."
    )
    return f'<section><h2>Diversity</h2><p class="soft">{note}</p><table>{head}</tr>{rows}</table></section>\n'


def _rows(document: Mapping[str, Any]) -> str:
    body = ""
    for row in document["samples"]:
        said = "\n".join(f"{message['role']}: {message['content']}" for message in row["messages"])
        pages = ", ".join(f"{one['page']} {one['section']}" for one in row["synth"]["sources"])
        body += (
            f"<details open><summary><strong>{escape(row['category'])}, {escape(row['synth']['kind'])}</strong> "
            f'<span class="soft">{escape(pages)}</span></summary>'
            f'<div class="text"><code>{escape(said)}</code></div></details>'
        )
    return f"<section><h2>Rows to look at</h2>{body}</section>\n" if body else ""

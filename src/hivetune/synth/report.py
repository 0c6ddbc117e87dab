"""The report of rows that were made, as JSON and as a page: drafts of each category, diversity, rows to look at."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hivetune.data.prepare.page import STYLE
from hivetune.errors import UsageError
from hivetune.run.page import render, whole_page
from hivetune.synth.checks import DRAFT_REASONS
from hivetune.synth.keep import Against
from hivetune.synth.maker import CategoryCounts
from hivetune.synth.packs.pack import Pack
from hivetune.synth.sources.page import words_in

MEASURED_ROWS = 2000  # for the diversity: it falls with the number of words, so it is taken at a stated one
MEASURED_WORDS = 20_000
_MAX_SHOWN, _MAX_COMPARED = 12, 400
_TITLE = "Rows from documentation"
_BODY = Path(__file__).with_name("report_body.html")


def synth_document(
    packs: Sequence[Pack],
    counts: Mapping[str, CategoryCounts],
    out: Path,
    *,
    rows: int,
    seed: int,
    maker: str,
    against: Against,
) -> dict[str, Any]:
    """Return the document of `--json`.

    For each category: made = rejected + kept + not_needed.
    """
    categories = [_category(pack, counts[pack.category]) for pack in packs]
    num_rows = sum(c["kept"] for c in categories)
    rejected = sum((tally.rejected for tally in counts.values()), Counter[str]())
    return {
        "schema": 1,
        "out": str(out),
        "asked": rows,
        "rows": num_rows,
        "made": sum(c["made"] for c in categories),
        "rejected": dict(sorted(rejected.items())),
        "seed": seed,
        "maker": maker,
        "categories": categories,
        "empty": [c["category"] for c in categories if not c["kept"]],
        "diversity": diversity(out),
        "samples": rows_to_look_at(out, seed),
        "compared_with": against.rows,
        "not_comparable": against.unreadable,
    }


def _category(pack: Pack, tally: CategoryCounts) -> dict[str, Any]:
    return {
        "category": pack.category,
        "title": pack.title,
        "asked": tally.asked,
        "made": tally.made,
        "rejected": dict(sorted(tally.rejected.items())),
        "kept": tally.kept,
        "not_needed": tally.made - tally.kept - tally.rejected.total(),
        "sources": tally.sources,
        "skipped": dict(sorted(tally.skipped.items())),
        "kinds": dict(sorted(tally.kinds.items())),
        "install": pack.install,
    }


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def diversity(path: Path) -> dict[str, Any]:
    """Return distinct-n of questions and answers at a stated number of words, and the similarity of rows to their
    nearest.

    Distinct-n: different sequences of n words, divided by all (Li et al. 2016, arXiv 1510.03055).
    """
    rows = [row["messages"] for row in islice(read_lines(path), MEASURED_ROWS)]
    questions, answers = (
        ["\n".join(message["content"] for message in messages if message["role"] == role) for messages in rows]
        for role in ("user", "assistant")
    )
    document: dict[str, Any] = {}
    for name, texts in (("questions", questions), ("answers", answers)):
        measured = list(islice((word for text in texts for word in plain_words(text)), MEASURED_WORDS))
        document[name] = {"words": len(measured), **{f"distinct_{n}": distinct(measured, n) for n in (1, 2, 3)}}
    rows_of_words = [frozenset(words_in(f"{q} {a}")) for q, a in zip(questions, answers, strict=True)][:_MAX_COMPARED]
    nearest = [
        max((len(a & b) / max(1, len(a | b)) for j, b in enumerate(rows_of_words) if j != i), default=0.0)
        for i, a in enumerate(rows_of_words)
    ]
    # The mean Jaccard similarity of a row's words to the nearest other row.
    document["self_similarity"] = round(sum(nearest) / max(1, len(nearest)), 4)
    return document


def plain_words(text: str) -> list[str]:
    """Return the words of a text in order, without the marks of code."""
    return text.lower().replace("`", " ").split()


def distinct(words: Sequence[str], n: int) -> float:
    """Return the share of sequences of `n` words that are different, 0 to 1."""
    sequences = list(zip(*(words[i:] for i in range(n)), strict=False))
    return round(len(set(sequences)) / len(sequences), 4) if sequences else 0.0


def rows_to_look_at(path: Path, seed: int) -> list[dict[str, Any]]:
    """Return rows to look at, one of each kind first, then at random."""
    draw = random.Random(f"{seed} shown")
    first: dict[str, dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    for number, row in enumerate(islice(read_lines(path), MEASURED_ROWS)):
        if row["synth"]["kind"] not in first:
            first[row["synth"]["kind"]] = row
        elif len(others) < _MAX_SHOWN:
            others.append(row)
        elif (index := draw.randrange(number + 1)) < _MAX_SHOWN:
            others[index] = row
    return [*first.values(), *others][: max(_MAX_SHOWN, len(first))]


def reasons_of(rejected: Mapping[str, int]) -> Iterable[str]:
    return (f"{reason} {count:,}" for reason, count in sorted(rejected.items(), key=lambda item: -item[1]))


# The report as a page in the style of the data report.


def page_beside(out: Path) -> Path:
    """Return the file of the report beside the rows. Raises UsageError where another page, such as a document, is."""
    page = out.with_suffix(".html")
    if page.is_file() and f"<title>{_TITLE}</title>".encode() not in page.read_bytes():
        raise UsageError(f"the report of {out} would replace {page}, which is no report", hint="choose another --out")
    return page


def write_synth_page(path: Path, document: Mapping[str, Any]) -> None:
    """Write the page. Raises OSError when it can't be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(synth_page(document), encoding="utf-8", errors="replace")


def synth_page(document: Mapping[str, Any]) -> str:
    """Return the whole page."""
    heading = f"{document['rows']:,} rows made of {document['asked']:,} that were asked for"
    body = render(_BODY, d=document, meanings=DRAFT_REASONS, reasons_of=reasons_of)
    return whole_page(_TITLE, body, STYLE, heading)

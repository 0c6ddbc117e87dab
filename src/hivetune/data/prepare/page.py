"""The data report as one HTML page that needs no script, font or network; report_body.html is its template."""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hivetune.data.prepare.report import Report, duplicate_kinds, secrets_first
from hivetune.data.prepare.work import USABLE, Work
from hivetune.data.reasons import REASONS
from hivetune.data.render.folder import load_renderer
from hivetune.data.snapshot import SPLITS
from hivetune.models.prepared import spoken_name
from hivetune.run.page import render, whole_page

MAX_SLOTS = 3  # per reason
MAX_NAMES, MAX_CHANGES, MAX_FILES, MAX_TEXT = 20, 200, 200, 1500
PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN = 900, 190, 10
DUPLICATE_KINDS = {"exact": "equal", "beginning": "the beginning of a longer row", "near": "nearly equal"}
LESSONS = ("corrections", "pairs", "retries", "failures")
STYLE, _BODY = (Path(__file__).with_name(name) for name in ("page.css", "report_body.html"))
SAMPLES = (  # (why it is shown, order, rows)
    ("the longest", "-length", 1),
    ("the least to learn", "1.0 * trained / max(1, length), trained", 1),
    ("changed or at random", "changed IS NULL, hash64", 1),
    ("at random", "hash64", 4),
)
MAX_TOKENS = 1200
Decode = Callable[[Sequence[int]], str]


def write_page(path: Path, report: Report, work: Work, model_folder: Path | None) -> None:
    """Write the page of a report. Raise OSError if it can't be written."""
    decode = load_renderer(model_folder).decode if model_folder is not None else None
    path.parent.mkdir(parents=True, exist_ok=True)
    body = report_body(report.document, _samples(work, decode))
    text = whole_page("Data report", body, STYLE, report_title(report.document))
    path.write_text(text, encoding="utf-8", errors="replace")


def _samples(work: Work, decode: Decode | None) -> list[dict[str, Any]]:
    """Return the rows to show: the longest, the one with the least to learn, a changed one, and some at random.

    Each has why it is shown, and its pieces as `runs` of (text, trained), which are None without a model.
    """
    chosen: dict[int, str] = {}
    for why, order, count in SAMPLES:
        for (row,) in work.all(f"SELECT n FROM rows WHERE {USABLE} ORDER BY {order}, n LIMIT {count}"):
            chosen.setdefault(row, why)
    query = (
        "SELECT source, coalesce(num_tokens, length), trained, changed, messages, tokens, mask"
        " FROM rows JOIN bodies USING (n) WHERE n = ?"
    )
    samples = []
    for row, why in chosen.items():
        [(source, length, trained, changed, messages, tokens, mask)] = work.all(query, row)
        text = _short("".join(f"{turn['role']}: {turn['content']}\n" for turn in json.loads(messages)))
        runs = _runs(tokens, mask, decode) if decode is not None and tokens is not None else None
        about = {"source": source, "length": length, "trained": trained, "changed": changed}
        samples.append({"why": why, **about, "text": text, "runs": runs})
    return samples


def _runs(tokens: bytes, mask: bytes, decode: Decode) -> list[tuple[str, bool]]:
    """Decode consecutive tokens of one kind together, since a character may take several tokens."""
    ids = array("I", tokens)
    runs: list[tuple[str, bool]] = []
    start = 0
    for trained, flags in groupby(mask[:MAX_TOKENS]):
        end = start + len(list(flags))
        runs.append((decode(ids[start:end]), bool(trained)))
        start = end
    if len(ids) > MAX_TOKENS:
        runs.append((f" ... {len(ids) - MAX_TOKENS:,} more tokens", False))
    return runs


def report_title(document: Mapping[str, Any]) -> str:
    """Return the sentence that sums up the report."""
    share = f"{document['usable']:,} of {document['rows_in']:,} rows"
    model = document["model"]
    return f"{spoken_name(model)} can learn from {share}" if model else f"{share} can be learned from"


def report_body(document: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the page below its title, for pages with another frame and the same style."""
    changes = secrets_first(document["changes"])
    more_changes = len(changes) + document["changes_left_out"] - MAX_CHANGES
    num_held_back = document["set_aside"].get("synthetic-share", 0)
    return render(
        _BODY,
        d=document,
        total=(total := max(1, document["rows_in"])),
        fates=(fates := _fates(document)),
        fate_shares=[(kind, rows / total) for kind, _, rows, _ in fates],
        reasons=list(_reasons(document)),
        changes=changes[:MAX_CHANGES],
        changes_note=f"The first {MAX_CHANGES:,}; {more_changes:,} more are in report.json."
        if more_changes > 0
        else "",
        synthetic_note=f"{num_held_back:,} more are set aside: synthetic rows are at most half."
        if num_held_back
        else "",
        lessons=LESSONS,
        **_lengths(document),
        agents=_names(document["agents"]),
        categories=_names(document["categories"]),
        samples=samples,
        with_mask=any(sample["runs"] is not None for sample in samples),
        duplicates=[_duplicate(pair) for pair in document["duplicate_examples"]],
        files=[
            (name, sum(layouts.values()), ", ".join(f"{'unread' if k == '-' else k} {n:,}" for k, n in layouts.items()))
            for name, layouts in list(document["files"].items())[:MAX_FILES]
        ],
    )


def _fates(document: Mapping[str, Any]) -> list[tuple[str, str, int, str]]:
    """Return (CSS class, name, rows, note) of each place where rows went."""
    splits = document["splits"]
    return [
        ("train", "train", splits["train"], "learned from"),
        ("validation", "validation", splits["validation"], "chooses the best step"),
        ("test", "test", splits["test"], "decides whether the new model is better"),
        ("duplicates", "duplicates", document["duplicates"], duplicate_kinds(document)),
        ("rejected", "rejected", sum(document["rejected"].values()), "invalid: fix and check again"),
        ("set_aside", "set aside", sum(document["set_aside"].values()), "valid, excluded by a setting"),
    ]


def _reasons(document: Mapping[str, Any]) -> Iterator[tuple[str, str, int, str, list[Mapping[str, str]]]]:
    """Yield (kind, reason, rows, meaning, first places), the most frequent reasons of a kind first."""
    places: dict[str, list[Mapping[str, str]]] = {}
    for problem in (*document["problems"], *document["changes"]):
        places.setdefault(problem["reason"], []).append(problem)
    for kind in ("rejected", "set_aside", "changed"):
        for reason, count in sorted(document[kind].items(), key=lambda item: -item[1]):
            yield kind, reason, count, REASONS[reason].meaning, places.get(reason, [])[:MAX_SLOTS]


def _lengths(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bars, labels and note of the histogram of lengths."""
    lengths, limit = document["lengths"], document["max_length"]
    bins = lengths["histogram"]
    if not bins:
        return {"bars": [], "plot": {}, "lengths_note": ""}
    step = (PLOT_WIDTH - 2 * PLOT_MARGIN) / len(bins)
    highest = max(count for *_, count in bins)
    bars = []
    for i, (low, high, count) in enumerate(bins):
        height = PLOT_HEIGHT * count / highest
        bars.append(
            {
                "x": PLOT_MARGIN + i * step + 1,
                "y": PLOT_HEIGHT - height + 10,
                "width": max(1, step - 2),
                "height": max(height, 1 if count else 0),
                "over": limit is not None and low > limit,
                "title": f"{low:,} to {high:,}: {count:,} rows",
            }
        )
    longest_kept = next((i for i, (low, high, _) in enumerate(bins) if low <= lengths["keeps_99_percent"] <= high), -1)
    plot = {
        "width": PLOT_WIDTH,
        "height": PLOT_HEIGHT,
        "labels": [(PLOT_MARGIN + i * step, f"{bins[i][0]:,}") for i in range(0, len(bins), max(1, len(bins) // 8))],
        "kept_x": PLOT_MARGIN + ((longest_kept if longest_kept >= 0 else len(bins) - 1) + 1) * step,
    }
    note = (
        f"In {lengths['unit']}: median {lengths['median']:,}, 90 % up to {lengths['p90']:,}, "
        f"longest {lengths['longest_seen']:,}{f', max_length {limit:,}' if limit is not None else ''}."
    )
    return {"bars": bars, "plot": plot, "lengths_note": note}


def _names(names: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the largest agents or categories with their splits; no rows if no row names one."""
    if not any(name != "-" for name in names):
        return {"rows": [], "more": 0}
    totals = sorted(((sum(counts.values()), name) for name, counts in names.items()), reverse=True)
    rows = [
        (
            name,
            total,
            [(split, names[name].get(split, 0) / totals[0][0]) for split in SPLITS],
            " / ".join(f"{names[name].get(split, 0):,}" for split in SPLITS),
        )
        for total, name in totals[:MAX_NAMES]
    ]
    return {"rows": rows, "more": len(totals) - MAX_NAMES}


def _duplicate(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pair of duplicates with both texts; of equal rows the one text."""
    texts = [_short(_spoken(pair[name])) for name in ("messages", "same_as_messages")]
    return {**pair, "kind": DUPLICATE_KINDS[pair["kind"]], "texts": texts[:1] if pair["kind"] == "exact" else texts}


def _spoken(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return texts and calls, without the system prompt."""
    pieces = []
    for turn in messages:
        if turn["role"] != "system":
            pieces.append(turn["content"])
            pieces += [json.dumps(call, ensure_ascii=False) for call in turn.get("tool_calls", ())]
    return "\n".join(pieces)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."

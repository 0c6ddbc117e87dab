"""The report as one HTML page that needs nothing else: no script, no font, no network. Every text is escaped."""

import difflib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hivetune.data.fates import Decisions, fates, open_result
from hivetune.data.prepare.report import Report, duplicate_kinds, secrets_first
from hivetune.data.reasons import REASONS
from hivetune.data.render.folder import load_renderer
from hivetune.data.snapshot import SPLITS
from hivetune.models.prepared import spoken_name

EXAMPLES_PER_REASON = 3
SHOWN_NAMES = 20
SHOWN_CHANGES = 200
MAX_TEXT = 1500
DUPLICATE_KINDS = {"exact": "equal", "beginning": "the beginning of a longer row", "near": "nearly equal"}
LESSONS = ("corrections", "pairs", "retries", "failures")
STYLE = Path(__file__).with_name("page.css")


# Rows worth looking at: the longest, those with the least to learn, those that were changed, and some at random.

NUM_RANDOM = 4
MAX_TOKENS = 1200
_QUERY = "SELECT n, source, length, trained, changed, hash64 FROM rows WHERE reason IS NULL ORDER BY n"


@dataclass(frozen=True, slots=True)
class Sample:
    """A usable row. `why` it is shown; `runs`: (text, trained) pieces, None without a model; `changed`: reasons."""

    why: str
    source: str
    messages: list[dict[str, Any]]
    length: int
    trained: int | None
    changed: str | None
    runs: list[tuple[str, bool]] | None


@dataclass(slots=True)
class _Best:
    """The best row so far under one measure; smaller is better."""

    why: str
    measure: Callable[[int, int | None, str | None, int], tuple[float, ...] | None]
    score: tuple[float, ...] | None = None
    place: tuple[int, int] | None = None  # chunk, row in the chunk


def choose_samples(
    results: Sequence[Path], decisions: Decisions, decode: Callable[[Sequence[int]], str] | None
) -> list[Sample]:
    """Read once through all rows; keeps places only."""
    best = [
        _Best("the longest", lambda length, _t, _c, _h: (-length,)),
        _Best("the least to learn", lambda length, t, _c, _h: None if t is None else (t / max(1, length), t)),
        _Best("changed", lambda _l, _t, changed, h: (h,) if changed else None),
    ]
    at_random: list[tuple[int, tuple[int, int]]] = []
    for number, path in enumerate(results):
        fate_of = dict(fates(decisions, number))
        with closing(open_result(path)) as database:
            for n, _, length, trained, changed, hash64 in database.execute(_QUERY):
                if fate_of[n] >= len(SPLITS):
                    continue
                for one in best:
                    score = one.measure(length, trained, changed, hash64)
                    if score is not None and (one.score is None or score < one.score):
                        one.score, one.place = score, (number, n)
                if len(at_random) < NUM_RANDOM or hash64 < at_random[-1][0]:
                    at_random = sorted([*at_random, (hash64, (number, n))])[:NUM_RANDOM]
    wanted = {one.place: one.why for one in reversed(best) if one.place is not None}
    chosen = [(wanted[place], place) for place in reversed(wanted)]
    chosen += [("at random", place) for _, place in at_random if place not in wanted]
    return [_read(results, place, why, decode) for why, place in chosen]


def _read(
    results: Sequence[Path], place: tuple[int, int], why: str, decode: Callable[[Sequence[int]], str] | None
) -> Sample:
    with closing(open_result(results[place[0]])) as database:
        source, length, trained, changed, messages, tokens, mask = database.execute(
            "SELECT source, coalesce(num_tokens, length), trained, changed, messages, tokens, mask"
            " FROM rows JOIN bodies USING (n) WHERE n = ?",
            (place[1],),
        ).fetchone()
    runs = _runs(tokens, mask, decode) if decode is not None and tokens is not None else None
    return Sample(why, source, json.loads(messages), length, trained, changed, runs)


def _runs(tokens: bytes, mask: bytes, decode: Callable[[Sequence[int]], str]) -> list[tuple[str, bool]]:
    """Consecutive tokens of one kind decoded together, since a character may take several tokens."""
    ids = array("I")
    ids.frombytes(tokens)
    runs: list[tuple[str, bool]] = []
    start, end = 0, min(len(ids), MAX_TOKENS)
    for i in range(1, end + 1):
        if i == end or mask[i] != mask[start]:
            runs.append((decode(ids[start:i]), bool(mask[start])))
            start = i
    if len(ids) > MAX_TOKENS:
        runs.append((f" ... {len(ids) - MAX_TOKENS:,} more tokens", False))
    return runs


def write_page(
    path: Path, report: Report, results: Sequence[Path], decisions: Decisions, model_folder: Path | None
) -> None:
    """Raises OSError when the page can't be written."""
    decode = load_renderer(model_folder).decode if model_folder is not None else None
    samples = choose_samples(results, decisions, decode)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(report.document, samples), encoding="utf-8", errors="replace")


def page(document: Mapping[str, Any], samples: Sequence[Sample]) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Data report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body><main>\n"
        f"<h1>{escape(report_title(document))}</h1>{report_body(document, samples)}</main></body></html>\n"
    )


def report_title(document: Mapping[str, Any]) -> str:
    share = f"{document['usable']:,} of {document['rows_in']:,} rows"
    model = document["model"]
    return f"{spoken_name(model)} can learn from {share}" if model else f"{share} can be learned from"


def report_body(document: Mapping[str, Any], samples: Sequence[Sample]) -> str:
    """All of the page below its title, for whoever has a frame and page.css of their own."""
    sections = (
        _sum(document),
        _reasons(document),
        _changes(document),
        _synthetic(document),
        _lessons(document),
        _lengths(document),
        _names("Agents", document["agents"]),
        _names("Categories", document["categories"]),
        _masks(samples),
        _duplicates(document),
        _files(document),
    )
    return f'<p class="soft">{_tokens(document)}</p>\n{"".join(sections)}'


def _tokens(document: Mapping[str, Any]) -> str:
    if document["tokens"] is None:
        return f"Not checked, because no model was named: {', '.join(document['not_run'])}."
    share = document["trained_tokens"] / max(1, document["tokens"])
    return f"{document['tokens']:,} tokens, of which {document['trained_tokens']:,} ({share:.0%}) are trained."


def _section(title: str, body: str, note: str = "") -> str:
    said = f'<p class="soft">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{said}{body}</section>\n" if body else ""


def _sum(document: Mapping[str, Any]) -> str:
    rejected, set_aside = sum(document["rejected"].values()), sum(document["set_aside"].values())
    parts = [
        ("train", "train", document["splits"]["train"], "learned from"),
        ("validation", "validation", document["splits"]["validation"], "chooses the best step"),
        ("test", "test", document["splits"]["test"], "decides whether the new model is better"),
        ("duplicates", "duplicates", document["duplicates"], duplicate_kinds(document)),
        ("rejected", "rejected", rejected, "broken; can be mended and fed again"),
        ("set_aside", "set aside", set_aside, "fine, left out by policy"),
    ]
    total = max(1, document["rows_in"])
    bar = _shares((kind, n / total) for kind, _, n, _ in parts)
    rows = "".join(
        f'<tr><td><span class="dot {kind}"></span>{name}</td><td class="n">{n:,}</td><td class="n">{n / total:.1%}</td>'
        f'<td class="soft">{note}</td></tr>'
        for kind, name, n, note in parts
    )
    rows += f'<tr class="sum"><td>rows in</td><td class="n">{document["rows_in"]:,}</td><td></td><td></td></tr>'
    return _section("Where every row went", bar + _table(rows))


def _reasons(document: Mapping[str, Any]) -> str:
    examples: dict[str, list[Mapping[str, str]]] = {}
    for problem in (*document["problems"], *document["changes"]):
        kept = examples.setdefault(problem["reason"], [])
        if len(kept) < EXAMPLES_PER_REASON:
            kept.append(problem)
    rows = ""
    for kind in ("rejected", "set_aside", "changed"):
        for reason, count in sorted(document[kind].items(), key=lambda item: -item[1]):
            places = "".join(
                f'<br><code>{escape(p["source"])}</code> <span class="soft">{escape(p["hint"])}</span>'
                for p in examples.get(reason, ())
            )
            rows += (
                f'<tr><td><span class="dot {kind}"></span>{escape(reason)}</td><td class="n">{count:,}</td>'
                f"<td>{escape(REASONS[reason].meaning)}{places}</td></tr>"
            )
    head = '<tr><th>reason</th><th class="n">rows</th><th>what it means, and where</th></tr>'
    return _section("Reasons", _table(head + rows) if rows else "<p>No row was rejected or changed.</p>")


def _changes(document: Mapping[str, Any]) -> str:
    """Secrets first: each is to be revoked where it was made."""
    changes = secrets_first(document["changes"])
    rows = "".join(
        f"<tr><td><code>{escape(c['source'])}</code></td><td>{escape(c['reason'])}</td><td>{escape(c['hint'])}</td></tr>"
        for c in changes[:SHOWN_CHANGES]
    )
    more = len(changes) + document["changes_left_out"] - SHOWN_CHANGES
    note = f"The first {SHOWN_CHANGES:,}; {more:,} more are in report.json." if more > 0 else ""
    head = "<tr><th>row</th><th>what</th><th>where in it, and what to do</th></tr>"
    return _section("Changed rows", _table(head + rows), note) if rows else ""


def _table(rows: str) -> str:
    """In a box that scrolls by itself where the page is narrower than the table."""
    return f'<div class="wide" tabindex="0"><table>{rows}</table></div>'


def _synthetic(document: Mapping[str, Any]) -> str:
    """How much of the rows was made, not recorded."""
    made, others = document["synthetic"]["rows"], document["synthetic"]["others"]
    if not made:
        return ""
    set_aside = document["set_aside"].get("synthetic-share", 0)
    note = f"{set_aside:,} more are set aside: data.synthetic_share allows no more of them." if set_aside else ""
    rows = "".join(
        f'<tr><td>{name}</td><td class="n">{count:,}</td><td class="n">{count / (made + others):.1%}</td></tr>'
        for name, count in (("made from documentation", made), ("recorded", others))
    )
    return _section("Synthetic rows", f"<table>{rows}</table>", note)


def _lessons(document: Mapping[str, Any]) -> str:
    """What can be learned from beside good rows, how much of it there is, and what is not used, and why."""
    learned = document["learn"]
    counts = [(kind, learned[kind], "used") for kind in LESSONS]
    counts += [(kind, count, "not used: learn does not name it") for kind, count in learned["not_used"].items()]
    counts += [("worse answers", count, f"left out: {reason}") for reason, count in learned["worse_left_out"].items()]
    counts += [("failures", learned["no_lesson"], "set aside: time-out, tool or network, which teach nothing")]
    rows = "".join(
        f'<tr><td>{escape(what)}</td><td class="n">{count:,}</td><td>{escape(used)}</td></tr>'
        for what, count, used in counts
        if count
    )
    return _section("To learn from beside good rows", _table(rows) if rows else "")


def _lengths(document: Mapping[str, Any]) -> str:
    lengths = document["lengths"]
    bins = lengths["histogram"]
    if not bins:
        return ""
    width, height, left = 900, 190, 10
    step = (width - 2 * left) / len(bins)
    most = max(count for *_, count in bins)
    limit = document["max_length"]
    bars = ""
    for i, (low, high, count) in enumerate(bins):
        tall = height * count / most
        over = ' class="over"' if limit is not None and low > limit else ""
        bars += (
            f'<rect{over} x="{left + i * step + 1:.1f}" y="{height - tall + 10:.1f}" width="{max(1, step - 2):.1f}" '
            f'height="{max(tall, 1 if count else 0):.1f}"><title>{low:,} to {high:,}: {count:,} rows</title></rect>'
        )
    for i in range(0, len(bins), max(1, len(bins) // 8)):
        bars += f'<text x="{left + i * step:.1f}" y="{height + 28}">{bins[i][0]:,}</text>'
    kept = lengths["keeps_99_percent"]
    at = next((i for i, (low, high, _) in enumerate(bins) if low <= kept <= high), len(bins) - 1)
    x = left + (at + 1) * step
    bars += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height + 10}"/>'
    bars += f'<text x="{x - 6:.1f}" y="16" text-anchor="end">99 % of the rows: up to {kept:,}</text>'
    limit_note = f", max_length {limit:,}" if limit is not None else ""
    note = (
        f"In {lengths['unit']}: median {lengths['median']:,}, 90 % up to {lengths['p90']:,}, "
        f"longest {lengths['longest_seen']:,}{limit_note}."
    )
    return _section(
        "How long the rows are",
        '<div class="wide" tabindex="0">'
        f'<svg class="plot" viewBox="0 0 {width} {height + 34}" width="100%">{bars}</svg></div>',
        note,
    )


def _shares(parts: Iterable[tuple[str, float]]) -> str:
    """One bar with a piece for each share of it. No style attribute: a strict content policy forbids them."""
    pieces, start = "", 0.0
    for kind, share in parts:
        if share:
            pieces += f'<rect class="{kind}" x="{1000 * start:.2f}" width="{1000 * share:.2f}" height="20"/>'
        start += share
    return f'<svg class="stack" viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">{pieces}</svg>'


def _names(title: str, names: Mapping[str, Mapping[str, int]]) -> str:
    if not any(name != "-" for name in names):
        return ""
    totals = sorted(((sum(counts.values()), name) for name, counts in names.items()), reverse=True)
    most = totals[0][0]
    rows = ""
    for total, name in totals[:SHOWN_NAMES]:
        parts = _shares((split, names[name].get(split, 0) / most) for split in SPLITS)
        shares = " / ".join(f"{names[name].get(split, 0):,}" for split in SPLITS)
        label = escape(name) if name != "-" else '<span class="soft">none named</span>'
        rows += (
            f'<tr><td>{label}</td><td class="n">{total:,}</td><td class="meter">{parts}</td>'
            f'<td class="n soft">{shares}</td></tr>'
        )
    if len(totals) > SHOWN_NAMES:
        rows += f'<tr><td class="soft">and {len(totals) - SHOWN_NAMES:,} more</td></tr>'
    head = '<tr><th></th><th class="n">rows</th><th></th><th class="n">train / validation / test</th></tr>'
    return _section(title, _table(head + rows))


def _masks(samples: Sequence[Sample]) -> str:
    body = ""
    for sample in samples:
        if sample.runs is None:
            inside = "".join(f"{turn['role']}: {turn['content']}\n" for turn in sample.messages)
            text = escape(_short(inside))
            size = f"{sample.length:,} characters"
        else:
            text = "".join(f"<b>{escape(t)}</b>" if trained else escape(t) for t, trained in sample.runs)
            size = f"{sample.trained:,} of {sample.length:,} tokens trained"
        changed = f", {escape(sample.changed)}" if sample.changed else ""
        body += (
            f"<details open><summary><strong>{escape(sample.why)}</strong> <code>{escape(sample.source)}</code> "
            f'<span class="soft">{size}{changed}</span></summary><div class="text"><code>{text}</code></div></details>'
        )
    with_mask = any(sample.runs is not None for sample in samples)
    note = 'What is <span class="text"><b>marked</b></span> is trained; the rest is only read.'
    return _section("Rows as the model sees them", body, note if with_mask else "")


def _duplicates(document: Mapping[str, Any]) -> str:
    body = ""
    for pair in document["duplicate_examples"]:
        stays, gone = _spoken(pair["same_as_messages"]), _spoken(pair["messages"])
        shown = escape(_short(gone)) if pair["kind"] == "exact" else _difference(stays, gone)
        share = "" if pair["share"] is None else f", {pair['share']:.0%} of the words in common"
        body += (
            f"<details><summary>{DUPLICATE_KINDS[pair['kind']]}: <code>{escape(pair['source'])}</code> is left out, "
            f'<code>{escape(pair["same_as"])}</code> stays{share}</summary><div class="text">{shown}</div></details>'
        )
    return _section("Duplicates", body, "Examples; duplicates.jsonl (data check: with --clean) has every pair.")


def _spoken(messages: Sequence[Mapping[str, Any]]) -> str:
    """What is said and called, without the system prompt."""
    pieces = []
    for turn in messages:
        if turn["role"] != "system":
            pieces.append(turn["content"])
            pieces += [json.dumps(call, ensure_ascii=False) for call in turn.get("tool_calls", ())]
    return "\n".join(pieces)


def _difference(first: str, second: str) -> str:
    """Words that only the first has, and words that only the second has, marked."""
    a, b = _short(first).split(" "), _short(second).split(" ")
    pieces: list[str] = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(escape(" ".join(a[i:j])))
            continue
        pieces += [f"<del>{escape(' '.join(a[i:j]))}</del>"] if i < j else []
        pieces += [f"<ins>{escape(' '.join(b[k:m]))}</ins>"] if k < m else []
    return " ".join(pieces)


def _files(document: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td><code>{escape(name)}</code></td><td class="n">{sum(layouts.values()):,}</td>'
        f"<td>{escape(_counts(layouts.items()))}</td></tr>"
        for name, layouts in list(document["files"].items())[:200]
    )
    return _section("Files", _table(f'<tr><th>file</th><th class="n">rows</th><th>layouts</th></tr>{rows}'))


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name if name != '-' else 'unread'} {count:,}" for name, count in items)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."

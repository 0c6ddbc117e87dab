"""Rows from documentation without a model: pages are read one by one, drafts checked, rows chosen by quota.

The same packs, documentation, number and seed give the same file. Nothing is written before all is done.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.errors import DataRefused
from hivetune.records import Progress, silent
from hivetune.synth.checks import Cited, check_draft, parses
from hivetune.synth.keep import Against, KeptRows, Pool, draw_key, write_rows
from hivetune.synth.make.draft import Draft
from hivetune.synth.make.questions import drafts_of
from hivetune.synth.packs.pack import Pack
from hivetune.synth.sources.page import DocPage, NotUnderstood
from hivetune.synth.sources.places import DocSource, Library, read_source

TEMPLATES = "templates"  # the maker that is no model
SPARE = 6  # drafts to choose from, for each row that is asked for
MIN_SPARE = 4  # of each kind of a page


@dataclass
class CategoryCounts:
    """Counts of a category: made = rejected + kept + not needed."""

    asked: int = 0
    sources: int = 0
    made: int = 0
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)  # pages that were not understood, by reason
    kinds: Counter[str] = field(default_factory=Counter)


def make_rows(
    packs: Sequence[Pack],
    library: Library,
    out: Path,
    *,
    rows: int,
    seed: int,
    against: Against,
    progress: Progress = silent,
) -> dict[str, CategoryCounts]:
    """Write `out`, or leave what was there; return the counts of each category.

    Rows of `against` are not made again, frozen questions are not asked. Raises UsageError for a source that is not
    there, DataRefused when no row could be made, DoesNotFit for a full disk, MachineNotFit without bash, whose grammar
    decides what parses.
    """
    with write_rows(out, TEMPLATES, seed, against) as chosen:
        counts = _fill(chosen.pool, packs, library, rows, seed, progress)
        chosen.pool.settle()
        _choose(chosen, packs, rows, counts)
        if not chosen.num_rows:
            raise _no_rows_error(packs, counts)
    return counts


def _no_rows_error(packs: Sequence[Pack], counts: Mapping[str, CategoryCounts]) -> DataRefused:
    """Return why there is no row: no page was found, none could be read, or no draft was right."""
    num_drafts, pages = (sum(getattr(tally, name) for tally in counts.values()) for name in ("made", "sources"))
    message = f"no row could be made of {', '.join(counts)}: {pages:,} pages found, {num_drafts:,} drafts"
    for tally in counts.values():
        for reason, count in (tally.skipped | tally.rejected).items():
            message += f"; {reason} ({count:,})"
    if num_drafts:
        return DataRefused(message, hint="other pages or another --seed give other drafts; fewer rows in --against too")
    if install := "; ".join(pack.install for pack in packs if pack.install):
        return DataRefused(message, hint=f"install documentation: {install}")
    return DataRefused(
        message,
        hint="a folder needs Markdown, reStructuredText or HTML with headings; a command has to be on the PATH; "
        "see the categories: hivetune data synth",
    )


def sources_of(pack: Pack, library: Library) -> list[DocSource]:
    """Return the pages of a pack that are on this machine, each once."""
    by_path: dict[tuple[str, Path, str], DocSource] = {}
    for names, find in (
        (pack.pages, library.find_manuals),
        (pack.documents, library.find_documents),
        (pack.modules, library.find_modules),
        (pack.help, library.find_help),
    ):
        for name in names:
            for source in find(name):
                by_path.setdefault((source.kind, source.path, source.name if source.kind == "help" else ""), source)
    return list(by_path.values())


def _fill(
    pool: Pool, packs: Sequence[Pack], library: Library, rows: int, seed: int, progress: Progress
) -> dict[str, CategoryCounts]:
    """Read every page once, and check its drafts while it is in memory."""
    sources = {pack.category: sources_of(pack, library) for pack in packs}
    total, num_read = sum(map(len, sources.values())), 0
    counts = {category: CategoryCounts(sources=len(pages)) for category, pages in sources.items()}
    shares = share_out(rows, {pack.category: pack.weight for pack in packs if sources[pack.category] or pack.facts})
    for pack in packs:
        tally, num_pages = counts[pack.category], len(sources[pack.category])
        spare = max(MIN_SPARE, -(-SPARE * shares.get(pack.category, 0) // max(1, num_pages)))
        cited: set[str] = set()
        for source in sources[pack.category]:
            try:
                page = read_source(source)
            except NotUnderstood as reason:
                tally.skipped[str(reason).partition(":")[0]] += 1
                continue
            finally:
                num_read += 1
                progress(num_read, total)
            _offer(pool, tally, pack.category, page, drafts_of(page, seed), spare, seed)
            facts = [fact for fact in pack.facts if fact.source == page.label and page.label not in cited]
            blocks = [[part.split("\n", 1) for part in fact.answer.split("```")[1::2]] for fact in facts]
            shell = [tuple(lines[1].rstrip() for lines in some if len(lines) > 1) for some in blocks]
            written = [
                Draft("fact", ((fact.question, fact.answer),), "", page.text, commands=commands)
                for fact, commands in zip(facts, shell, strict=True)
            ]
            _offer(pool, tally, pack.category, page, written, len(written), seed)
            cited.add(page.label)
        lost = [fact for fact in pack.facts if fact.source not in cited]
        tally.made += len(lost)
        if lost:
            tally.rejected["no-source"] += len(lost)
    return counts


def _offer(
    pool: Pool, tally: CategoryCounts, category: str, page: DocPage, drafts: Iterable[Draft], limit: int, seed: int
) -> None:
    """Check the drafts of a page; of each kind at most `limit` pass."""
    by_kind: dict[str, list[tuple[int, Draft]]] = {}
    source = Cited(page)
    for draft in drafts:
        tally.made += 1
        by_kind.setdefault(draft.kind, []).append((draw_key(seed, draft), draft))
    for candidates in by_kind.values():
        candidates.sort(key=lambda c: c[0])
        accepted = 0
        for key, draft in candidates:
            if accepted == limit:
                break
            # What parses is looked at when a draft is chosen: starting bash takes 10 ms.
            reason = check_draft(draft, source, lambda _code, _language: True, strict=False)
            if reason is not None:
                tally.rejected[reason] += 1
                continue
            accepted += 1
            pool.add(category, page.label, str(page.path), key, draft)


def _choose(out: KeptRows, packs: Sequence[Pack], rows: int, counts: Mapping[str, CategoryCounts]) -> None:
    """Take drafts from the pool until each category has its share, and skip copies."""
    pool = out.pool
    untried = {  # drafts of each kind that were not tried, without the kinds that a pack does not want
        pack.category: {kind: n for kind, n in pool.kinds(pack.category).items() if pack.kind_weight(kind) > 0}
        for pack in packs
    }
    weights = {pack.category: pack.weight for pack in packs if untried[pack.category]}
    shares = share_out(rows, weights, {category: sum(untried[category].values()) for category in weights})
    for category, number in shares.items():
        counts[category].asked = number
    drafts: dict[tuple[str, str], Iterator[tuple[str, str, Draft]]] = {}
    while shares:
        for pack in packs:
            category, tally = pack.category, counts[pack.category]
            aim = tally.kept + shares.get(category, 0)
            while tally.kept < aim and any(untried[category].values()):
                open_ = [kind for kind, number in untried[category].items() if number]
                kind = min(open_, key=lambda kind: (tally.kinds[kind] + 1) / pack.kind_weight(kind))  # which lacks most
                untried[category][kind] -= 1
                if (category, kind) not in drafts:
                    drafts[category, kind] = pool.drafts(category, kind)
                page, path, draft = next(drafts[category, kind])
                reason = None if all(parses(code, "sh") for code in draft.commands) else "does-not-parse"
                reason = reason or out.keep(category, page, path, draft)
                if reason is not None:
                    tally.rejected[reason] += 1
                    continue
                tally.kept += 1
                tally.kinds[kind] += 1
        missing = rows - sum(tally.kept for tally in counts.values())
        going = {category: weight for category, weight in weights.items() if any(untried[category].values())}
        shares = {category: number for category, number in share_out(missing, going).items() if number}


def share_out(total: int, weights: Mapping[str, float], most: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return `total` whole parts by weight (largest remainders), none above its `most`; the rest is shared out again.

    The sum is `total`, or the sum of `most` where that is less. Weights of 0 get nothing.
    """
    shares = dict.fromkeys(weights, 0)
    open_ = {name for name, weight in weights.items() if weight > 0}
    remaining = total
    while remaining > 0 and open_:
        whole = sum(weights[name] for name in open_)
        exact = {name: remaining * weights[name] / whole for name in sorted(open_)}
        parts = {name: int(value) for name, value in exact.items()}
        rest = remaining - sum(parts.values())
        for name in sorted(exact, key=lambda name: (parts[name] - exact[name], name))[:rest]:
            parts[name] += 1
        for name, part in parts.items():
            room = part if most is None else min(part, most[name] - shares[name])
            shares[name] += room
            remaining -= room
        open_ = {name for name in open_ if most is not None and shares[name] < most[name]}
    return shares

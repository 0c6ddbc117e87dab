"""From packs to a file of rows without a model: pages are read one by one, drafts checked, rows chosen by quota.

The same packs, documentation, number and seed give the same file. Nothing is written before all is done.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.base.disk import scratch_folder
from hivetune.records import Progress, silent
from hivetune.synth.checks import Cited, check_draft, parses
from hivetune.synth.keep import KeptRows
from hivetune.synth.make.draft import Draft
from hivetune.synth.make.questions import drafts_of
from hivetune.synth.packs.pack import Pack
from hivetune.synth.pool import Pool, draw_key
from hivetune.synth.sources.page import DocPage, NotUnderstood
from hivetune.synth.sources.places import DocSource, Places, read_source

TEMPLATES = "templates"  # the maker that is no model
SPARE = 6  # drafts that are kept to choose from, for each row that is asked for
MIN_SPARE = 4  # of each kind of a page


@dataclass(frozen=True)
class SynthSettings:
    """What is asked for. `rows` in all; `frozen`: hashes of questions that no row may ask."""

    packs: tuple[Pack, ...]
    places: Places
    rows: int
    seed: int
    frozen: Collection[int] = field(default=frozenset(), repr=False)


@dataclass
class CategoryCounts:
    """made = rejected + kept + not needed."""

    asked: int = 0
    sources: int = 0
    made: int = 0
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)  # pages that were not understood, by reason
    kinds: Counter[str] = field(default_factory=Counter)


def sources_of(pack: Pack, places: Places) -> list[DocSource]:
    """Return the pages of a pack that are on this machine, each once."""
    found: dict[tuple[str, Path, str], DocSource] = {}
    for names, find in (
        (pack.pages, places.find_manuals),
        (pack.info, places.find_info),
        (pack.documents, places.find_documents),
        (pack.modules, places.find_modules),
        (pack.completions, places.find_completions),
        (pack.help, places.find_help),
    ):
        for name in names:
            for source in find(name):
                found.setdefault((source.kind, source.path, source.name if source.kind == "help" else ""), source)
    return list(found.values())


def make_rows(
    settings: SynthSettings,
    against: Iterator[tuple[str, str]],
    write: Callable[[str], object],
    progress: Progress = silent,
) -> dict[str, CategoryCounts]:
    """Make the rows and write each with `write(line)`.

    `against`: (source, text) of rows that none may repeat. Raises MachineNotFit without bash, whose grammar decides
    what parses.
    """
    with scratch_folder() as folder, closing(Pool(folder / "pool.db")) as pool:
        rows = KeptRows(pool, settings.frozen, TEMPLATES, settings.seed)
        rows.remember(against)
        counts = _fill(settings, pool, progress)
        pool.settle()
        _Chooser(settings, pool, rows, counts).choose()
        for line in pool.rows():
            write(line)
    return counts


def _fill(settings: SynthSettings, pool: Pool, progress: Progress) -> dict[str, CategoryCounts]:
    """Read every page once, and check its drafts while it is in memory."""
    found = {pack.category: sources_of(pack, settings.places) for pack in settings.packs}
    total, done = sum(map(len, found.values())), 0
    counts = {category: CategoryCounts(sources=len(sources)) for category, sources in found.items()}
    weights = {pack.category: pack.weight for pack in settings.packs if found[pack.category] or pack.facts}
    asked = share_out(settings.rows, weights)
    for pack in settings.packs:
        sources, tally = found[pack.category], counts[pack.category]
        spare = max(MIN_SPARE, -(-SPARE * asked.get(pack.category, 0) // max(1, len(sources))))
        pages: dict[str, DocPage] = {}
        for source in sources:
            try:
                page = read_source(source)
            except NotUnderstood as reason:
                tally.skipped[str(reason).partition(":")[0]] += 1
                continue
            finally:
                done += 1
                progress(done, total)
            _offer(pool, tally, pack.category, page, drafts_of(page, settings.seed), spare, settings.seed)
            if any(fact.source == page.label for fact in pack.facts):
                pages[page.label] = page
        _offer_facts(pool, tally, pack, pages, settings.seed)
    return counts


def _offer(
    pool: Pool,
    tally: CategoryCounts,
    category: str,
    page: DocPage,
    drafts: Iterable[Draft],
    most: int | None,
    seed: int,
) -> None:
    """Check the drafts of a page; of each kind at most `most` go on."""
    by_kind: dict[str, list[tuple[int, Draft]]] = {}
    source = Cited((page,))
    for draft in drafts:
        tally.made += 1
        by_kind.setdefault(draft.kind, []).append((draw_key(seed, draft), draft))
    for found in by_kind.values():
        found.sort(key=lambda one: one[0])
        taken = 0
        for key, draft in found:
            if taken == most:
                break
            reason = check_draft(draft, source, lambda _code, _language: True, strict=False)
            if reason is not None:
                tally.rejected[reason] += 1
                continue
            taken += 1
            pool.add(category, page.label, str(page.path), key, draft)


def _offer_facts(pool: Pool, tally: CategoryCounts, pack: Pack, pages: dict[str, DocPage], seed: int) -> None:
    """Check hand-written facts like any draft, against the page that they name."""
    for fact in pack.facts:
        page = pages.get(fact.source)
        tally.made += 1
        if page is None:
            tally.rejected["no-source"] += 1
            continue
        code = tuple(part.split("\n", 1)[1].rstrip() for part in fact.answer.split("```")[1::2] if "\n" in part)
        draft = Draft("fact", ((fact.question, fact.answer),), "", page.text, commands=code)
        reason = check_draft(draft, Cited((page,)), lambda _code, _language: True, strict=False)
        if reason is not None:
            tally.rejected[reason] += 1
        else:
            pool.add(pack.category, page.label, str(page.path), draw_key(seed, draft), draft)


class _Chooser:
    """Takes drafts from the pool until each category has its share, looking for copies as it goes."""

    def __init__(self, settings: SynthSettings, pool: Pool, rows: KeptRows, counts: dict[str, CategoryCounts]):
        self._settings, self._pool, self._rows, self._counts = settings, pool, rows, counts
        self._drafts: dict[tuple[str, str], Iterator[tuple[str, str, Draft]]] = {}

    def choose(self) -> None:
        packs = {pack.category: pack for pack in self._settings.packs}
        kinds = {  # without those that the pack does not want: what is left of them is nothing to go on with
            category: {kind: n for kind, n in self._pool.kinds(category).items() if pack.kind_weight(kind) > 0}
            for category, pack in packs.items()
        }
        weights = {category: pack.weight for category, pack in packs.items() if kinds[category]}
        most = {category: sum(kinds[category].values()) for category in weights}
        for category, asked in share_out(self._settings.rows, weights, most).items():
            self._counts[category].asked = asked
        wanted = {category: self._counts[category].asked for category in weights}
        while wanted:
            for category, number in wanted.items():
                self._fill_category(packs[category], kinds[category], number)
            left = self._settings.rows - sum(tally.kept for tally in self._counts.values())
            going = {name: weight for name, weight in weights.items() if any(kinds[name].values())}
            wanted = {name: n for name, n in share_out(left, going).items() if n}

    def _fill_category(self, pack: Pack, left: dict[str, int], number: int) -> None:
        """Take drafts until the category has `number` more rows.

        `left`: drafts of each kind that were not tried; the kind that lacks most is tried next.
        """
        tally = self._counts[pack.category]
        aim = tally.kept + number
        while tally.kept < aim and any(left.values()):
            open_ = [kind for kind in left if left[kind]]
            kind = min(open_, key=lambda kind: (tally.kinds[kind] + 1) / pack.kind_weight(kind))
            left[kind] -= 1
            self._try(pack.category, kind, tally)

    def _try(self, category: str, kind: str, tally: CategoryCounts) -> None:
        drafts = self._drafts.get((category, kind))
        if drafts is None:
            drafts = self._drafts[category, kind] = self._pool.drafts(category, kind)
        page, path, draft = next(drafts)
        codes = [(code, "sh") for code in draft.commands] + [(code, "python") for code in draft.python]
        reason = None if all(parses(*code) for code in codes) else "does-not-parse"
        reason = reason or self._rows.keep(category, page, path, draft)
        if reason is not None:
            tally.rejected[reason] += 1
            return
        tally.kept += 1
        tally.kinds[kind] += 1


def share_out(total: int, weights: Mapping[str, float], most: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return `total` whole parts by weight (largest remainders), none above its `most`; what is cut is shared out
    again.

    The sum is `total`, or the sum of `most` where that is less. Weights of 0 get nothing.
    """
    given = dict.fromkeys(weights, 0)
    open_ = {name for name, weight in weights.items() if weight > 0}
    left = total
    while left > 0 and open_:
        whole = sum(weights[name] for name in open_)
        exact = {name: left * weights[name] / whole for name in sorted(open_)}
        parts = {name: int(value) for name, value in exact.items()}
        rest = left - sum(parts.values())
        for name in sorted(exact, key=lambda name: (parts[name] - exact[name], name))[:rest]:
            parts[name] += 1
        for name, part in parts.items():
            room = part if most is None else min(part, most[name] - given[name])
            given[name] += room
            left -= room
        open_ = {name for name in open_ if most is not None and given[name] < most[name]}
    return given

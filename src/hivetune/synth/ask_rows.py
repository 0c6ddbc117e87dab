"""Rows that a model words: a passage in, a question with its answer out, checked as strictly as can be. Resumable.

Replies are kept below the home by model and passage, so that a run that was killed, or whose endpoint failed, goes on
where it was: the same command asks only for what is missing, and ends with the same file.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hivetune.base.disk import scratch_folder, write_whole
from hivetune.data.frozen import kept_out
from hivetune.errors import DataRefused, DoesNotFit, HivetuneError, UsageError
from hivetune.judge.compare import Prompt
from hivetune.judge.measure.answers import KeptAnswers, ask_prompt, kept_side
from hivetune.judge.measure.artefacts import Asked, find_artefact, open_artefact
from hivetune.llama.backend import ServerSettings
from hivetune.records import Progress, silent
from hivetune.release.gguf import SERVED_QUANT
from hivetune.synth.against import Against
from hivetune.synth.ask import CHARS_PER_TOKEN, PAIR_TOKENS, draft_of, fits, passages_of, read_reply, request
from hivetune.synth.keep import KeptRows
from hivetune.synth.maker import CategoryCounts, sources_of
from hivetune.synth.packs.pack import Pack
from hivetune.synth.pool import Pool
from hivetune.synth.quotas import share_out
from hivetune.synth.report import synth_document
from hivetune.synth.sources.page import DocPage, NotUnderstood
from hivetune.synth.sources.places import DocSource, Places, read_source
from hivetune.synth.verify.checks import Cited, check_draft
from hivetune.synth.verify.parsers import parses

SLOTS = 4
_MOST_FAILURES = 5  # in a row: the endpoint is gone, and what came so far is kept
CACHED_PAGES = 32


@dataclass(frozen=True)
class AskSettings:
    """`model`: as in `hivetune compare`. `budget`: most tokens of prompts and replies; None: no limit."""

    model: str
    rows: int
    seed: int
    budget: int | None = None
    against: Sequence[str] = field(default=())


@dataclass(frozen=True)
class _Passage:
    """Where a passage is: the n-th of a page."""

    category: str
    source: DocSource
    number: int


def ask_rows(
    packs: Sequence[Pack], places: Places, out: Path, settings: AskSettings, progress: Progress = silent
) -> dict[str, Any]:
    """Writes `out`, or leaves what was there; the report.

    Raises UsageError for a model that can't be asked, HivetuneError when it fails again and again (replies are kept),
    DataRefused when no reply could be used.
    """
    side = find_artefact(settings.model, None, SERVED_QUANT)
    if side.figures is not None:
        raise UsageError(f"{settings.model}: a file of figures can't be asked", hint="give URL#MODEL or a .gguf file")
    compared = Against(settings.against)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            scratch_folder() as folder,
            closing(Pool(folder / "pool.db")) as pool,
            kept_side(side, PAIR_TOKENS, SLOTS) as kept,
            open_artefact(side, ServerSettings(slots=SLOTS)) as (asked, _),
            write_whole(out) as file,
        ):
            asking = _Asking(packs, settings, KeptRows(pool, kept_out(), side.label, settings.seed), asked, kept)
            asking.rows.remember(iter(compared))
            asking.run(places, progress)
            for line in pool.rows():
                file.write(f"{line}\n".encode())
            if not asking.rows.number_kept:
                why = _reasons(asking.counts)
                raise DataRefused(
                    f"no row could be made of {asking.num_replies:,} replies of {side.label}: {why}",
                    hint="a larger model follows the instruction better; without --ask no model is needed",
                )
    except OSError as error:
        raise DoesNotFit(f"{out} cannot be written: {error.strerror}", hint="make room, or write elsewhere") from None
    document = synth_document(packs, asking.counts, out, rows=settings.rows, seed=settings.seed, maker=side.label)
    return {
        **document,
        "compared_with": compared.rows,
        "not_comparable": compared.unreadable,
        "tokens": asking.tokens,
        "budget": settings.budget,
        "asked_now": asking.asked_now,
        "unanswered": asking.unanswered,
    }


def _reasons(counts: Mapping[str, CategoryCounts]) -> str:
    total: dict[str, int] = {}
    for tally in counts.values():
        for reason, count in tally.rejected.items():
            total[reason] = total.get(reason, 0) + count
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(total.items())) or "none came"


class _Asking:
    """Goes through the passages in an order that the seed draws, until there are enough rows or no budget is left."""

    def __init__(self, packs: Sequence[Pack], settings: AskSettings, rows: KeptRows, asked: Asked, kept: KeptAnswers):
        self._packs, self._settings = packs, settings
        self.rows, self._asked, self._kept = rows, asked, kept
        self.counts: dict[str, CategoryCounts] = {}
        self.tokens = self.asked_now = self.unanswered = self.num_replies = self._failed_in_a_row = 0
        self._page = lru_cache(CACHED_PAGES)(read_source)

    def run(self, places: Places, progress: Progress) -> None:
        passages = {pack.category: self._passages(pack, places) for pack in self._packs}
        weights = {pack.category: pack.weight for pack in self._packs if passages[pack.category]}
        for category, number in share_out(self._settings.rows, weights).items():
            self.counts[category].asked = number
        left = {category: iter(found) for category, found in passages.items() if category in weights}
        with ThreadPoolExecutor(SLOTS) as pool:
            while left and not self._spent():
                batch = [one for found in left.values() for one in itertools.islice(found, 1)]
                batch = [one for one in batch if self._wanted(one.category)]
                left = {name: found for name, found in left.items() if any(one.category == name for one in batch)}
                for start in range(0, len(batch), SLOTS):
                    self._take(batch[start : start + SLOTS], pool)
                    progress(self.rows.number_kept, self._settings.rows)
                    if self._spent():
                        return

    def _spent(self) -> bool:
        return self._settings.budget is not None and self.tokens >= self._settings.budget

    def _wanted(self, category: str) -> bool:
        return self.counts[category].kept < self.counts[category].asked

    def _passages(self, pack: Pack, places: Places) -> list[_Passage]:
        """Every passage of a fitting length, pages in turns."""
        tally = self.counts[pack.category] = CategoryCounts()
        by_page = []
        draw = random.Random(f"{self._settings.seed} {pack.category} asked")
        for source in sources_of(pack, places):
            tally.sources += 1
            try:
                page = self._page(source)
            except NotUnderstood as reason:
                tally.skipped[str(reason).partition(":")[0]] += 1
                continue
            found = [_Passage(pack.category, source, n) for n, (_, text) in enumerate(passages_of(page)) if fits(text)]
            draw.shuffle(found)
            by_page.append(found)
        draw.shuffle(by_page)
        turns = itertools.zip_longest(*by_page)
        return [one for turn in turns for one in turn if one is not None]

    def _take(self, batch: Sequence[_Passage], pool: ThreadPoolExecutor) -> None:
        """One batch: replies come in any order, and are taken in the order of the passages."""
        prompts = [self._prompt(one) for one in batch]
        self.asked_now += sum(prompt.key not in self._kept.answers for prompt in prompts)
        for one, prompt, reply in zip(batch, prompts, pool.map(self._reply, prompts), strict=True):
            self.tokens += sum(len(message["content"]) for message in prompt.messages) // CHARS_PER_TOKEN
            if isinstance(reply, HivetuneError):
                self._skip(reply)
                continue
            text, tokens = reply
            self._failed_in_a_row = 0
            self.num_replies += 1
            self.tokens += tokens
            if self._wanted(one.category):
                self._use(one, text)

    def _prompt(self, one: _Passage) -> Prompt:
        page = self._page(one.source)
        section, text = self._text(one, page)
        draw = random.Random(f"{self._settings.seed} {page.label} {one.number}")
        messages = request(page, section, text, draw)
        return Prompt(one.number, page.label, page.label, None, one.category, page.label, messages, (), None, "", None)

    def _text(self, one: _Passage, page: DocPage) -> tuple[str, str]:
        return next(itertools.islice(passages_of(page), one.number, None))

    def _reply(self, prompt: Prompt) -> tuple[str, int] | HivetuneError:
        """The reply and its tokens, or how the endpoint failed on this passage. Called by several threads."""
        found = self._kept.answers.get(prompt.key)
        if found is None:
            try:
                answer = ask_prompt(self._asked, self._kept.label, prompt, PAIR_TOKENS)
            except UsageError:
                raise
            except HivetuneError as error:
                return error
            self._kept.keep(prompt, answer)
            found = self._kept.answers[prompt.key]
        return found.text, found.new_tokens or len(found.text) // CHARS_PER_TOKEN

    def _skip(self, error: HivetuneError) -> None:
        self.unanswered += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _MOST_FAILURES:
            raise HivetuneError(
                f"{error.message}; so did the {_MOST_FAILURES - 1} passages before it",
                hint="replies are kept; the same command goes on",
            )

    def _use(self, one: _Passage, text: str) -> None:
        page = self._page(one.source)
        section, passage = self._text(one, page)
        tally = self.counts[one.category]
        tally.made += 1
        pair = read_reply(text)
        if isinstance(pair, str):
            tally.rejected[pair] += 1
            return
        draft = draft_of(pair, section, f"{page.label} {page.command or ''}\n{passage}")
        reason = check_draft(draft, Cited((page,)), parses, strict=True)
        reason = reason or self.rows.keep(one.category, page.label, str(page.path), draft)
        if reason is not None:
            tally.rejected[reason] += 1
            return
        tally.kept += 1
        tally.kinds[draft.kind] += 1

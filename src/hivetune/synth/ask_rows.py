"""Rows that a model words: a passage in, a question with its answer out, checked as strictly as can be. Resumable.

Replies are kept below the home by model and passage, so that a run that was killed, or whose endpoint failed, continues
where it was: the same command asks only for what is missing, and ends with the same file.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hivetune.errors import DataRefused, HivetuneError, UsageError
from hivetune.judge.answers import Prompt, StoredAnswers, ask_prompt, stored_side
from hivetune.judge.artefacts import Answerer, find_artefact, open_artefact
from hivetune.llama.backend import ServerSettings
from hivetune.records import Progress, silent
from hivetune.release.gguf import SERVED_QUANT
from hivetune.synth.checks import Cited, check_draft, parses
from hivetune.synth.keep import Against, KeptRows, write_rows
from hivetune.synth.make.draft import Draft
from hivetune.synth.maker import CategoryCounts, share_out, sources_of
from hivetune.synth.packs.pack import Pack
from hivetune.synth.report import synth_document
from hivetune.synth.sources.page import DocPage, NotUnderstood
from hivetune.synth.sources.places import DocSource, Library, read_source

SLOTS = 4
_MAX_FAILURES = 5  # in a row: the endpoint is gone, and what came so far is kept
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
    """The place of a passage: the n-th of a page."""

    category: str
    source: DocSource
    number: int


def ask_rows(
    packs: Sequence[Pack], library: Library, out: Path, settings: AskSettings, progress: Progress = silent
) -> dict[str, Any]:
    """Write `out` with rows that a model words, or leave what was there; return the report.

    Raises UsageError for a model that can't be asked, HivetuneError when it fails again and again (replies are kept),
    DataRefused when no reply could be used.
    """
    side = find_artefact(settings.model, None, SERVED_QUANT)
    if side.figures is not None:
        raise UsageError(f"{settings.model} is a file of figures, not a model", hint="give URL#MODEL or a .gguf file")
    compared = Against(settings.against)
    with (
        write_rows(out, side.label, settings.seed, compared) as rows,
        stored_side(side, PAIR_TOKENS, SLOTS) as stored,
        open_artefact(side, ServerSettings(slots=SLOTS)) as (answerer, _),
    ):
        asking = _Asking(packs, settings, rows, answerer, stored)
        asking.run(library, progress)
        if not rows.num_rows:
            rejected = sum((tally.rejected for tally in asking.counts.values()), Counter[str]())
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items())) or "none came"
            raise DataRefused(
                f"no usable row in {asking.num_replies:,} replies of {side.label}: {reasons}",
                hint="a larger model follows the instruction better; without --ask no model is needed",
            )
    document = synth_document(
        packs, asking.counts, out, rows=settings.rows, seed=settings.seed, maker=side.label, against=compared
    )
    return {
        **document,
        "tokens": asking.tokens,
        "budget": settings.budget,
        "asked_now": asking.asked_now,
        "unanswered": asking.unanswered,
    }


class _Asking:
    """Goes through the passages in an order that the seed draws, until there are enough rows or no budget is left."""

    def __init__(
        self, packs: Sequence[Pack], settings: AskSettings, rows: KeptRows, answerer: Answerer, stored: StoredAnswers
    ):
        self._packs, self._settings = packs, settings
        self.rows, self._answerer, self._stored = rows, answerer, stored
        self.counts: dict[str, CategoryCounts] = {}
        self.tokens = self.asked_now = self.unanswered = self.num_replies = self._failed_in_a_row = 0
        self._page = lru_cache(CACHED_PAGES)(read_source)

    def run(self, library: Library, progress: Progress) -> None:
        passages = {pack.category: self._passages(pack, library) for pack in self._packs}
        weights = {pack.category: pack.weight for pack in self._packs if passages[pack.category]}
        for category, number in share_out(self._settings.rows, weights).items():
            self.counts[category].asked = number
        remaining = {category: iter(some) for category, some in passages.items() if category in weights}
        with ThreadPoolExecutor(SLOTS) as pool:
            while remaining and not self._spent():
                batch = [passage for p in remaining.values() for passage in itertools.islice(p, 1)]
                batch = [passage for passage in batch if self._is_needed(passage.category)]
                remaining = {name: some for name, some in remaining.items() if any(p.category == name for p in batch)}
                for start in range(0, len(batch), SLOTS):
                    self._take(batch[start : start + SLOTS], pool)
                    progress(self.rows.num_rows, self._settings.rows)
                    if self._spent():
                        return

    def _spent(self) -> bool:
        return self._settings.budget is not None and self.tokens >= self._settings.budget

    def _is_needed(self, category: str) -> bool:
        return self.counts[category].kept < self.counts[category].asked

    def _passages(self, pack: Pack, library: Library) -> list[_Passage]:
        """Return every passage of a fitting length, pages in turns."""
        tally = self.counts[pack.category] = CategoryCounts()
        by_page = []
        draw = random.Random(f"{self._settings.seed} {pack.category} asked")
        for source in sources_of(pack, library):
            tally.sources += 1
            try:
                page = self._page(source)
            except NotUnderstood as reason:
                tally.skipped[str(reason).partition(":")[0]] += 1
                continue
            some = [_Passage(pack.category, source, n) for n, (_, text) in enumerate(passages_of(page)) if fits(text)]
            draw.shuffle(some)
            by_page.append(some)
        draw.shuffle(by_page)
        return [passage for turn in itertools.zip_longest(*by_page) for passage in turn if passage is not None]

    def _take(self, batch: Sequence[_Passage], pool: ThreadPoolExecutor) -> None:
        """Ask for one batch; replies come in any order, and are taken in the order of the passages."""
        prompts = []
        for p in batch:
            page = self._page(p.source)
            draw = random.Random(f"{self._settings.seed} {page.label} {p.number}")
            messages = request(page, *self._text(p, page), draw)
            prompts.append(
                Prompt(p.number, page.label, page.label, None, p.category, page.label, messages, (), None, "", None)
            )
        self.asked_now += sum(prompt.key not in self._stored.answers for prompt in prompts)
        for passage, prompt, reply in zip(batch, prompts, pool.map(self._reply, prompts), strict=True):
            self.tokens += sum(len(message["content"]) for message in prompt.messages) // CHARS_PER_TOKEN
            if isinstance(reply, HivetuneError):
                self.unanswered += 1
                self._failed_in_a_row += 1
                if self._failed_in_a_row >= _MAX_FAILURES:
                    raise HivetuneError(
                        f"{reply.message}; the {_MAX_FAILURES - 1} passages before it failed too",
                        hint="replies are kept; the same command continues",
                    )
                continue
            text, tokens = reply
            self._failed_in_a_row = 0
            self.num_replies += 1
            self.tokens += tokens
            if self._is_needed(passage.category):
                self._use(passage, text)

    def _text(self, passage: _Passage, page: DocPage) -> tuple[str, str]:
        return next(itertools.islice(passages_of(page), passage.number, None))

    def _reply(self, prompt: Prompt) -> tuple[str, int] | HivetuneError:
        """Return the reply and its tokens, or how the endpoint failed on this passage. Called by several threads."""
        stored = self._stored.answers.get(prompt.key)
        if stored is None:
            try:
                answer = ask_prompt(self._answerer, self._stored.label, prompt, PAIR_TOKENS)
            except UsageError:
                raise
            except HivetuneError as error:
                return error
            self._stored.keep(prompt, answer)
            stored = self._stored.answers[prompt.key]
        return stored.text, stored.new_tokens or len(stored.text) // CHARS_PER_TOKEN

    def _use(self, item: _Passage, text: str) -> None:
        page = self._page(item.source)
        section, passage = self._text(item, page)
        tally = self.counts[item.category]
        tally.made += 1
        pair = read_reply(text)
        if isinstance(pair, str):
            tally.rejected[pair] += 1
            return
        draft = draft_of(pair, section, f"{page.label} {page.command or ''}\n{passage}")
        reason = check_draft(draft, Cited(page), parses, strict=True)
        reason = reason or self.rows.keep(item.category, page.label, str(page.path), draft)
        if reason is not None:
            tally.rejected[reason] += 1
            return
        tally.kept += 1
        tally.kinds[draft.kind] += 1


# What the model is asked, and how its reply is read.

MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 80, 1500
PAIR_TOKENS = 320
CHARS_PER_TOKEN = 4  # of English prose, to count what a prompt costs where nobody tells
ASKED_KIND = "asked"
_SYSTEM = (
    "You write training rows for an assistant: one question that a person might type, and its answer. Use only what "
    "the passage says. Bring in no option, path, number, name or fact that the passage does not have. Keep names, "
    "options and numbers exactly as they are written there. Reply with JSON alone: "
    '{"question": "...", "answer": "..."}. If the passage has nothing to ask about, reply {"question": null}.'
)
_WISHES = (
    "Let a beginner ask, in plain words.",
    "Let the question be a task that somebody wants to get done.",
    "Let the question be short, and the answer a command or a name with one sentence.",
    "Let somebody ask who reads a script and does not know what a part of it does.",
    "Let somebody ask who got an unexpected result.",
    "Let the question combine two facts of the passage.",
    "Let the question begin with something other than How or What.",
)
_REFUSAL = re.compile(
    r"^\W*(?:I'?m sorry|I am sorry|Sorry|I can(?:no|')t|As an AI|I am unable|I'm unable)\b", re.IGNORECASE
)
_LABELLED = re.compile(r"(?:^|\n)\W*(?:question|q)\W*:\s*(.+?)\n+\W*(?:answer|a)\W*:\s*(.+)", re.IGNORECASE | re.DOTALL)
_CODE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def passages_of(page: DocPage) -> Iterator[tuple[str, str]]:
    """Yield (section, text) of each passage of the page that suits one question."""
    for entry in page.entries:
        yield entry.section, f"{entry.usage}\n{entry.text}"
    for passage in page.passages:
        yield passage.heading, passage.text


def fits(text: str) -> bool:
    return MIN_PASSAGE_CHARS <= len(text) <= MAX_PASSAGE_CHARS


def request(page: DocPage, section: str, passage: str, draw: random.Random) -> tuple[dict[str, str], ...]:
    """Return the messages; the instruction varies, so that the questions vary."""
    command = f" It documents the command `{page.command}`." if page.command else ""
    question = f"From {page.label}, section {section}.{command}\n\nPASSAGE\n{passage}\n\n{draw.choice(_WISHES)}"
    return {"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}


def read_reply(text: str) -> tuple[str, str] | str:
    """Return (question, answer), or the reason why there is none.

    Reads JSON, also with text around it, and lines with labels.
    """
    start = text.find("{")
    document: Any = None
    if start >= 0:
        try:
            document, _ = json.JSONDecoder(strict=False).raw_decode(text[start:])
        except (ValueError, RecursionError):
            document = None
    if isinstance(document, Mapping) and "question" in document:
        if document["question"] is None:
            return "refused"
        question, answer = document["question"], document.get("answer")
    elif labelled := _LABELLED.search(text):
        question, answer = labelled[1], labelled[2]
    else:
        return "refused" if _REFUSAL.match(text) else "not-a-pair"
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip() or not answer.strip():
        return "not-a-pair"
    return "refused" if _REFUSAL.match(answer) else (question.strip(), answer.strip())


def draft_of(pair: tuple[str, str], section: str, passage: str) -> Draft:
    """Return the pair as a draft; code in its answer is parsed like any other."""
    blocks = [(language, code.strip("\n")) for language, code in _CODE.findall(pair[1])]
    shell = tuple(code for language, code in blocks if language in ("", "bash", "sh", "shell", "console"))
    python = tuple(code for language, code in blocks if language in ("python", "py"))
    return Draft(ASKED_KIND, (pair,), section, passage, commands=shell, python=python)

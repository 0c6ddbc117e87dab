"""Rows from documentation: pages are read in an order that the seed draws, drafts are checked, each category gets its
share.

The same packs, documentation, number and seed give the same file.
"""

import hashlib
import json
import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_whole
from hivetune.data.frozen import frozen_hashes
from hivetune.data.prepare.keys import group_hash, question
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, DoesNotFit, MachineNotFit
from hivetune.records import Message, Progress, silent
from hivetune.synth.packs import DocSource, Library, Pack, read_source
from hivetune.synth.page import DocPage, NotUnderstood, options_in
from hivetune.synth.questions import KIND_WEIGHTS, Draft, drafts_of
from hivetune.synth.sentences import word_list

TEMPLATES = "templates"  # the maker that is no model
SAMPLES = 12  # rows of the report
MAX_DRAFTS_OF_PAGE = 200
MAX_QUESTION_CHARS, MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 700, 2, 1600
# Share of function words in prose: 0.25 to 0.5 in manuals, 0.1 in terse ones, near 0 in other languages.
MIN_ENGLISH, PROSE_WORDS = 0.05, 30
NEAR_SHARE = 0.8
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

DRAFT_REASONS: Mapping[str, str] = {
    "length": "the question or the answer is too short or too long for a row",
    "other-language": "the text is not English",
    "unknown-option": "an option is named that the source does not have",
    "invented-exists": "the option that should not exist is in the source",
    "does-not-parse": "a command does not parse",
    "duplicate": "equal to a row that is kept already, or to one that it is compared with",
    "near-duplicate": "nearly equal to a row that is kept already, or to one that it is compared with",
    "frozen-question": "it asks a frozen question, which no row may teach",
    "no-source": "the page that it cites is not on this machine",
    "control-character": "the text has characters that a terminal obeys",
}

Rephrase = Callable[[str], str]
"""Returns another wording of a question, or the question itself where the new one can't be used."""


class Against:
    """The rows to compare with, read once. `unreadable`: number of rows without a text to compare."""

    def __init__(self, sources: Sequence[str]):
        self._sources = sources
        self.rows = self.unreadable = 0

    def __iter__(self) -> Iterator[str]:
        """Yield question and answer of each row. Raises UsageError for a file that is not there."""
        for raw in rows_of_files(self._sources) if self._sources else ():
            try:
                example = example_of(raw)
            except RowRefused:
                self.unreadable += 1
                continue
            self.rows += 1
            yield "\n".join(message.content for message in example.messages if message.role != "system")


def make_rows(
    packs: Sequence[Pack],
    library: Library,
    out: Path,
    *,
    rows: int,
    seed: int,
    against: Sequence[str] = (),
    maker: str = TEMPLATES,
    rephrase: Rephrase = lambda question: question,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write `out`, or leave what was there; return the document of `--json`.

    Rows of `against` are not made again, frozen questions are not asked. Raises UsageError for a source that is not
    there, DataRefused when no row could be made, DoesNotFit for a full disk, MachineNotFit without bash, whose grammar
    decides what parses.
    """
    compared, seen, frozen = Against(against), SeenRows(), frozen_hashes()
    for text in compared:
        seen.add(text)
    categories = [_Category(pack, library.sources_of(pack), seed) for pack in packs]
    open_ones = [category for category in categories if category.sources or category.pack.facts]
    kept: list[dict[str, Any]] = []
    while open_ones and len(kept) < rows:  # a category that has no more gives its share to the others
        part, rest = divmod(rows - len(kept), len(open_ones))
        for place, category in enumerate(list(open_ones)):
            share = part + (place < rest)
            category.asked = category.asked or share
            for _ in range(share):
                row = category.next_row(seen, frozen, rephrase)
                if row is None:
                    open_ones.remove(category)
                    break
                row["synth"] |= {"maker": maker, "seed": seed}
                kept.append(row)
                progress(len(kept), rows)
    if not kept:
        raise _no_rows_error(categories)
    kept.sort(key=lambda row: _key(seed, json.dumps(row["messages"])))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(out) as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in kept)
    except OSError as error:
        raise DoesNotFit(f"{out} cannot be written: {error.strerror}", hint="make room, or write elsewhere") from None
    return {
        "schema": 1,
        "out": str(out),
        "asked": rows,
        "rows": len(kept),
        "rejected": dict(sorted(sum((each.rejected for each in categories), Counter[str]()).items())),
        "seed": seed,
        "maker": maker,
        "categories": [each.counts() for each in categories],
        "empty": [each.pack.category for each in categories if not each.kinds],
        "samples": kept[:SAMPLES],
        "compared_with": compared.rows,
        "not_comparable": compared.unreadable,
    }


def _no_rows_error(categories: Sequence["_Category"]) -> DataRefused:
    """Return why there is no row: no page was found, none could be read, or no draft was right."""
    reasons = sum((each.skipped + each.rejected for each in categories), Counter[str]())
    pages = sum(len(each.sources) for each in categories)
    message = f"no row could be made of {', '.join(each.pack.category for each in categories)}: {pages:,} pages found"
    message += "".join(f"; {reason} ({count:,})" for reason, count in sorted(reasons.items()))
    install = "; ".join(each.pack.install for each in categories if each.pack.install)
    hint = "a folder needs Markdown, reStructuredText or HTML with headings; see the categories: hivetune synth"
    if any(each.rejected for each in categories):
        hint = "another --seed gives other drafts; fewer rows in --against too"
    elif install and not pages:
        hint = f"install documentation: {install}"
    return DataRefused(message, hint=hint)


class _Category:
    """The rows of a pack: one of each page, then a second of each, and so on.

    Of a page comes next the kind that the category lacks most. Pages are read when they are first needed. `skipped`:
    pages that were not understood, by reason.
    """

    def __init__(self, pack: Pack, sources: Sequence[DocSource], seed: int):
        self.pack, self.sources, self._seed = pack, sources, seed
        self.asked = 0
        self.rejected, self.skipped, self.kinds = Counter[str](), Counter[str](), Counter[str]()
        self._drafts = self._all_drafts()

    def counts(self) -> dict[str, Any]:
        """Return the counts for the report."""
        named = {"category": self.pack.category, "title": self.pack.title, "install": self.pack.install}
        numbers = {"asked": self.asked, "sources": len(self.sources), "kept": self.kinds.total()}
        counters = {name: dict(sorted(getattr(self, name).items())) for name in ("rejected", "skipped", "kinds")}
        return {**named, **numbers, **counters}

    def next_row(
        self, seen: "SeenRows", frozen: frozenset[int] | set[int], rephrase: Rephrase
    ) -> dict[str, Any] | None:
        """Return the next row that passes the checks, None when there are no more drafts.

        Its `session` is the page, so that a split keeps all questions on one page together.
        """
        for page, draft in self._drafts:
            text = f"{draft.question}\n{draft.answer}"
            reason = check_draft(draft, page) or seen.look(text)
            if reason is None and group_hash(f"question:{question([Message('user', draft.question)])}") in frozen:
                reason = "frozen-question"
            if reason is not None:
                self.rejected[reason] += 1
                continue
            seen.add(text)
            self.kinds[draft.kind] += 1
            turns = (("user", rephrase(draft.question)), ("assistant", draft.answer))
            messages = [{"role": role, "content": content} for role, content in turns]
            row: dict[str, Any] = {"messages": messages, "category": self.pack.category}
            row["session"] = f"synth {page.label}"
            row |= {"checker": {"name": "contains_any", "any": list(draft.right)}} if draft.right else {}
            source = {"page": page.label, "section": draft.section, "file": str(page.path)}
            digest = hashlib.sha256(draft.passage.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            row["synth"] = {"kind": draft.kind, "sources": [source], "passage_sha256": digest}
            row["synth"] |= {"absent": [draft.absent]} if draft.absent else {}
            return row
        return None

    def _all_drafts(self) -> Iterator[tuple[DocPage, Draft]]:
        facts: dict[str, list[Draft]] = {}
        for fact in self.pack.facts:
            command = "\n".join(part.partition("\n")[2].strip() for part in fact.answer.split("```")[1::2])
            draft = Draft("fact", fact.question, fact.answer, "", fact.answer, command=command)
            facts.setdefault(fact.source, []).append(draft)
        waiting: list[tuple[DocPage, dict[str, list[Draft]]]] = []
        for source in sorted(self.sources, key=lambda each: (each.name not in facts, _key(self._seed, each.name))):
            try:
                page = read_source(source)
            except NotUnderstood as reason:
                self.skipped[str(reason).partition(":")[0]] += 1
                continue
            kinds: dict[str, list[Draft]] = {}
            for draft in [*drafts_of(page, self._seed), *facts.pop(page.label, ())]:
                kinds.setdefault(draft.kind, []).append(draft)
            for some in kinds.values():
                some.sort(key=lambda draft: _key(self._seed, draft.question + draft.answer), reverse=True)
                del some[: -MAX_DRAFTS_OF_PAGE or None]
            waiting.append((page, kinds))
            yield from self._one_of(page, kinds)
        if facts:
            self.rejected["no-source"] += sum(map(len, facts.values()))
        while waiting := [(page, kinds) for page, kinds in waiting if any(kinds.values())]:
            for page, kinds in waiting:
                yield from self._one_of(page, kinds)

    def _one_of(self, page: DocPage, kinds: Mapping[str, list[Draft]]) -> Iterator[tuple[DocPage, Draft]]:
        left = [kind for kind, some in kinds.items() if some]
        if left:
            kind = min(left, key=lambda kind: ((self.kinds[kind] + 1) / KIND_WEIGHTS[kind], kind))
            yield page, kinds[kind].pop()


def _key(seed: int, text: str) -> int:
    """Return a number for the order of a text, the same for the same seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest())


def check_draft(draft: Draft, page: DocPage) -> str | None:
    """Return the first reason against a draft, or None. Raises MachineNotFit without bash."""
    text = f"{draft.question} {draft.answer}"
    if _CONTROL.search(text):
        return "control-character"
    fits = MIN_ANSWER_CHARS <= len(draft.answer.strip()) <= MAX_ANSWER_CHARS
    if len(draft.question) > MAX_QUESTION_CHARS or not fits:
        return "length"
    if not is_english(f"{text} {draft.passage[:2000]}"):
        return "other-language"
    if draft.absent and draft.absent in page.options:
        return "invented-exists"
    if (options_in(text) - {draft.absent}) - page.options:
        return "unknown-option"
    return None if not draft.command or _parses(draft.command) else "does-not-parse"


def is_english(text: str) -> bool:
    """Return whether there are few letters of other scripts, and as many function words as prose has."""
    letters, plain = sum(map(str.isalpha, text)), sum(c.isascii() and c.isalpha() for c in text)
    words = re.findall(r"[a-z]+", text.lower())
    common = sum(word in word_list("english") for word in words)
    return plain >= 0.95 * letters and (len(words) < PROSE_WORDS or common >= MIN_ENGLISH * len(words))


def _parses(code: str) -> bool:
    """Return whether shell code parses by bash's grammar; nothing is run."""
    bash = shutil.which("bash")
    if bash is None:
        raise MachineNotFit("commands are checked by bash's grammar", hint="install bash")
    command = [bash, "--norc", "--noprofile", "-n"]
    return subprocess.run(command, input=code.encode(), capture_output=True, check=False).returncode == 0


class SeenRows:
    """Texts by their words: equal ones, and nearly equal ones (Jaccard similarity of word triples at least 0.8).

    Two such sets share at least one of their first triples in any common order (Chaudhuri et al., ICDE 2006): only
    those are looked up.
    """

    def __init__(self) -> None:
        self._exact: set[tuple[str, ...]] = set()
        self._sets: list[frozenset[tuple[str, ...]]] = []
        self._having: dict[tuple[str, ...], list[int]] = {}

    def look(self, text: str) -> str | None:
        """Return the reason against a text, or None."""
        words, triples, first = _words_of(text)
        if words in self._exact:
            return "duplicate"
        for number in {number for triple in first for number in self._having.get(triple, ())}:
            other = self._sets[number]
            if len(triples & other) >= NEAR_SHARE * len(triples | other):
                return "near-duplicate"
        return None

    def add(self, text: str) -> None:
        words, triples, first = _words_of(text)
        if words not in self._exact:
            self._exact.add(words)
            for triple in first:
                self._having.setdefault(triple, []).append(len(self._sets))
            self._sets.append(triples)


def _words_of(text: str) -> tuple[tuple[str, ...], frozenset[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the words of a text, its word triples, and the triples that are looked up."""
    words: tuple[str, ...] = tuple(re.findall(r"\w+", text.lower()))
    triples: frozenset[tuple[str, ...]] = frozenset(zip(words, words[1:], words[2:], strict=False))
    triples = triples or frozenset({words})
    return words, triples, sorted(triples)[: len(triples) - math.ceil(NEAR_SHARE * len(triples)) + 1]

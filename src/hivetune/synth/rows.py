"""Rows from documentation: pages are read in an order that the seed draws, drafts are checked, each category gets its
share.

The same packs, documentation, number and seed give the same file.
"""

import hashlib
import json
import re
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from rensa import RMinHash

from hivetune.base.disk import write_whole
from hivetune.checkers.limited import TooSlow, run_limited
from hivetune.data.frozen import frozen_hashes
from hivetune.data.prepare.keys import group_hash, question
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, DoesNotFit, MachineNotFit
from hivetune.records import Message, Progress, silent
from hivetune.synth.packs import Pack
from hivetune.synth.page import DocPage, NotUnderstood, options_in, words_in
from hivetune.synth.places import DocSource, Library, read_source
from hivetune.synth.questions import KIND_WEIGHTS, Draft, drafts_of
from hivetune.synth.sentences import word_list

TEMPLATES = "templates"  # the maker that is no model
SAMPLES = 12  # rows of the report
MAX_DRAFTS_OF_PAGE = 200
MAX_QUESTION_CHARS, MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 700, 2, 1600
# Share of function words in prose: 0.25 to 0.5 in manuals, 0.1 in terse ones, near 0 in other languages.
MIN_ENGLISH, PROSE_WORDS = 0.05, 30
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Words without any character that means something to the shell. Starting bash takes 10 ms, and most lines are so.
_PLAIN_LINE = re.compile(r"[A-Za-z_./][\w./-]*(?: [\w./:=@%+,-]+)*")
_RESERVED = frozenset(
    "if then elif else fi for while until do done case esac select function time coproc in".split()  # noqa: SIM905
)

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

Rephrase = Callable[[Draft], str]
"""Returns another wording of a draft's question, or the question itself where the new one can't be used."""


@dataclass
class Tally:
    """The counts of a category: tried = kept + rejected. `skipped`: pages that were not understood, by reason."""

    asked: int = 0
    sources: int = 0
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)


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
    rephrase: Rephrase | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write `out`, or leave what was there; return the document of `--json`.

    Rows of `against` are not made again, frozen questions are not asked. Raises UsageError for a source that is not
    there, DataRefused when no row could be made, DoesNotFit for a full disk, MachineNotFit without bash, whose grammar
    decides what parses.
    """
    compared, seen = Against(against), SeenRows()
    for text in compared:
        seen.refuse(text)
    sources = {pack.category: library.sources_of(pack) for pack in packs}
    tallies = {category: Tally(sources=len(found)) for category, found in sources.items()}
    takers = {
        pack.category: _drafts(pack, sources[pack.category], tallies[pack.category], seed)
        for pack in packs
        if sources[pack.category] or pack.facts
    }
    frozen, kept = frozen_hashes(), list[dict[str, Any]]()
    shares = share_out(rows, list(takers))
    for category, number in shares.items():
        tallies[category].asked = number
    while shares:  # a category that has no more gives its share to the others
        for category, number in shares.items():
            tally = tallies[category]
            for _ in range(number):
                row = _next_row(takers[category], tally, seen, frozen, category, maker, seed, rephrase)
                if row is None:
                    del takers[category]
                    break
                kept.append(row)
                progress(len(kept), rows)
        shares = share_out(rows - len(kept), list(takers))
    if not kept:
        raise _no_rows_error(packs, tallies)
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
        "rejected": dict(sorted(sum((tally.rejected for tally in tallies.values()), Counter[str]()).items())),
        "seed": seed,
        "maker": maker,
        "categories": [_counted(pack, tallies[pack.category]) for pack in packs],
        "empty": [pack.category for pack in packs if not tallies[pack.category].kept],
        "samples": kept[:SAMPLES],
        "compared_with": compared.rows,
        "not_comparable": compared.unreadable,
    }


def _counted(pack: Pack, tally: Tally) -> dict[str, Any]:
    counts = {name: dict(sorted(getattr(tally, name).items())) for name in ("rejected", "skipped", "kinds")}
    named = {name: getattr(pack, name) for name in ("category", "title", "install")}
    return {**named, "asked": tally.asked, "sources": tally.sources, "kept": tally.kept, **counts}


def _no_rows_error(packs: Sequence[Pack], tallies: Mapping[str, Tally]) -> DataRefused:
    """Return why there is no row: no page was found, none could be read, or no draft was right."""
    reasons = sum((tally.skipped + tally.rejected for tally in tallies.values()), Counter[str]())
    pages = sum(tally.sources for tally in tallies.values())
    message = f"no row could be made of {', '.join(tallies)}: {pages:,} pages found"
    message += "".join(f"; {reason} ({count:,})" for reason, count in sorted(reasons.items()))
    install = "; ".join(pack.install for pack in packs if pack.install)
    if any(tally.rejected for tally in tallies.values()):
        return DataRefused(message, hint="another --seed gives other drafts; fewer rows in --against too")
    hint = "a folder needs Markdown, reStructuredText or HTML with headings; see the categories: hivetune synth"
    return DataRefused(message, hint=f"install documentation: {install}" if install and not pages else hint)


def share_out(total: int, names: Sequence[str]) -> dict[str, int]:
    """Return equal whole parts of `total`, the first ones larger by one; without names or rows none."""
    if total <= 0 or not names:
        return {}
    part, rest = divmod(total, len(names))
    return {name: part + (at < rest) for at, name in enumerate(names) if part or at < rest}


def _drafts(pack: Pack, sources: Sequence[DocSource], tally: Tally, seed: int) -> Iterator[tuple[DocPage, Draft]]:
    """Yield the drafts of a category: one of each page, then a second of each, and so on.

    Of a page comes next the kind that the category lacks most. Pages are read when they are first needed.
    """
    facts: dict[str, list[Draft]] = {}
    for fact in pack.facts:
        command = "\n".join(part.partition("\n")[2].strip() for part in fact.answer.split("```")[1::2])
        draft = Draft("fact", fact.question, fact.answer, "", fact.answer, command=command)
        facts.setdefault(fact.source, []).append(draft)
    waiting: list[tuple[DocPage, dict[str, list[Draft]]]] = []
    for source in sorted(sources, key=lambda source: (source.name not in facts, _key(seed, source.name), source.name)):
        try:
            page = read_source(source)
        except NotUnderstood as reason:
            tally.skipped[str(reason).partition(":")[0]] += 1
            continue
        kinds: dict[str, list[Draft]] = {}
        for draft in [*drafts_of(page, seed), *facts.pop(page.label, ())]:
            kinds.setdefault(draft.kind, []).append(draft)
        for some in kinds.values():
            some.sort(key=lambda draft: _key(seed, draft.question + draft.answer), reverse=True)
            del some[: -MAX_DRAFTS_OF_PAGE or None]
        waiting.append((page, kinds))
        yield from _take(page, kinds, tally)
    tally.rejected["no-source"] += sum(map(len, facts.values()))
    tally.rejected += Counter()  # without zeros
    while waiting:
        waiting = [(page, kinds) for page, kinds in waiting if any(kinds.values())]
        for page, kinds in waiting:
            yield from _take(page, kinds, tally)


def _take(page: DocPage, kinds: Mapping[str, list[Draft]], tally: Tally) -> Iterator[tuple[DocPage, Draft]]:
    there = [kind for kind, some in kinds.items() if some]
    if there:
        kind = min(there, key=lambda kind: ((tally.kinds[kind] + 1) / KIND_WEIGHTS[kind], kind))
        yield page, kinds[kind].pop()


def _next_row(
    drafts: Iterator[tuple[DocPage, Draft]],
    tally: Tally,
    seen: "SeenRows",
    frozen: frozenset[int] | set[int],
    category: str,
    maker: str,
    seed: int,
    rephrase: Rephrase | None,
) -> dict[str, Any] | None:
    """Return the next row that passes the checks, None when there are no more drafts."""
    for page, draft in drafts:
        reason = check_draft(draft, page) or seen.look(f"{draft.question}\n{draft.answer}")
        if reason is None and group_hash(f"question:{question([Message('user', draft.question)])}") in frozen:
            reason = "frozen-question"
        if reason is not None:
            tally.rejected[reason] += 1
            continue
        seen.add(f"{draft.question}\n{draft.answer}")
        tally.kept += 1
        tally.kinds[draft.kind] += 1
        return _row(
            category, page, draft if rephrase is None else replace(draft, question=rephrase(draft)), maker, seed
        )
    return None


def _row(category: str, page: DocPage, draft: Draft, maker: str, seed: int) -> dict[str, Any]:
    """Return one line of the file. `session` is the page, so that a split keeps all questions on one page together."""
    messages = [{"role": "user", "content": draft.question}, {"role": "assistant", "content": draft.answer}]
    row: dict[str, Any] = {"messages": messages, "category": category, "session": f"synth {page.label}"}
    if draft.checker is not None:
        row["checker"] = dict(draft.checker)
    row["synth"] = {
        "kind": draft.kind,
        "sources": [{"page": page.label, "section": draft.section, "file": str(page.path)}],
        "passage_sha256": hashlib.sha256(draft.passage.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        "maker": maker,
        "seed": seed,
    }
    if draft.absent:
        row["synth"]["absent"] = [draft.absent]
    return row


def _key(seed: int, text: str) -> int:
    """Return a number for the order of a text, the same for the same seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest())


def check_draft(draft: Draft, page: DocPage) -> str | None:
    """Return the first reason against a draft, or None. Raises MachineNotFit without bash."""
    text = f"{draft.question} {draft.answer}"
    if _CONTROL.search(text):
        return "control-character"
    if (
        len(draft.question) > MAX_QUESTION_CHARS
        or not MIN_ANSWER_CHARS <= len(draft.answer.strip()) <= MAX_ANSWER_CHARS
    ):
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


PARSE_TIMEOUT_S = 5.0


def _parses(code: str) -> bool:
    """Return whether shell code parses by bash's grammar; nothing is run."""
    plain = (_PLAIN_LINE.fullmatch(line) and line.split(" ", 1)[0] not in _RESERVED for line in code.splitlines())
    if all(plain):
        return True
    bash = shutil.which("bash")
    if bash is None:
        raise MachineNotFit("commands are checked by bash's grammar", hint="install bash")
    try:
        return run_limited([bash, "--norc", "--noprofile", "-n"], code, PARSE_TIMEOUT_S).returncode == 0
    except TooSlow:
        return False


NEAR_SHARE = 0.8
_NUM_PERM, _BAND_VALUES, _MINHASH_SEED = 64, 4, 1
# 16 bands of 4: a pair with 0.8 of its triples in common shares one with probability 0.9998.


class SeenRows:
    """Texts by their words: equal ones, and nearly equal ones (Jaccard similarity of word triples at least 0.8)."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._exact: set[tuple[str, ...]] = set()
        self._bands: dict[int, int] = {}

    def look(self, text: str) -> str | None:
        """Return the reason against a text, or None."""
        words = words_in(text)
        if tuple(words) in self._exact:
            return "duplicate"
        triples = _triples(words)
        for number in {self._bands[key] for key in _band_keys(triples) if key in self._bands}:
            others = _triples(words_in(self._texts[number]))
            if len(triples & others) >= NEAR_SHARE * len(triples | others):
                return "near-duplicate"
        return None

    def add(self, text: str) -> None:
        words = words_in(text)
        self._exact.add(tuple(words))
        for key in _band_keys(_triples(words)):
            self._bands[key] = len(self._texts)
        self._texts.append(text)

    def refuse(self, text: str) -> None:
        """Remember a row of the user, so that it is not made again."""
        if self.look(text) is None:
            self.add(text)


def _triples(words: Sequence[str]) -> set[tuple[str, ...]]:
    return set(zip(words, words[1:], words[2:], strict=False)) or {tuple(words)}


def _band_keys(triples: set[tuple[str, ...]]) -> list[int]:
    minhash = RMinHash(_NUM_PERM, _MINHASH_SEED)
    minhash.update(sorted(" ".join(triple) for triple in triples))
    values = array("I", minhash.digest()).tobytes()
    size = 4 * _BAND_VALUES
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [(band << 32) | crc32(part) for band, part in enumerate(parts)]

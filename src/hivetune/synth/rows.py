"""Rows from documentation: pages are read in a random order that depends on the seed, drafts are checked, and each
category gets its share.

The same packs, documentation, number of rows and seed give the same file.
"""

import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_atomic
from hivetune.data.checks.lessons import group_hash, question
from hivetune.data.frozen import frozen_hashes
from hivetune.errors import DataRefused, MachineNotFit
from hivetune.records import Message, Progress, silent
from hivetune.synth.packs import DocSource, Library, Pack, read_source
from hivetune.synth.page import DocPage, NotUnderstood, options_in
from hivetune.synth.questions import KIND_WEIGHTS, Draft, drafts_of

MAKER = "templates"  # of a synthetic row; no model words it
MAX_QUESTION_CHARS, MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 700, 2, 1600
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

DRAFT_REASONS: Mapping[str, str] = {
    "length": "the question or the answer is too short or too long for a row",
    "unknown-option": "an option is named that the source does not have",
    "invented-exists": "the option that should not exist is in the source",
    "does-not-parse": "a command does not parse",
    "duplicate": "the same text was asked about in the same way, as where several pages share an option",
    "frozen-question": "it asks a frozen question, which no row may teach",
    "no-source": "the page that it cites is not on this machine",
    "control-character": "the text has characters that a terminal obeys",
}


def make_rows(
    packs: Sequence[Pack], library: Library, out: Path, *, rows: int, seed: int, progress: Progress = silent
) -> dict[str, Any]:
    """Write the rows to `out` and return the document of `--json`. If an error occurs, `out` is not changed.

    Frozen questions are not asked. Raises DataRefused if no row could be made, OSError, and MachineNotFit without bash,
    whose parser checks commands.
    """
    check = DraftCheck()
    categories = [_Category(pack, library.sources_of(pack), seed) for pack in packs]
    open_ones = [category for category in categories if category.sources]
    kept: list[dict[str, Any]] = []
    while open_ones and len(kept) < rows:  # a category that has no more gives its share to the others
        part, rest = divmod(rows - len(kept), len(open_ones))
        for place, category in enumerate(list(open_ones)):
            share = part + (place < rest)
            category.asked = category.asked or share
            for _ in range(share):
                drawn = category.next_draft(check)
                if drawn is None:
                    open_ones.remove(category)
                    break
                kept.append(_row(category.pack.category, *drawn, seed))
                progress(len(kept), rows)
    if not kept:
        raise _no_rows_error(categories)
    kept.sort(key=lambda row: _key(seed, json.dumps(row["messages"])))
    write_atomic(out, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in kept).encode())
    return {
        "schema": 1,
        "out": str(out),
        "asked": rows,
        "rows": len(kept),
        "rejected": dict(sorted(sum((each.rejected for each in categories), Counter[str]()).items())),
        "seed": seed,
        "maker": MAKER,
        "categories": [each.counts() for each in categories],
    }


def _row(category: str, page: DocPage, draft: Draft, seed: int) -> dict[str, Any]:
    turns = (("user", draft.question), ("assistant", draft.answer))
    row: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in turns]}
    # The page is the session, so that a split keeps its questions together.
    row |= {"category": category, "session": f"synth {page.label}"}
    row |= {"checker": {"name": "contains_any", "any": list(draft.right)}} if draft.right else {}
    source = {"page": page.label, "section": draft.section, "file": str(page.path)}
    digest = hashlib.sha256(draft.passage.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    row["synth"] = {"kind": draft.kind, "sources": [source], "passage_sha256": digest}
    row["synth"] |= {"maker": MAKER, "seed": seed}
    row["synth"] |= {"absent": [draft.absent]} if draft.absent else {}
    return row


def _no_rows_error(categories: Sequence["_Category"]) -> DataRefused:
    """Return the error for zero rows, with its reason: no page was found, none could be read, or no draft was right."""
    reasons = sum((each.skipped + each.rejected for each in categories), Counter[str]())
    pages = sum(len(each.sources) for each in categories)
    told = [f"{pages:,} pages found", *(f"{reason} ({count:,})" for reason, count in sorted(reasons.items()))]
    install = "; ".join(each.pack.install for each in categories if each.pack.install and not pages)
    hint = f"install documentation: {install}" if install else "see the categories: hivetune synth"
    names = ", ".join(each.pack.category for each in categories)
    return DataRefused(f"no row could be made of {names}: {'; '.join(told)}", hint=hint)


class _Category:
    """The drafts of a pack: one of each page, which is read then, then a second of each, and so on."""

    def __init__(self, pack: Pack, sources: Sequence[DocSource], seed: int):
        self.pack, self.sources, self._seed = pack, sources, seed
        self.asked = 0
        # Drafts by the reason against them, pages by why they were not understood, rows by kind.
        self.rejected, self.skipped, self.kinds = Counter[str](), Counter[str](), Counter[str]()
        self._drafts = self._all_drafts()

    def counts(self) -> dict[str, Any]:
        """Return the counts for the report."""
        named = {"category": self.pack.category, "title": self.pack.title, "install": self.pack.install}
        numbers = {"asked": self.asked, "sources": len(self.sources), "kept": self.kinds.total()}
        counters = {name: dict(sorted(getattr(self, name).items())) for name in ("rejected", "skipped", "kinds")}
        return {**named, **numbers, **counters}

    def next_draft(self, check: "DraftCheck") -> tuple[DocPage, Draft] | None:
        """Return the next draft that passes the check with its page, None when there are no more."""
        for page, draft in self._drafts:
            if reason := check.reason_against(draft, page):
                self.rejected[reason] += 1
                continue
            self.kinds[draft.kind] += 1
            return page, draft
        return None

    def _all_drafts(self) -> Iterator[tuple[DocPage, Draft]]:
        facts: dict[str, list[Draft]] = {}
        for fact in self.pack.fact:
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
            waiting.append((page, kinds))
            yield from self._one_of(page, kinds)
        self.rejected["no-source"] += sum(map(len, facts.values()))
        self.rejected = +self.rejected  # without a count of 0
        while waiting := [(page, kinds) for page, kinds in waiting if any(kinds.values())]:
            for page, kinds in waiting:
                yield from self._one_of(page, kinds)

    def _one_of(self, page: DocPage, kinds: Mapping[str, list[Draft]]) -> Iterator[tuple[DocPage, Draft]]:
        left = [kind for kind, some in kinds.items() if some]
        if left:
            # The one that the category lacks most.
            kind = min(left, key=lambda kind: ((self.kinds[kind] + 1) / KIND_WEIGHTS[kind], kind))
            yield page, kinds[kind].pop()


def _key(seed: int, text: str) -> int:
    """Return a number for the order of a text, the same for the same seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest())


class DraftCheck:
    """The check of drafts. It remembers those that passed, so that no question is asked twice."""

    def __init__(self) -> None:
        self._frozen = frozen_hashes()
        self._asked: set[tuple[str, str]] = set()

    def reason_against(self, draft: Draft, page: DocPage) -> str | None:
        """Return the first reason to reject a draft, or None, after which the draft counts as asked. Raises
        MachineNotFit without bash."""
        text = f"{draft.question} {draft.answer}"
        asked = draft.kind, " ".join(draft.passage.split())
        fits = MIN_ANSWER_CHARS <= len(draft.answer.strip()) <= MAX_ANSWER_CHARS
        if _CONTROL.search(text):
            return "control-character"
        if len(draft.question) > MAX_QUESTION_CHARS or not fits:
            return "length"
        if draft.absent and draft.absent in page.options:
            return "invented-exists"
        if (options_in(text) - {draft.absent}) - page.options:
            return "unknown-option"
        if draft.command and not _parses(draft.command):
            return "does-not-parse"
        if group_hash(f"question:{question([Message('user', draft.question)])}") in self._frozen:
            return "frozen-question"
        # Pages share whole paragraphs, as cp(1) and mv(1) do: a text is asked about once in each way.
        if asked in self._asked:
            return "duplicate"
        self._asked.add(asked)
        return None


def _parses(code: str) -> bool:
    """Return whether shell code parses by bash's grammar; nothing is run."""
    bash = shutil.which("bash")
    if bash is None:
        raise MachineNotFit("the check of commands needs bash, which is not installed", hint="install bash")
    command = [bash, "--norc", "--noprofile", "-n"]
    return subprocess.run(command, input=code.encode(), capture_output=True, check=False).returncode == 0

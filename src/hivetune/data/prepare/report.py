"""The report of a preparation: every input row in exactly one place, with the reason.

`Report.document` is the content of `--json` and report.json. data/prepare/page.py makes the HTML page from it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import IO, Any

from hivetune.base.paths import spelled
from hivetune.config import DataConfig
from hivetune.data.columns import SYSTEM
from hivetune.data.fates import (
    BEGINNING,
    DUPLICATE,
    DUPLICATES,
    NEAR_DUPLICATE,
    NO_VALUE,
    REFUSED,
    SET_ASIDE,
    Decisions,
    RowLookup,
)
from hivetune.data.mapping import near_column
from hivetune.data.pieces.said import Row
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import SPLITS
from hivetune.errors import DataRefused

SHOWN_DUPLICATES = 5  # of each kind, in the report
MAX_PROBLEMS = 20_000  # in the JSON; the quarantine file has all of them
NOT_RUN_WITHOUT_MODEL = ("template", "mask", "tokens", "control-token")
FITTING_SHARE = 0.99
BINS = 40
MAX_NAMED = 8  # agents in a message


@dataclass(frozen=True)
class Report:
    """The report; docs/formats.md describes its document. Usable rows are trained or held out."""

    document: dict[str, Any]

    @property
    def rows_in(self) -> int:
        return int(self.document["rows_in"])

    @property
    def usable(self) -> int:
        return int(self.document["usable"])

    @property
    def num_rejected(self) -> int:
        return sum(self.document["rejected"].values())

    def refuse(self, max_rejected: float) -> None:
        """Raise DataRefused unless a row is usable, at most this share is rejected, and each mapping fits a row."""
        if self.rows_in == 0:
            raise DataRefused("the files contain no rows", hint="give files with one row per line")
        # Rows that are set aside explain why none is left, but not why many are rejected.
        unused = self.document["rejected"] | ({} if self.usable else self.document["set_aside"])
        top = max(unused.items(), key=lambda item: item[1], default=None)
        reason = f"mostly {top[0]}: {REASONS[top[0]].meaning}" if top else "all are duplicates"
        first = next((p for p in self.document["problems"] if not top or p["reason"] == top[0]), None)
        where = f"{spelled(first['source'])}: {first['hint']}" if first else "see the reasons: hivetune check ROWS"
        suggested: list[dict[str, Any]] = next(iter(self.document.get("unclear", {}).values()), [])
        if suggested and "--columns" not in where:
            where = f"{where}; if it is right: {suggested[0]['line']}"
        if self.usable == 0:
            raise DataRefused(f"none of {self.rows_in:,} rows is usable, {reason}", hint=where)
        if self.num_rejected > max_rejected * self.rows_in:
            raise DataRefused(
                f"{self.num_rejected:,} of {self.rows_in:,} rows are rejected ({reason}); "
                f"data.max_rejected allows {max_rejected:.0%}",
                hint=where,
            )
        if self.document["unmatched"]:
            first = self.document["unmatched"][0]
            raise DataRefused(first["problem"], hint=first["hint"])


def accounting(decisions: Decisions) -> dict[str, Any]:
    """Return the accounting. Law 1 is asserted: rows_in = usable + duplicates + rejected + set aside."""
    rejected = {r: n for r, n in sorted(decisions.reasons.items()) if REASONS[r].severity == "reject"}
    set_aside = {r: n for r, n in decisions.reasons.items() if REASONS[r].severity == "set_aside"}
    set_aside |= {reason: count for fate, reason in SET_ASIDE.items() if (count := decisions.count(fate))}
    usable, duplicates = decisions.count(*range(len(SPLITS))), decisions.count(*DUPLICATES)
    assert decisions.num_rows == usable + duplicates + sum(rejected.values()) + sum(set_aside.values())
    return {
        "rows_in": decisions.num_rows,
        "usable": usable,
        "duplicates": duplicates,
        "rejected": rejected,
        "set_aside": dict(sorted(set_aside.items())),
    }


def make_report(decisions: Decisions, *, model: str | None, max_length: int) -> Report:
    """Return the report of all rows."""
    counts = accounting(decisions)
    problems, changes = list(_problems(decisions)), list(_changes(decisions))
    num_problems = sum(counts["rejected"].values()) + sum(counts["set_aside"].values())
    examples = [list(islice(iter_dropped(decisions, kind), SHOWN_DUPLICATES)) for kind in DUPLICATES]
    shown = ("kind", "source", "same_as", "share", "messages", "same_as_messages")
    return Report(
        {
            "schema": 1,
            **counts,
            "exact_duplicates": decisions.count(DUPLICATE),
            "beginnings": decisions.count(BEGINNING),
            "near_duplicates": decisions.count(NEAR_DUPLICATE),
            "groups": decisions.groups,
            "nearest": decisions.nearest,
            "problems": problems,
            "problems_left_out": num_problems - len(problems),
            "changed": dict(sorted(decisions.changed.items())),
            "changes": changes[:MAX_PROBLEMS],
            "changes_left_out": max(0, len(changes) - MAX_PROBLEMS),
            "files": {name: dict(layouts) for name, layouts in decisions.files.items()},
            "model": model,
            "max_length": max_length if model else None,
            "synthetic": decisions.synthetic,
            "not_run": [] if model else list(NOT_RUN_WITHOUT_MODEL),
            "duplicate_examples": [{name: pair[name] for name in shown} for pair in chain.from_iterable(examples)],
            **_distribution(decisions, has_tokens=model is not None),
        }
    )


def unmatched(decisions: Decisions, data: DataConfig, row: Row) -> list[dict[str, str]]:
    """Return the mappings and settings that fit no row, each with its problem and a hint: they would be ignored without
    a word. `row` is one of the rows.
    """
    num_read = decisions.num_rows - decisions.reasons.total()
    if num_read == 0:
        return []
    missing: Counter[str] = Counter()
    for _, names in decisions.rows("SELECT n, missing FROM rows WHERE missing IS NOT NULL"):
        missing.update(names.split(","))
    found = []
    for field in (field for field, count in missing.items() if count == num_read):
        column = data.columns[field]
        hint = near_column(row, column) if row else "look at the names of its columns"
        hint = f"{hint}; a fixed text has quotes of its own: \"'{column}'\"" if field in SYSTEM else hint
        found.append(
            {"problem": f"no row has the column {column!r}, which data.columns names as {field}", "hint": hint}
        )
    if data.system_prompts:
        agents = {agent for _, agent in decisions.rows("SELECT DISTINCT 0, agent FROM rows WHERE reason IS NULL")}
        if agents.isdisjoint(data.system_prompts):
            named = ", ".join(sorted(map(spelled, agents - {None}))[:MAX_NAMED])
            hint = f"rows have: {named}" if named else "if all rows are of one, map it: --columns \"agent='NAME'\""
            names = ", ".join(map(spelled, data.system_prompts))
            found.append({"problem": f"no row has an agent of data.system_prompts: {names}", "hint": hint})
    facts = {data.balance: f"data.balance: {data.balance}"} if data.balance != "none" else {}
    for fact, setting in facts.items():
        if not any(decisions.rows(f"SELECT n, 1 FROM rows WHERE {fact} IS NOT NULL LIMIT 1")):
            found.append(
                {"problem": f"no row has the {fact} for {setting}", "hint": f"map it: --columns {fact}=COLUMN"}
            )
    return found


def iter_dropped(decisions: Decisions, *kinds: int) -> Iterator[dict[str, Any]]:
    """Yield each dropped row in input order: kind, places, owner, similarity, texts.

    `share` is the lower similarity of question and answer, None for equal rows.
    """
    query = "SELECT source, session, user, interaction_id, messages FROM rows JOIN bodies USING (n) WHERE n = ?"
    with closing(RowLookup(decisions, query)) as rows, closing(RowLookup(decisions, query)) as originals:
        for row in (row for row, fate in enumerate(decisions.fate) if fate in kinds):
            source, session, user, identity, text = rows.find(row)
            original, *_, original_text = originals.find(decisions.original(row))
            share = decisions.shares.get(row)
            yield {
                "kind": DUPLICATES[decisions.fate[row]],
                "source": source,
                "same_as": original,
                "share": None if share is None else round(share, 3),
                "session": session,
                "user": user,
                "interaction_id": identity,
                "messages": json.loads(text),
                "same_as_messages": json.loads(original_text),
            }


def write_dropped(decisions: Decisions, file: IO[bytes]) -> None:
    """Write all duplicates as JSON Lines; of exact copies only the places, since the kept row has their text."""
    for pair in iter_dropped(decisions, *DUPLICATES):
        if pair["kind"] == DUPLICATES[DUPLICATE]:
            del pair["messages"], pair["same_as_messages"]
        file.write(json.dumps(pair, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _problems(decisions: Decisions) -> Iterator[dict[str, str]]:
    """Yield the first MAX_PROBLEMS rows that are rejected or set aside, in input order."""
    rows = decisions.rows("SELECT n, source, reason, hint FROM rows ORDER BY n")
    problems = (row for row in rows if decisions.fate[row[0]] == REFUSED or decisions.fate[row[0]] in SET_ASIDE)
    for row, source, reason, hint in islice(problems, MAX_PROBLEMS):
        name = reason or SET_ASIDE[decisions.fate[row]]
        known = REASONS[name]
        yield {"source": source, "reason": name, "hint": hint or known.hint, "severity": known.severity}


def _changes(decisions: Decisions) -> Iterator[dict[str, str]]:
    """Yield the changes of usable rows with their places."""
    query = "SELECT n, source, changed, notes FROM rows WHERE changed IS NOT NULL ORDER BY n"
    for row, source, changed, notes in decisions.rows(query):
        if decisions.fate[row] < len(SPLITS):
            details = dict(json.loads(notes)) if notes else {}
            for reason in changed.split(","):
                hint = details.get(reason, f"{REASONS[reason].meaning}; {REASONS[reason].hint}")
                yield {"source": source, "reason": reason, "hint": hint, "severity": "warn"}


def _distribution(decisions: Decisions, *, has_tokens: bool) -> dict[str, Any]:
    """Return splits, agents, categories and lengths of the usable rows."""
    splits: Counter[str] = Counter()
    agents: dict[str, Counter[str]] = {}
    categories: dict[str, Counter[str]] = {}
    lengths: Counter[int] = Counter()
    all_lengths: Counter[int] = Counter()
    tokens = trained_tokens = 0
    query = "SELECT n, length, num_tokens, trained, agent, category FROM rows WHERE length IS NOT NULL ORDER BY n"
    for row, length, num_tokens, trained, agent, category in decisions.rows(query):
        all_lengths[length] += 1
        if decisions.fate[row] >= len(SPLITS):
            continue
        split = SPLITS[decisions.fate[row]]
        splits[split] += 1
        agents.setdefault(agent or NO_VALUE, Counter())[split] += 1
        categories.setdefault(category or NO_VALUE, Counter())[split] += 1
        lengths[length] += 1
        tokens += num_tokens or 0
        trained_tokens += trained or 0
    return {
        "splits": {split: splits[split] for split in SPLITS},
        "agents": {name: dict(counts) for name, counts in sorted(agents.items())},
        "categories": {name: dict(counts) for name, counts in sorted(categories.items())},
        "tokens": tokens if has_tokens else None,
        "trained_tokens": trained_tokens if has_tokens else None,
        "lengths": {
            "unit": "tokens" if has_tokens else "characters",
            "median": _quantile(lengths, 0.5),
            "p90": _quantile(lengths, 0.9),
            "p99": _quantile(lengths, 0.99),
            "max": max(lengths, default=0),
            "longest_seen": max(all_lengths, default=0),
            "keeps_99_percent": _quantile(all_lengths, FITTING_SHARE),
            "histogram": _histogram(all_lengths),
        },
    }


def secrets_first(changes: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the changes in the order secrets, personal data, other changes."""
    first = ("redacted-secret", "redacted-personal")
    return sorted(
        changes, key=lambda change: first.index(change["reason"]) if change["reason"] in first else len(first)
    )


def duplicate_kinds(document: Mapping[str, Any]) -> str:
    """Return the numbers of duplicates by kind, in words."""
    return (
        f"{document['exact_duplicates']:,} equal, {document['beginnings']:,} the beginning of a longer row, "
        f"{document['near_duplicates']:,} nearly equal"
    )


def _quantile(counts: Counter[int], share: float) -> int:
    """Return the smallest length that at least `share` of the rows do not exceed."""
    needed, num_rows = share * counts.total(), 0
    for length in sorted(counts):
        num_rows += counts[length]
        if num_rows >= needed:
            return length
    return 0


def _histogram(counts: Counter[int]) -> list[list[int]]:
    """Return [[from, to, rows], ...] in equal steps between the 0.5th and 99.5th percentile, with the rest outside."""
    if not counts:
        return []
    low, top = _quantile(counts, 0.005), _quantile(counts, 0.995)
    width = max(1, -(-(top - low + 1) // BINS))
    rows = [0] * ((top - low) // width + 1)
    for length, count in counts.items():
        rows[min(max(length - low, 0) // width, len(rows) - 1)] += count
    edges = [low + i * width for i in range(len(rows))]
    ends = [*(edge - 1 for edge in edges[1:]), max(counts)]
    return [[min(counts) if i == 0 else edges[i], ends[i], n] for i, n in enumerate(rows)]

"""The report of a preparation: every input row in exactly one place, with the reason.

`Report.document` is the content of `--json` and report.json. data/prepare/page.py makes the HTML page from it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hivetune.base.paths import spelled
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
    fates,
    open_result,
)
from hivetune.data.reasons import REASONS, severity_of
from hivetune.data.snapshot import SPLITS
from hivetune.errors import DataRefused

SHOWN = 5  # of each kind, in the report
QUERY = "SELECT source, session, user, interaction_id, messages FROM rows JOIN bodies USING (n) WHERE n = ?"


def iter_dropped(
    results: Sequence[Path], decisions: Decisions, kinds: Sequence[int] = tuple(DUPLICATES)
) -> Iterator[dict[str, Any]]:
    """Yield each dropped row in input order: kind, places, owner, similarity, texts.

    `share` is the lower similarity of question and answer, None for equal rows.
    """
    with (
        closing(RowLookup(results, decisions, QUERY)) as rows,
        closing(RowLookup(results, decisions, QUERY)) as originals,
    ):
        for row, fate in enumerate(decisions.fate):
            if fate in kinds:
                source, session, user, identity, text = rows.find(row)
                first, *_, first_text = originals.find(decisions.original(row))
                share = decisions.shares.get(row)
                yield {
                    "kind": DUPLICATES[fate],
                    "source": source,
                    "same_as": first,
                    "share": None if share is None else round(share, 3),
                    "session": session,
                    "user": user,
                    "interaction_id": identity,
                    "messages": json.loads(text),
                    "same_as_messages": json.loads(first_text),
                }


def duplicate_examples(results: Sequence[Path], decisions: Decisions) -> list[dict[str, Any]]:
    """Return the first duplicates of each kind for the report."""
    kept = ("kind", "source", "same_as", "share", "messages", "same_as_messages")
    return [
        {name: pair[name] for name in kept}
        for kind in DUPLICATES
        for pair in islice(iter_dropped(results, decisions, (kind,)), SHOWN)
    ]


def write_dropped(results: Sequence[Path], decisions: Decisions, file: IO[bytes]) -> None:
    """Write all duplicates as JSON Lines; of exact copies only the places, since the kept row has their text."""
    for pair in iter_dropped(results, decisions):
        if pair["kind"] == DUPLICATES[DUPLICATE]:
            del pair["messages"], pair["same_as_messages"]
        file.write(json.dumps(pair, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


_WORST = {"redacted-secret": 0, "redacted-personal": 1}  # the changes that are shown first
MAX_PROBLEMS = 20_000  # in the JSON; the quarantine file has all of them
KEPT_SHARE = 0.99
NOT_RUN_WITHOUT_MODEL = ("template", "mask", "tokens", "control-token")
BINS = 40
PER_FILE_REASONS = ("border-in-token",)  # reported once if all rows of a file have it, since the file causes it


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
        """Raise DataRefused unless a row is usable and at most this share of the rows is rejected."""
        if self.rows_in == 0:
            raise DataRefused("there are no rows", hint="the files are empty: give files with one row a line")
        top = max(self.document["rejected"].items(), key=lambda item: item[1], default=None)
        why = f"mostly {top[0]}: {REASONS[top[0]].meaning}" if top else "all are set aside or duplicates"
        first = next((p for p in self.document["problems"] if top and p["reason"] == top[0]), None)
        where = f"{spelled(first['source'])}: {first['hint']}" if first else "see the reasons: hivetune data check"
        suggested: list[dict[str, Any]] = next(iter(self.document.get("unclear", {}).values()), [])
        if suggested and "--columns" not in where:
            where = f"{where}; if it is right: {suggested[0]['line']}"
        if self.usable == 0:
            raise DataRefused(f"none of {self.rows_in:,} rows is usable, {why}", hint=where)
        if self.num_rejected > max_rejected * self.rows_in:
            raise DataRefused(
                f"{self.num_rejected:,} of {self.rows_in:,} rows are rejected ({why}); "
                f"data.max_rejected allows {max_rejected:.0%}",
                hint=where,
            )


def accounting(decisions: Decisions) -> dict[str, Any]:
    """Return the accounting. Law 1 is asserted: rows_in = usable + duplicates + rejected + set aside."""
    rejected = {r: n for r, n in sorted(decisions.reasons.items()) if severity_of(r) == "reject"}
    set_aside = {r: n for r, n in decisions.reasons.items() if severity_of(r) == "set_aside"}
    for fate, reason in SET_ASIDE.items():
        if count := decisions.count(fate):
            set_aside[reason] = count
    usable = decisions.count(*range(len(SPLITS)))
    duplicates = decisions.count(*DUPLICATES)
    rows_in = decisions.num_rows
    assert rows_in == usable + duplicates + sum(rejected.values()) + sum(set_aside.values())
    return {
        "rows_in": rows_in,
        "usable": usable,
        "duplicates": duplicates,
        "rejected": rejected,
        "set_aside": dict(sorted(set_aside.items())),
    }


def make_report(results: Sequence[Path], decisions: Decisions, *, model: str | None, max_length: int) -> Report:
    """Return the report of all rows."""
    counts = accounting(decisions)
    problems = list(_problems(results, decisions))
    document: dict[str, Any] = {
        "schema": 1,
        **counts,
        "exact_duplicates": decisions.count(DUPLICATE),
        "beginnings": decisions.count(BEGINNING),
        "near_duplicates": decisions.count(NEAR_DUPLICATE),
        "groups": decisions.groups,
        "nearest": decisions.nearest,
        "problems": problems[:MAX_PROBLEMS],
        "problems_left_out": max(
            0, sum(counts["rejected"].values()) + sum(counts["set_aside"].values()) - MAX_PROBLEMS
        ),
        "changed": dict(sorted(decisions.changed.items())),
        **_changes(results, decisions),
        "files": {name: dict(layouts) for name, layouts in decisions.files.items()},
        "model": model,
        "max_length": max_length if model else None,
        "synthetic": decisions.synthetic,
        "not_run": [] if model else list(NOT_RUN_WITHOUT_MODEL),
        "duplicate_examples": duplicate_examples(results, decisions),
        **distribution(results, decisions, has_tokens=model is not None),
    }
    return Report(document)


def secrets_first(changes: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the changes in the order secrets, personal data, other changes."""
    return sorted(changes, key=lambda change: _WORST.get(change["reason"], len(_WORST)))


def duplicate_kinds(document: Mapping[str, Any]) -> str:
    """Return the numbers of duplicates by kind, in words."""
    return (
        f"{document['exact_duplicates']:,} equal, {document['beginnings']:,} the beginning of a longer row, "
        f"{document['near_duplicates']:,} nearly equal"
    )


def distribution(results: Sequence[Path], decisions: Decisions, *, has_tokens: bool) -> dict[str, Any]:
    """Return splits, agents, categories and lengths of the usable rows."""
    splits: Counter[str] = Counter()
    agents: dict[str, Counter[str]] = {}
    categories: dict[str, Counter[str]] = {}
    lengths: Counter[int] = Counter()
    all_lengths: Counter[int] = Counter()
    total = trained = 0
    for number, path in enumerate(results):
        with closing(open_result(path)) as database:
            rows = database.execute("SELECT length, num_tokens, trained, agent, category FROM rows ORDER BY n")
            for (length, num_tokens, num_trained, agent, category), (_, fate) in zip(
                rows, fates(decisions, number), strict=True
            ):
                if length is not None:
                    all_lengths[length] += 1
                if fate >= len(SPLITS):
                    continue
                split = SPLITS[fate]
                splits[split] += 1
                agents.setdefault(agent or NO_VALUE, Counter())[split] += 1
                categories.setdefault(category or NO_VALUE, Counter())[split] += 1
                lengths[length] += 1
                total += num_tokens or 0
                trained += num_trained or 0
    return {
        "splits": {split: splits[split] for split in SPLITS},
        "agents": {name: dict(counts) for name, counts in sorted(agents.items())},
        "categories": {name: dict(counts) for name, counts in sorted(categories.items())},
        "tokens": total if has_tokens else None,
        "trained_tokens": trained if has_tokens else None,
        "lengths": {"unit": "tokens" if has_tokens else "characters", **length_summary(lengths, all_lengths)},
    }


def length_summary(used: Counter[int], every: Counter[int]) -> dict[str, Any]:
    """Return quantiles of the used rows, the length that keeps 99 % of all rows, and a histogram of all rows."""
    return {
        "median": _quantile(used, 0.5),
        "p90": _quantile(used, 0.9),
        "p99": _quantile(used, 0.99),
        "max": max(used, default=0),
        "longest_seen": max(every, default=0),
        "keeps_99_percent": _quantile(every, KEPT_SHARE),
        "histogram": _histogram(every),
    }


def _quantile(counts: Counter[int], share: float) -> int:
    """Return the smallest length that at least `share` of the rows do not exceed."""
    wanted, seen = share * counts.total(), 0
    for length in sorted(counts):
        seen += counts[length]
        if seen >= wanted:
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


def _changes(results: Sequence[Path], decisions: Decisions) -> dict[str, Any]:
    """Return the first MAX_PROBLEMS changes of used rows with their places, and the number of the others."""
    changes: list[dict[str, str]] = []
    for number, path in enumerate(results):
        fate_of = dict(fates(decisions, number))
        with closing(open_result(path)) as database:
            query = "SELECT n, source, changed, notes FROM rows WHERE changed IS NOT NULL ORDER BY n"
            for n, source, changed, notes in database.execute(query):
                if fate_of[n] >= len(SPLITS):
                    continue
                details = dict(json.loads(notes)) if notes else {}
                for reason in changed.split(","):
                    what = details.get(reason, f"{REASONS[reason].meaning}; {REASONS[reason].hint}")
                    changes.append({"source": source, "reason": reason, "hint": what, "severity": "warn"})
    return {"changes": changes[:MAX_PROBLEMS], "changes_left_out": max(0, len(changes) - MAX_PROBLEMS)}


def _refused_as_a_file(results: Sequence[Path], decisions: Decisions) -> dict[str, int]:
    """Return the number of rows of each file whose rows are all refused for a reason of PER_FILE_REASONS."""
    refused: Counter[str] = Counter()
    marks = ", ".join("?" * len(PER_FILE_REASONS))
    for path in results:
        with closing(open_result(path)) as database:
            for (source,) in database.execute(f"SELECT source FROM rows WHERE reason IN ({marks})", PER_FILE_REASONS):
                refused[source.rpartition(":")[0]] += 1
    return {
        file: count for file, count in refused.items() if count > 1 and count == sum(decisions.files[file].values())
    }


def _problems(results: Sequence[Path], decisions: Decisions) -> Iterator[dict[str, str]]:
    """Yield the first MAX_PROBLEMS rows that are rejected or set aside, in input order."""
    left = MAX_PROBLEMS
    whole = _refused_as_a_file(results, decisions)
    for number, path in enumerate(results):
        if left <= 0:
            return
        wanted = {n: fate for n, fate in fates(decisions, number) if fate == REFUSED or fate in SET_ASIDE}
        if not wanted:
            continue
        with closing(open_result(path)) as database:
            for n, source, reason, hint in database.execute("SELECT n, source, reason, hint FROM rows ORDER BY n"):
                if n not in wanted or left <= 0:
                    continue
                name = reason or SET_ASIDE[wanted[n]]
                file = source.rpartition(":")[0]
                if name in PER_FILE_REASONS and file in whole:
                    if not (rows := whole[file]):
                        continue
                    whole[file] = 0
                    hint = f"all {rows:,} rows of this file; {REASONS[name].hint}"
                yield {
                    "source": source,
                    "reason": name,
                    "hint": hint or REASONS[name].hint,
                    "severity": severity_of(name),
                }
                left -= 1

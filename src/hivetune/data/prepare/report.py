"""The report of a preparation: every input row in exactly one place, with the reason.

`Report.document` is the content of `--json` and report.json (docs/formats.md). The dashboard shows it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.paths import spelled
from hivetune.config import DataConfig
from hivetune.data.columns import SYSTEM
from hivetune.data.mapping import near_column
from hivetune.data.pieces.values import Row
from hivetune.data.prepare.decide import Decisions
from hivetune.data.prepare.work import DUPLICATES, NO_VALUE, USABLE, Work, iter_dropped
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import SPLITS
from hivetune.errors import DataRefused

SHOWN_DUPLICATES = 5  # of each kind, in the report
SHOWN_EXTREMES, FREQUENT_ANSWERS, ANSWER_CHARS = 3, 10, 200
SHOWN_PLACES = 3  # of each reason, on a page
MAX_PROBLEMS = 20_000  # in the JSON; the quarantine file has all of them
NOT_RUN_WITHOUT_MODEL = ("template", "mask", "tokens", "control-token")
FITTING_SHARE = 0.99
MAX_NAMED = 8  # agents in a message


@dataclass(frozen=True)
class Report:
    """The report. Usable rows are trained or held out."""

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
        rejected, problems = self.document["rejected"], self.document["problems"]
        for reason in ("unread-column", "unread-outcome"):  # the file's other rows may mean something else
            if count := rejected.get(reason):
                hint = next(problem["hint"] for problem in problems if problem["reason"] == reason)
                raise DataRefused(f"{count:,} rows are refused ({reason}): {REASONS[reason].meaning}", hint=hint)
        # Rows that are set aside explain why none is left, but not why many are rejected.
        unused = rejected | ({} if self.usable else self.document["set_aside"])
        top = max(unused, key=unused.__getitem__, default="")
        why = f"mostly {top}: {REASONS[top].meaning}" if top else "all are duplicates"
        first = next((problem for problem in problems if not top or problem["reason"] == top), None)
        hint = f"{spelled(first['source'])}: {first['hint']}" if first else "see the reasons: hivetune check ROWS"
        suggested: list[dict[str, Any]] = next(iter(self.document["unclear"].values()), [])
        if suggested and "--columns" not in hint:
            hint = f"{hint}; if it is right: {suggested[0]['line']}"
        if self.usable == 0:
            raise DataRefused(f"none of {self.rows_in:,} rows is usable, {why}", hint=hint)
        if self.num_rejected > max_rejected * self.rows_in:
            raise DataRefused(
                f"{self.num_rejected:,} of {self.rows_in:,} rows are rejected ({why}); "
                f"data.max_rejected allows {max_rejected:.0%}",
                hint=hint,
            )
        for unmatched in self.document["unmatched"]:
            raise DataRefused(unmatched["problem"], hint=unmatched["hint"])


def make_report(work: Work, decisions: Decisions, *, model: Path | None, max_length: int) -> Report:
    """Return the report of all rows. Law 1 is asserted: rows_in = usable + duplicates + rejected + set aside."""
    fates, rejected, set_aside = work.counts(), work.refused("reject"), work.refused("set_aside")
    num_refused = sum(rejected.values()) + sum(set_aside.values())
    usable, duplicates = (sum(fates.get(fate, 0) for fate in kinds) for kinds in (SPLITS, DUPLICATES))
    assert work.num_rows == usable + duplicates + num_refused
    problems = list(_problems(work, [*rejected, *set_aside]))
    changes, changed = _changes(work)
    files: dict[str, dict[str, int]] = {}
    layouts = "SELECT file_of(source), coalesce(layout, ?), count(*) FROM rows GROUP BY 1, 2 ORDER BY min(n)"
    for name, layout, count in work.all(layouts, NO_VALUE):
        files.setdefault(name, {})[layout] = count
    return Report(
        {
            "schema": 1,
            "rows_in": work.num_rows,
            "usable": usable,
            "duplicates": duplicates,
            "rejected": rejected,
            "set_aside": set_aside,
            "exact_duplicates": fates.get("duplicate", 0),
            "beginnings": fates.get("beginning", 0),
            "near_duplicates": fates.get("near-duplicate", 0),
            "groups": decisions.groups,
            "problems": problems,
            "problems_left_out": num_refused - len(problems),
            "changed": changed,
            "changes": changes,
            "changes_left_out": sum(changed.values()) - len(changes),
            "files": files,
            "model": str(model) if model else None,
            "max_length": max_length if model else None,
            "synthetic": decisions.synthetic,
            "not_run": [] if model else list(NOT_RUN_WITHOUT_MODEL),
            "duplicate_examples": [
                {name: pair[name] for name in ("kind", "source", "same_as", "share")}
                for kind in DUPLICATES
                for pair in iter_dropped(work, kind, limit=SHOWN_DUPLICATES)
            ],
            "answers": _frequent_answers(work),
            **_distribution(work, max_length if model else None),
        }
    )


def unmatched(work: Work, data: DataConfig, row: Row) -> list[dict[str, str]]:
    """Return the mappings and settings that fit no row, each with its problem and a hint: they would be ignored without
    a word. `row` is one of the rows.
    """
    num_read = work.one("SELECT count(*) FROM rows WHERE hash64 NOT NULL")
    if num_read == 0:
        return []
    found: list[tuple[str, str]] = []
    for field, column in data.columns.items():
        lacking = work.one("SELECT count(*) FROM rows WHERE ',' || missing || ',' LIKE ?", f"%,{field},%")
        if lacking == num_read:
            hint = near_column(row, column) if row else "look at the names of its columns"
            hint = f"{hint}; a fixed text has quotes of its own: \"'{column}'\"" if field in SYSTEM else hint
            found.append((f"no row has the column {column!r}, which data.columns names as {field}", hint))
    agents = {agent for (agent,) in work.all("SELECT DISTINCT agent FROM rows WHERE agent NOT NULL")}
    if data.system_prompts and agents.isdisjoint(data.system_prompts):
        named = ", ".join(sorted(map(spelled, agents))[:MAX_NAMED])
        hint = f"rows have: {named}" if named else "if all rows are of one, map it: --columns \"agent='NAME'\""
        found.append((f"no row has an agent of data.system_prompts: {', '.join(data.system_prompts)}", hint))
    if data.balance != "none" and work.one(f"SELECT 1 FROM rows WHERE {data.balance} NOT NULL LIMIT 1") is None:
        problem = f"no row has the {data.balance} for data.balance: {data.balance}"
        found.append((problem, f"map it: --columns {data.balance}=COLUMN"))
    return [{"problem": problem, "hint": hint} for problem, hint in found]


def _problems(work: Work, refused: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the first MAX_PROBLEMS rows that are rejected or set aside, in input order."""
    query = f"SELECT fate, source, hint FROM rows WHERE fate IN ({', '.join('?' * len(refused))}) ORDER BY n LIMIT ?"
    for fate, source, hint in work.all(query, *refused, MAX_PROBLEMS):
        known = REASONS[fate]
        yield {"source": source, "reason": fate, "hint": hint or known.hint, "severity": known.severity}


def _changes(work: Work) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Return the first MAX_PROBLEMS changes of usable rows with their places, and the number of each kind."""
    changes: list[dict[str, str]] = []
    counts: Counter[str] = Counter()
    query = f"SELECT source, changed, notes FROM rows WHERE changed IS NOT NULL AND {USABLE} ORDER BY n"
    for source, changed, notes in work.all(query):
        reasons = changed.split(",")
        counts.update(reasons)
        if len(changes) < MAX_PROBLEMS:
            details = dict(json.loads(notes or "{}"))
            for reason in reasons:
                hint = details.get(reason, f"{REASONS[reason].meaning}; {REASONS[reason].hint}")
                changes.append({"source": source, "reason": reason, "hint": hint, "severity": "warn"})
    return changes, dict(sorted(counts.items()))


def _frequent_answers(work: Work) -> list[dict[str, Any]]:
    """Return the most frequent last answers of the usable rows, each with its number: what a placeholder or an error of
    an API looks like is for people to see.
    """
    query = (
        "SELECT json_extract(messages, '$[#-1].content') AS answer, count(*) FROM rows JOIN bodies USING (n)"
        f" WHERE {USABLE} GROUP BY answer HAVING count(*) > 1 ORDER BY 2 DESC, 1 LIMIT ?"
    )
    return [{"answer": answer[:ANSWER_CHARS], "rows": count} for answer, count in work.all(query, FREQUENT_ANSWERS)]


def _distribution(work: Work, max_length: int | None) -> dict[str, Any]:
    """Return splits, agents, categories and lengths of the usable rows. Without `max_length` lengths are characters."""

    def by_split(column: str) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        query = f"SELECT coalesce({column}, ?), fate, count(*) FROM rows WHERE {USABLE} GROUP BY 1, 2 ORDER BY 1, 2"
        for name, split, count in work.all(query, NO_VALUE):
            counts.setdefault(name, {})[split] = count
        return counts

    splits = by_split("NULL").get(NO_VALUE, {})
    lengths, seen = (
        Counter[int](dict(work.all(f"SELECT length, count(*) FROM rows WHERE {condition} GROUP BY length")))
        for condition in (USABLE, "length NOT NULL")
    )
    [(tokens, trained_tokens)] = work.all(f"SELECT total(num_tokens), total(trained) FROM rows WHERE {USABLE}")
    has_tokens = max_length is not None
    above = sum(count for length, count in seen.items() if length > max_length) if max_length else 0
    return {
        "splits": {split: splits.get(split, 0) for split in SPLITS},
        "agents": by_split("agent"),
        "categories": by_split("category"),
        "tokens": int(tokens) if has_tokens else None,
        "trained_tokens": int(trained_tokens) if has_tokens else None,
        "lengths": {
            "unit": "tokens" if has_tokens else "characters",
            "median": _quantile(lengths, 0.5),
            "p90": _quantile(lengths, 0.9),
            "p99": _quantile(lengths, 0.99),
            "max": max(lengths, default=0),
            "longest_seen": max(seen, default=0),
            "above_max_length": above / max(1, seen.total()) if has_tokens else None,
            "shortest": _extremes(work, "length"),
            "longest": _extremes(work, "-length"),
            "keeps_99_percent": _quantile(seen, FITTING_SHARE),
        },
    }


def _extremes(work: Work, order: str) -> list[dict[str, Any]]:
    """Return the places and lengths of the first usable rows in an order."""
    query = f"SELECT source, length FROM rows WHERE {USABLE} ORDER BY {order}, n LIMIT {SHOWN_EXTREMES}"
    return [{"source": source, "length": length} for source, length in work.all(query)]


def secrets_first(changes: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the changes in the order secrets, personal data, other changes."""
    first = ("redacted-secret", "redacted-personal")
    return sorted(
        changes, key=lambda change: first.index(change["reason"]) if change["reason"] in first else len(first)
    )


def places_by_reason(document: Mapping[str, Any]) -> dict[str, list[Mapping[str, str]]]:
    """Return the first SHOWN_PLACES rows of each reason, for pages."""
    places: dict[str, list[Mapping[str, str]]] = {}
    for problem in (*document["problems"], *document["changes"]):
        of_reason = places.setdefault(problem["reason"], [])
        if len(of_reason) < SHOWN_PLACES:
            of_reason.append(problem)
    return places


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

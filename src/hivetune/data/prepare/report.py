"""The report of a preparation: every input row in exactly one place, with the reason.

`Report.document` is the content of `--json` and report.json (docs/formats.md). The dashboard shows it.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.paths import spelled
from hivetune.config import DataConfig
from hivetune.data.columns import SYSTEM
from hivetune.data.intake.interactions import storable
from hivetune.data.mapping import near_column
from hivetune.data.pieces.values import Row
from hivetune.data.prepare.understand import column_entry
from hivetune.data.prepare.work import DUPLICATES, NO_VALUE, USABLE, Work
from hivetune.data.reasons import REASONS, REWRITTEN
from hivetune.data.snapshot import SPLITS
from hivetune.errors import DataRefused

SHOWN_EXTREMES = 3
# What a placeholder or an error of an API looks like is for people to see: it is among the most frequent answers.
FREQUENT_ANSWERS, ANSWER_CHARS = 10, 200
# Of each reason: a hint may hold a number of tokens, so that each row has its own.
SHOWN_HINTS = 10
SHOWN_AGENTS = 8
# What was redacted comes first, since a secret that was in a log has to be revoked.
REDACTED = ("redacted-secret", "redacted-personal")
# The file's other rows may mean something else, too.
REFUSES_ALL = ("unread-column", "unread-outcome")


@dataclass(frozen=True)
class Report:
    """The report of a preparation. `usable`: number of rows that are trained or held out."""

    document: dict[str, Any]

    @property
    def rows_in(self) -> int:
        return int(self.document["rows_in"])

    @property
    def usable(self) -> int:
        return int(self.document["usable"])

    def refuse(self, max_rejected: float, *, in_cycle: bool = False) -> None:
        """Raise DataRefused if no row is usable, if more than `max_rejected` (a share, 0 to 1) is rejected, or if a
        mapping fits no row; unless `in_cycle`, also if the columns of a file need a mapping.
        """
        if self.rows_in == 0:
            raise DataRefused("the files contain no rows", hint="give files with one row per line")
        rejected = self.document["rejected"]
        first = {problem["reason"]: problem for problem in reversed(self.document["problems"])}
        for reason in () if in_cycle else filter(rejected.get, REFUSES_ALL):
            message = f"{rejected[reason]:,} rows are refused ({reason}): {REASONS[reason].meaning}"
            raise DataRefused(message, hint=first[reason]["hint"])
        # Rows that are set aside explain why none is left, but not why many are rejected.
        unused = rejected | ({} if self.usable else self.document["set_aside"])
        why, hint = "all are duplicates", "see the reasons: hivetune check ROWS"
        if unused:
            top = max(unused, key=unused.__getitem__)
            why = f"mostly {top}: {REASONS[top].meaning}"
            hint = f"{spelled(first[top]['source'])}: {first[top]['hint']}"
        suggested: dict[str, str] | None = next(iter(self.document["unclear"].values()), None)
        if suggested and "--columns" not in hint:
            hint = f"{hint}; if this mapping is right: {suggested['line']}"
        if self.usable == 0:
            raise DataRefused(f"none of the {self.rows_in:,} rows is usable: {why}", hint=hint)
        left_out = sum(rejected.get(reason, 0) for reason in REFUSES_ALL)
        if (count := sum(rejected.values()) - left_out) > max_rejected * self.rows_in:
            allowed = f"data.max_rejected allows {max_rejected:.0%}"
            without = f"to go on without them: --set data.max_rejected={math.ceil(100 * count / self.rows_in) / 100:g}"
            message = f"{count:,} of {self.rows_in:,} rows are rejected ({why}); {allowed}"
            raise DataRefused(message, hint=f"{hint}; {without}")
        for unmatched in self.document["unmatched"]:
            raise DataRefused(unmatched["problem"], hint=unmatched["hint"])


def make_report(work: Work, more: Mapping[str, Any], *, model: Path | None, max_length: int) -> Report:
    """Return the report of all rows, with the parts in `more`.

    Law 1 is asserted: rows_in = usable + duplicates + rejected + set aside.
    """
    fates, rejected, set_aside = work.counts(), work.refused("reject"), work.refused("set_aside")
    usable, duplicates = (sum(fates.get(fate, 0) for fate in kinds) for kinds in (SPLITS, DUPLICATES))
    # A row in no count, or in two, is a bug, and never a report.
    assert work.num_rows == usable + duplicates + sum(rejected.values()) + sum(set_aside.values())
    changed, changes = _changes(work)
    [(tokens, trained_tokens)] = work.all(f"SELECT total(num_tokens), total(trained) FROM rows WHERE {USABLE}")
    return Report(
        {
            "schema": 1,
            "rows_in": work.num_rows,
            "usable": usable,
            "duplicates": duplicates,
            "rejected": rejected,
            "set_aside": set_aside,
            "changed": changed,
            "exact_duplicates": fates.get("duplicate", 0),
            "beginnings": fates.get("beginning", 0),
            "near_duplicates": fates.get("near-duplicate", 0),
            "problems": _problems(work),
            "changes": changes,
            "splits": {split: fates.get(split, 0) for split in SPLITS},
            "agents": _by_split(work, "agent"),
            "categories": _by_split(work, "category"),
            "model": str(model) if model else None,
            "max_length": max_length if model else None,
            "tokens": int(tokens) if model else None,
            "trained_tokens": int(trained_tokens) if model else None,
            "lengths": _lengths(work, max_length if model else None),
            "answers": _frequent_answers(work),
            **more,
        }
    )


def with_late_columns(
    work: Work, formats: Mapping[str, Sequence[Mapping[str, Any]]], ignore: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the formats of each file (understand.py) with the unread columns that its first rows do not have."""
    found = {storable(name): [dict(form) for form in forms] for name, forms in formats.items()}
    query = (
        "SELECT min(n), count(*), file_of(source), source, layout, key, count(DISTINCT value), value"
        " FROM rows, json_each(late) GROUP BY file_of(source), layout, key ORDER BY 1"
    )
    for _, rows, name, place, layout, column, distinct, example in work.all(query):
        forms = found.setdefault(name, [])
        form = next((form for form in forms if form["layout"] == layout), None)
        if form is None:
            form = {"layout": layout, "rows": rows, "rows_at": "", "read": [], "not_read": []}
            forms.append(form)
        entry = column_entry(column, distinct, example, column in ignore, f"first in {place}")
        form["not_read"] = [*form["not_read"], entry]
    return found


def unmatched(work: Work, data: DataConfig, row: Row) -> list[dict[str, str]]:
    """Return the mappings and settings that fit no row, each with its problem and a hint. `row` is one of the rows."""
    # They would be ignored without a word, and another column be read.
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
        named = ", ".join(sorted(map(spelled, agents))[:SHOWN_AGENTS])
        hint = f"rows have: {named}" if named else "if all rows are of one, map it: --columns \"agent='NAME'\""
        found.append((f"no row has an agent of data.system_prompts: {', '.join(data.system_prompts)}", hint))
    if data.balance != "none" and work.one(f"SELECT 1 FROM rows WHERE {data.balance} NOT NULL LIMIT 1") is None:
        problem = f"no row has the {data.balance} for data.balance: {data.balance}"
        found.append((problem, f"map it: --columns {data.balance}=COLUMN"))
    return [{"problem": problem, "hint": hint} for problem, hint in found]


def duplicate_kinds(document: Mapping[str, Any]) -> str:
    """Return the number of duplicates of each kind as text."""
    return (
        f"{document['exact_duplicates']:,} equal, {document['beginnings']:,} the beginning of a longer row, "
        f"{document['near_duplicates']:,} nearly equal"
    )


def _problems(work: Work) -> list[dict[str, Any]]:
    """Return reason, place and number of rows that are rejected or set aside, in input order."""
    # With min(n) SQLite takes the other columns from the row that has it.
    return _places(
        (source, reason, hint or REASONS[reason].hint, rows)
        for source, reason, hint, rows, _ in work.all(
            "SELECT source, fate, hint, count(*), min(n) AS first FROM rows"
            f" WHERE fate NOT IN {(*SPLITS, *DUPLICATES)} GROUP BY fate, hint ORDER BY first"
        )
    )


def _changes(work: Work) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return reason -> number of changed usable rows, and the places of these rows: redactions first, then in input
    order.
    """
    first: dict[tuple[str, str], str] = {}
    rows, counts = Counter[tuple[str, str]](), Counter[str]()
    query = f"SELECT source, changed, notes FROM rows WHERE changed IS NOT NULL AND {USABLE} ORDER BY n"
    for source, changed, notes in work.all(query):
        details = dict(json.loads(notes or "[]"))
        found = dict.fromkeys(_change(word, details.get(word)) for word in changed.split(","))
        for kind in found:
            first.setdefault(kind, source)
        rows.update(found.keys())
        counts.update({reason for reason, _ in found})
    kinds = sorted(first, key=lambda kind: REDACTED.index(kind[0]) if kind[0] in REDACTED else len(REDACTED))
    return dict(sorted(counts.items())), _places((first[kind], *kind, rows[kind]) for kind in kinds)


def _change(word: str, detail: str | None) -> tuple[str, str]:
    """Return the reason of a change, and its detail: the format's note, or the kind of find in the row."""
    if word in REWRITTEN:
        return "rewritten", REWRITTEN[word]
    return word, detail or f"{REASONS[word].meaning}; {REASONS[word].hint}"


def _places(kinds: Iterable[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    """Return the first SHOWN_HINTS of each reason: the place of its first row, and the number of rows."""
    shown, places = Counter[str](), []
    for source, reason, hint, rows in kinds:
        shown[reason] += 1
        if shown[reason] <= SHOWN_HINTS:
            severity = REASONS[reason].severity
            places.append({"source": source, "rows": rows, "reason": reason, "hint": hint, "severity": severity})
    return places


def _frequent_answers(work: Work) -> list[dict[str, Any]]:
    """Return the last answers that several usable rows have, the most frequent first, each with its number of rows."""
    query = (
        "SELECT json_extract(messages, '$[#-1].content') AS answer, count(*) FROM rows JOIN bodies USING (n)"
        f" WHERE {USABLE} GROUP BY answer HAVING count(*) > 1 ORDER BY 2 DESC, 1 LIMIT ?"
    )
    return [{"answer": answer[:ANSWER_CHARS], "rows": count} for answer, count in work.all(query, FREQUENT_ANSWERS)]


def _by_split(work: Work, column: str) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    query = f"SELECT coalesce({column}, ?), fate, count(*) FROM rows WHERE {USABLE} GROUP BY 1, 2 ORDER BY 1, 2"
    for name, split, count in work.all(query, NO_VALUE):
        counts.setdefault(name, {})[split] = count
    return counts


def _lengths(work: Work, max_length: int | None) -> dict[str, Any]:
    """Return the distribution of lengths of all readable rows, in tokens, or in characters without a model."""
    # Rows that are too long count: `init` sets max_length by these figures.
    counts = dict(work.all("SELECT length, count(*) FROM rows WHERE length NOT NULL GROUP BY length ORDER BY length"))
    above = sum(count for length, count in counts.items() if length > max_length) if max_length else 0
    return {
        "unit": "tokens" if max_length else "characters",
        "median": _quantile(counts, 0.5),
        "p90": _quantile(counts, 0.9),
        "p99": _quantile(counts, 0.99),
        "max": max(counts, default=0),
        "above_max_length": above / max(1, sum(counts.values())) if max_length else None,
        "shortest": _extremes(work, "length"),
        "longest": _extremes(work, "-length"),
    }


def _quantile(counts: Mapping[int, int], share: float) -> int:
    """Return the smallest length that at least `share` (0 to 1) of the rows do not exceed. `counts` ascend by
    length.
    """
    needed, num_rows = share * sum(counts.values()), 0
    for length, count in counts.items():
        num_rows += count
        if num_rows >= needed:
            return length
    return 0


def _extremes(work: Work, order: str) -> list[dict[str, Any]]:
    query = f"SELECT source, length FROM rows WHERE {USABLE} ORDER BY {order}, n LIMIT {SHOWN_EXTREMES}"
    return [{"source": source, "length": length} for source, length in work.all(query)]

"""The rows of a cycle: all that the config has now, what training on them would take, and which of them are chosen.

While all fit the budget, all are trained on. Else all new ones, the oldest first, and a random part of the old. Each
row that is left out has a reason, so that the sums of the report still hold. The choice is pure: the same rows give the
same one. What one client can teach is limited where rows are prepared (data).

A domain (`cycle.by`) is an agent or category with enough rows: it gets a cycle like any other, as NAME-VALUE, once
after each promotion of NAME. Its rows are those of its value, in the splits that all rows have, so that no session is
trained on here and judged by there. It starts from the adapter of NAME's champion and has to beat that champion on the
domain's held-out rows. If it does not, an earlier adapter of the domain is retired.
"""

import contextlib
import hashlib
import json
import math
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base import units
from hivetune.base.disk import MANIFEST, read_json, sha256_file
from hivetune.config import RunConfig
from hivetune.cycle.record import CycleRow, Domain, cycles_of, domain_value, trained_rows
from hivetune.data.files.find import find_sources
from hivetune.data.identity import settings_of
from hivetune.data.prepare.prepare import prepare_data
from hivetune.data.prepare.report import REFUSES_ALL
from hivetune.data.snapshot import REPORT, PoolRow, Snapshot, open_snapshot
from hivetune.errors import DataRefused, UsageError
from hivetune.models.prepared import fetch_model, folder_for
from hivetune.release.registry import Release, check_release_name, forgotten_rows, snapshot_folder
from hivetune.run.folder import read_record
from hivetune.train.plan.run import plan_document, plan_run

MIN_STEPS = 10  # fewer are not worth an evaluation, which takes minutes
# With fewer a domain has little to add to what all rows taught; not measured.
MIN_ROWS = 200
# Held-out sessions; with fewer no interval is narrow enough at a divided level.
MIN_HELD_OUT = 20
SHOWN_SOURCES = 5  # a person looks at the largest first


@dataclass(frozen=True)
class RowsNow:
    """All current rows of the config. `groups`: number of groups with new usable rows, plus the champion's rows that
    were forgotten since the last cycle. `problem`: the reason why the rows can't be trained, or "". `key`: the state of
    the inputs, to notice changes. `left_out`: the files whose rows need a mapping, and their number, or "".
    """

    snapshot: Snapshot | None = None
    groups: int = 0
    problem: str = ""
    key: tuple[Any, ...] | None = None
    left_out: str = ""


def read_rows_now(
    config: RunConfig, database: sqlite3.Connection, name: str, champion: Release | None, before: RowsNow
) -> RowsNow:
    """Return the current rows. `before` is returned again if neither the inputs nor the trained rows have changed."""
    key: tuple[Any, ...] | None = None
    try:
        behind = None if champion is None else champion.snapshot
        looked = max((cycle.opened for cycle in cycles_of(database, name) if cycle.end != "failed"), default=0.0)
        forgotten = 0 if champion is None else forgotten_rows(database, champion.snapshot, looked)
        key = (_inputs(config, database), len(trained_rows(database, name)), behind, forgotten, config)
        if before.key == key:
            return before
        pool = pool_of(config)
        rows = list(pool.pool())
        _, problem = planned(config, rows)
    except DataRefused as error:
        return RowsNow(problem=error.message, key=key)
    except UsageError as error:
        # Not remembered: what a person mends elsewhere, such as a missing model, is tried at each look.
        return RowsNow(problem=error.message)
    known = known_rows(database, name, champion)
    # A release's own answer is no evidence, so it is no reason to begin either.
    new = {row.group_id for row in rows if row.id not in known and row.answered_by is None}
    return RowsNow(pool, len(new) + forgotten, problem, key, _left_out(pool))


def _left_out(pool: Snapshot) -> str:
    """Return what a person has to decide before some files are read, or ""."""
    problems = [one for one in read_json(pool.folder / REPORT)["problems"] if one["reason"] in REFUSES_ALL]
    found = [f"{units.count(one['rows'], 'row')} as of {one['source']} ({one['reason']})" for one in problems]
    return f"left out until hivetune check is content with their columns: {', '.join(found)}" if found else ""


def _inputs(config: RunConfig, database: sqlite3.Connection) -> tuple[Any, ...]:
    """Return a key that changes whenever the rows may have changed: the store's counts, and the size and time of each
    file.
    """
    # A look comes each minute; preparing a million rows only to find the same takes longer than that.
    counts = "count(*), max(rowid), count(feedback), total(feedback), total(length(row))"
    marks: list[Any] = [
        database.execute(f"SELECT {counts} FROM interactions").fetchone(),
        database.execute("SELECT count(*) FROM forgotten").fetchone(),
        database.execute("SELECT count(*), max(time) FROM set_aside").fetchone(),
    ]
    for name in find_sources(config.data.path):
        with contextlib.suppress(FileNotFoundError):  # a log that is renamed at this moment
            status = os.stat(name)
            marks.append((name, status.st_size, status.st_mtime_ns))
    return tuple(marks)


def pool_of(config: RunConfig) -> Snapshot:
    """Return the snapshot of all rows of the config, before a cycle leaves any out. Raises as `prepare_data`."""
    return prepare_data(config, fetch_model(config.model, template=config.template))


def known_rows(database: sqlite3.Connection, name: str, champion: Release | None) -> frozenset[str]:
    """Return the ids of the rows that are not new: those of earlier cycles and of the champion."""
    return trained_rows(database, name) | rows_behind(database, champion)


def rows_behind(database: sqlite3.Connection, release: Release | None) -> frozenset[str]:
    """Return the ids of the rows that a release was trained on or judged by, even if a person registered it. If its
    snapshot is gone or damaged, return the rows of all cycles of its name.
    """
    if release is None:
        return frozenset()
    with contextlib.suppress(UsageError):
        if folder := snapshot_folder(database, release.snapshot):
            return ids_of(open_snapshot(folder))
    return trained_rows(database, release.name)


def ids_of(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(row.id for row in snapshot.pool())


def rows_of(cycle: CycleRow) -> list[PoolRow]:
    """Return the rows that a cycle's run trained on or held out; an empty list if the run is gone."""
    try:
        return list(open_snapshot(Path(read_record(cycle.run)["snapshot"])).pool())
    except (UsageError, KeyError):
        return []


def choose_rows(
    rows: Sequence[PoolRow], known: Collection[str], budget_tokens: int | None, domain: Domain | None = None
) -> dict[str, str]:
    """Return id -> reason of each row that a cycle leaves out. `known`: ids of the rows of earlier cycles and of the
    champion. `budget_tokens`: the limit of trained tokens, each row counted once; None for no limit. `domain`: rows
    outside it are left out.
    """
    # A release's own answer is never evidence, so that no release judges its successors.
    left_out = {row.id: "own-answer" for row in rows if row.split != "train" and row.answered_by is not None}
    left_out |= {row.id: "filtered" for row in rows if domain is not None and not domain.holds(row)}
    # Only trained rows cost training; the held-out ones stay, so that all candidates are judged by the same.
    trained = [row for row in rows if row.split == "train" and row.id not in left_out]
    # All new ones before any old one: what nobody has learned yet is why this cycle runs.
    room = sum(row.length for row in trained) if budget_tokens is None else budget_tokens
    new = [row for row in trained if row.id not in known]
    new.sort(key=lambda row: (math.inf if row.time is None else row.time, _by_content(row)))
    old = sorted((row for row in trained if row.id in known), key=_by_content)
    for row in (*new, *old):
        if row.length <= room:
            room -= row.length
        else:
            left_out[row.id] = "not-drawn"
    return left_out


def _by_content(row: PoolRow) -> tuple[Hashable, ...]:
    # Keyed, so that nobody can write rows that are always or never replayed.
    return (blake2b(row.id.encode(), digest_size=8, key=b"hivetune cycle").digest(), row.id)


def affordable_tokens(config: RunConfig, rows: Sequence[PoolRow], hours: float | None) -> int | None:
    """Return the number of trained tokens that fit the budget, but at least those of a few steps; None if all rows fit.
    `hours`: the planned time for all rows."""
    budget, lengths = config.cycle.hours, [row.length for row in rows if row.split == "train"]
    if budget is None or hours is None or hours <= budget or not lengths:
        return None
    few = MIN_STEPS * config.batch_size * sum(lengths) / len(lengths)
    return int(max(few, sum(lengths) * budget / hours))


def planned(config: RunConfig, rows: Sequence[PoolRow]) -> tuple[float | None, str]:
    """Return (upper end of the planned hours for all rows, None if unknown; reason why the plan does not fit,
    or "").
    """
    lengths = [row.length for row in rows if row.split == "train"]
    plan = plan_run(config, rows=max(1, len(lengths)), tokens=max(1, sum(lengths) // max(1, len(lengths))))
    document = plan_document(plan)
    hours = document["hours_range"][1] if document["fits"] and document["hours_range"] else None
    return hours, "" if plan.refusal is None else plan.refusal.message


def cycle_id(pool: Snapshot, config: RunConfig, champion: Release | None) -> str:
    """Return the cycle's id, 12 hex digits: a hash of the rows to choose from, the settings, the base and the
    champion."""
    # By content: a base that was downloaded again is the same.
    model = folder_for(config.model, config.template) / MANIFEST
    parts = {
        "rows": pool.hash,
        "settings": settings_of(config),
        # No other run for these, but another cycle: one that failed by them is not begun again with them.
        **{key: getattr(config, key).model_dump(mode="json") for key in ("gate", "eval")},
        "name": config.cycle.name,
        "model": sha256_file(model) if model.exists() else None,
        "champion": champion.adapter_sha256 if champion is not None else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def by_source(rows: Iterable[PoolRow]) -> str:
    """Return the number of rows of each source as text, the largest first."""
    counts = Counter(row.source.rpartition(":")[0] or row.source for row in rows).most_common()
    more = [f"{len(counts) - SHOWN_SOURCES} more sources"] if len(counts) > SHOWN_SOURCES else []
    return ", ".join([*(f"{count} of {source}" for source, count in counts[:SHOWN_SOURCES]), *more])


def domains_of(config: RunConfig, rows: Iterable[PoolRow]) -> list[Domain]:
    """Return the domains that have enough rows, sorted by name. A value that can't be part of a release name, or that
    has the same name as another value, is not a domain."""
    of, by = config.cycle.name, config.cycle.by
    if of is None or by is None:
        return []
    trained: Counter[str] = Counter()
    held_out: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        value = domain_value(row, by)
        trained[value] += row.split == "train"
        if row.split == "test" and row.answered_by is None:
            held_out[value].add(row.group_id)
    enough = [value for value, count in trained.items() if count >= MIN_ROWS and len(held_out[value]) >= MIN_HELD_OUT]
    found = [Domain(of, by, value) for value in enough if value]
    names = Counter(domain.name for domain in found)
    usable = [domain for domain in found if names[domain.name] == 1 and _is_name(domain.name)]
    # All of them together replace the champion wrongly as often as one cycle does.
    return [replace(domain, shares=len(usable)) for domain in sorted(usable, key=lambda domain: domain.name)]


def _is_name(name: str) -> bool:
    try:
        return bool(check_release_name(name))
    except UsageError:
        return False


def domain_config(config: RunConfig, domain: Domain, champion: Release) -> RunConfig:
    """Return the config of a domain's cycle, which starts from the adapter of NAME's champion."""
    cycle = config.cycle.model_copy(update={"name": domain.name})
    lora = config.lora.model_copy(update={"start": str(champion.folder)})
    return config.model_copy(update={"cycle": cycle, "lora": lora})

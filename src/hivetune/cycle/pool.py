"""The rows of a cycle: all that the config has now, what training on them would take, and which of them are chosen.

They are read again only when they changed. While all fit the budget, all are trained on. Else all new ones and,
stratified by agent and category, those of the old ones that the champion scores worst. No user, source or release has
more than its share. Each row that is left out is named with its reason (`data.leave_out`), so that the sums of the
report still hold. The choice is pure: the same rows and scores give the same one.
"""

import contextlib
import hashlib
import json
import math
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.config import RunConfig
from hivetune.cycle.ledger import CycleRow, suspect_rows, trained_rows
from hivetune.data.identity import settings_of
from hivetune.data.intake.files import find_sources
from hivetune.data.prepare.prepare import prepare_data
from hivetune.data.snapshot import PoolRow, Snapshot, open_snapshot
from hivetune.errors import DataRefused, UsageError
from hivetune.models.fetch import fetch_model
from hivetune.models.prepared import folder_for
from hivetune.release.registry import Release, releases, snapshot_folder
from hivetune.run.folder import read_record
from hivetune.serve.swap.wanted import Checks
from hivetune.train.plan.run import plan_document, plan_run

# Shares of the trained tokens. None was measured here: they bound what one voice can do before the gate sees it. Adding
# own answers to real rows does not collapse a model, replacing real rows does (arXiv 2404.01413).
OWN_SHARE, VOICE_SHARE, GENERAL_SHARE = 0.25, 0.30, 0.05
# Among fewer users or sources somebody always has more than 30 %, and rows would be left out for the others' silence.
MIN_VOICES = 5
MIN_REPLAY = 0.30  # where training goes on from the champion (1 % holds only for large models: arXiv 2205.12393)
MAX_IN_A_ROW = 5  # cycles that go on from the last one before the next begins from the base again


@dataclass(frozen=True)
class RowChoice:
    """The chosen rows. `left_out`: id -> reason, of all splits; all other rows are used. `new_groups`: groups that
    count towards the threshold. `new_tokens`, `old_tokens` and `general_tokens`: of the rows that are trained."""

    left_out: Mapping[str, str]
    new_groups: int
    new_tokens: int
    old_tokens: int
    general_tokens: int


@dataclass(frozen=True)
class ChoiceSettings:
    """The settings of a choice of rows. `known`: ids of the rows that cycles had or that the champion was made with.
    `suspect`: ids of rows that came with a worse model. `general`: files of the general rows, as rows name them.

    `budget_tokens`: maximum number of tokens of the trained rows, each counted once; None for no limit. `replay`: share
    of them for old rows when not all fit. `going_on`: training continues from the champion, so old rows are only
    replayed. `scores`: nats per token of the champion on old rows, by id; a row without a score is taken last.
    """

    known: Collection[str] = ()
    suspect: Collection[str] = ()
    general: Collection[str] = ()
    budget_tokens: int | None = None
    replay: float = 0.5
    going_on: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)


def begins_from(start_from: str, in_a_row: int) -> str:
    """Return "base" or "last". `in_a_row`: cycles up to the champion that each continued from the adapter before."""
    return "last" if start_from == "last" and in_a_row < MAX_IN_A_ROW else "base"


def new_groups(rows: Sequence[PoolRow], settings: ChoiceSettings) -> int:
    """Count the groups with a new row that counts: not a release's own answer, not a general row, not above a share."""
    left_out = _over_shares(rows, settings)
    return len({row.tied for row in rows if row.id not in left_out and _counts(row, settings)})


def needs_scores(rows: Sequence[PoolRow], settings: ChoiceSettings) -> bool:
    """Return whether the champion must score the old rows before `choose_rows` can distinguish them."""
    trained = [row for row in rows if row.split == "train" and row.id not in settings.suspect]
    over = settings.budget_tokens is not None and sum(row.length for row in trained) > settings.budget_tokens
    return bool(settings.known) and (over or settings.going_on)


def choose_rows(rows: Sequence[PoolRow], settings: ChoiceSettings) -> RowChoice:
    """Choose the rows that a cycle trains and judges on. A row is in `left_out` once, with its first reason."""
    left_out = _over_shares(rows, settings)
    groups = len({row.tied for row in rows if row.id not in left_out and _counts(row, settings)})
    left_out |= _over_budget(_remaining(rows, left_out, "train"), settings)
    while more := _over_shares([row for row in rows if row.id not in left_out], settings):
        left_out |= more  # what the budget took away made a share too large; each turn leaves out more, so this ends
    trained = _remaining(rows, left_out, "train")
    general = sum(row.trained for row in trained if _is_general(row, settings))
    old = sum(row.trained for row in trained if row.id in settings.known and not _is_general(row, settings))
    return RowChoice(left_out, groups, sum(row.trained for row in trained) - old - general, old, general)


def _remaining(rows: Iterable[PoolRow], left_out: Mapping[str, str], split: str) -> list[PoolRow]:
    return [row for row in rows if row.split == split and row.id not in left_out]


def _counts(row: PoolRow, settings: ChoiceSettings) -> bool:
    return row.id not in settings.known and row.answered_by is None and not _is_general(row, settings)


def _is_general(row: PoolRow, settings: ChoiceSettings) -> bool:
    return _source(row) in settings.general


def _source(row: PoolRow) -> str:
    return row.source.rpartition(":")[0] or row.source


# Shares hold for training and for evidence alike, so that one voice can't write the test that it is judged by.


def _over_shares(rows: Sequence[PoolRow], settings: ChoiceSettings) -> dict[str, str]:
    left_out = {row.id: "own-evidence" for row in rows if row.split != "train" and row.answered_by is not None}
    left_out |= {row.id: "suspect" for row in rows if row.id in settings.suspect}
    for split in ("train", "validation", "test"):
        remaining = _remaining(rows, left_out, split)
        plain = [row for row in remaining if not _is_general(row, settings)]
        for name, voice in (("user-share", lambda row: row.user), ("source-share", _stated_source)):
            plain = [row for row in plain if row.id not in left_out]
            left_out |= dict.fromkeys(_over_voices(plain, voice, settings), name)
        plain = [row for row in plain if row.id not in left_out]
        own_rows = [row for row in plain if row.answered_by is not None]
        others = sum(row.trained for row in plain) - sum(row.trained for row in own_rows)
        left_out |= dict.fromkeys(_beyond(own_rows, others * OWN_SHARE / (1 - OWN_SHARE), _newest_first), "own-share")
        general = [row for row in remaining if _is_general(row, settings)]
        plain = [row for row in plain if row.id not in left_out]
        room = sum(row.trained for row in plain) * GENERAL_SHARE / (1 - GENERAL_SHARE)
        left_out |= dict.fromkeys(_beyond(general, room, _by_content), "general-share")
    return left_out


def _stated_source(row: PoolRow) -> str | None:
    """Return the source of a row. Captured rows have users, and no source of their own."""
    return None if row.source.startswith("gateway:") else _source(row)


def _over_voices(
    rows: Sequence[PoolRow], voice: Callable[[PoolRow], str | None], settings: ChoiceSettings
) -> list[str]:
    """Return rows of voices above their share of the tokens: 30 %, or their share among the champion's rows."""
    tokens: Counter[str] = Counter()
    before: Counter[str] = Counter()
    mine: dict[str, list[PoolRow]] = defaultdict(list)
    for row in rows:
        if (name := voice(row)) is not None:
            tokens[name] += row.trained
            mine[name].append(row)
            before[name] += row.trained if row.id in settings.known else 0
    earlier = sum(row.trained for row in rows if row.id in settings.known)
    if len(tokens) < MIN_VOICES:
        return []
    shares = {name: max(VOICE_SHARE, before[name] / earlier if earlier else 0.0) for name in tokens}
    return [
        identity
        for name, limit in _limits(tokens, shares, sum(row.trained for row in rows)).items()
        for identity in _beyond(mine[name], limit, lambda row: (row.id not in settings.known, _by_content(row)))
    ]


def _limits(tokens: Mapping[str, int], shares: Mapping[str, float], total: float) -> dict[str, float]:
    """Return the most tokens of each voice that is above its share of the rest when all are held to theirs."""
    limited: dict[str, float] = {}
    rest, shared = total, 0.0
    for name in sorted(tokens, key=lambda name: (-tokens[name] / shares[name], name)):
        whole = rest / (1 - shared)
        if tokens[name] <= shares[name] * whole or shared + shares[name] >= 1:
            break
        rest -= tokens[name]
        shared += shares[name]
        limited[name] = shares[name]
    return {name: share * rest / (1 - shared) for name, share in limited.items()}


def _beyond(rows: Sequence[PoolRow], room: float, order: Callable[[PoolRow], tuple[Hashable, ...]]) -> list[str]:
    """Return the ids of the rows that do not fit into `room` trained tokens, taken in order."""
    beyond, used = [], 0
    for row in sorted(rows, key=order):  # type: ignore[arg-type]
        if used + row.trained > room:
            beyond.append(row.id)
        else:
            used += row.trained
    return beyond


def _over_budget(rows: Sequence[PoolRow], settings: ChoiceSettings) -> dict[str, str]:
    """Return the training rows beyond the budget, and where training continues, the old rows that are not replayed."""
    budget = math.inf if settings.budget_tokens is None else settings.budget_tokens
    if not settings.going_on and sum(row.length for row in rows) <= budget:
        return {}

    def oldest_first(row: PoolRow) -> tuple[float, Hashable]:
        return (math.inf if row.time is None else row.time, _by_content(row))

    always = [row for row in rows if _is_general(row, settings)]
    new = [row for row in rows if row.id not in settings.known and not _is_general(row, settings)]
    old = [row for row in rows if row.id in settings.known and not _is_general(row, settings)]
    room = budget - sum(row.length for row in always)
    replay = max(settings.replay, MIN_REPLAY) if settings.going_on else settings.replay
    old_length = sum(row.length for row in old)
    new_chosen = _take(sorted(new, key=oldest_first), max(room * (1 - replay), room - old_length))
    used = sum(row.length for row in new_chosen)
    for_old = room - used
    if settings.going_on:
        for_old = min(for_old, used * replay / (1 - replay) if replay < 1 else for_old)
    ids = {row.id for row in (*always, *new_chosen, *_take(_worst_of_each(old, settings.scores), for_old))}
    return {row.id: "not-replayed" if row.id in settings.known else "next-cycle" for row in rows if row.id not in ids}


def _take(rows: Iterable[PoolRow], room: float) -> list[PoolRow]:
    """Take rows in order while they fit. A row that does not fit is skipped."""
    chosen, used = [], 0
    for row in rows:
        if used + row.length <= room:
            used += row.length
            chosen.append(row)
    return chosen


def _worst_of_each(rows: Sequence[PoolRow], scores: Mapping[str, float]) -> list[PoolRow]:
    """Order rows by the worst score within each agent and category, and interleave these: any beginning of the list has
    the share of each stratum that the whole has."""
    strata: dict[tuple[str, str], list[PoolRow]] = defaultdict(list)
    for row in rows:
        strata[row.agent or "", row.category or ""].append(row)
    ranked: list[tuple[float, str, PoolRow]] = []
    for stratum in strata.values():
        # A missing score or NaN comes last: a row that a model can't score is no lesson to repeat.
        known = {row.id: scores[row.id] for row in stratum if math.isfinite(scores.get(row.id, math.nan))}
        stratum.sort(key=lambda row: (-known.get(row.id, -math.inf), _by_content(row)))
        ranked += [((rank + 0.5) / len(stratum), row.id, row) for rank, row in enumerate(stratum)]
    return [row for _, _, row in sorted(ranked, key=lambda rank: rank[:2])]


def _by_content(row: PoolRow) -> tuple[Hashable, ...]:
    """Return a sort key that is the same for the same rows and that nobody can choose."""
    return (blake2b(row.id.encode(), digest_size=8, key=b"hivetune cycle").digest(), row.id)


def _newest_first(row: PoolRow) -> tuple[Hashable, ...]:
    return (math.inf if row.time is None else -row.time, _by_content(row))


MIN_STEPS = 10  # fewer are not worth an evaluation


@dataclass(frozen=True)
class RowsNow:
    """All current rows of the config. `groups`: number of groups with new usable rows. `hours`: predicted maximum hours
    of training, None if unknown. `problem`: why the rows can't be trained."""

    snapshot: Snapshot | None = None
    groups: int = 0
    hours: float | None = None
    disk_bytes: int = 0
    problem: str = ""


@dataclass
class LookCache:
    """A cache between two looks, so that nothing unchanged is read twice."""

    checks: Checks = field(default_factory=Checks)
    key: tuple[Any, ...] | None = None
    rows: RowsNow = field(default_factory=RowsNow)


def read_rows_now(
    config: RunConfig, database: sqlite3.Connection, name: str, champion: Release | None, cache: LookCache
) -> RowsNow:
    """Return the rows, read again only when the inputs or the trained rows changed."""
    behind = None if champion is None else champion.snapshot
    remembered = len(trained_rows(database, name)), len(suspect_rows(database, name)), behind
    try:
        key = (_inputs(config, database), remembered, config)
        if cache.key != key:
            cache.rows = _read(config, database, name, champion)
            cache.key = key
    except UsageError as error:
        return RowsNow(problem=error.message)
    return cache.rows


def _read(config: RunConfig, database: sqlite3.Connection, name: str, champion: Release | None) -> RowsNow:
    """Read the rows. Refused rows are remembered too, until they change."""
    try:
        pool = pool_of(config)
    except DataRefused as error:
        return RowsNow(problem=error.message)
    settings = choice_settings(database, config, name, champion)
    rows = [row for row in pool.pool() if row.id not in settings.suspect]
    groups = new_groups(rows, settings)
    hours, disk_bytes, problem = _planned(config, rows)
    if budget_tokens(config, rows) is not None:
        hours = config.cycle.hours  # the choice of rows keeps to it
    return RowsNow(pool, groups, hours, disk_bytes, problem)


def _planned(config: RunConfig, rows: Sequence[PoolRow]) -> tuple[float | None, int, str]:
    """Plan a training on all rows: the upper end of its hours, bytes on the disk, and why it does not fit."""
    lengths = [row.length for row in rows if row.split == "train"]
    planned = plan_run(config, rows=max(1, len(lengths)), tokens=max(1, sum(lengths) // max(1, len(lengths))))
    document = plan_document(planned)
    hours = document["hours_range"][1] if document["fits"] else None
    return hours, sum(document["disk_bytes"].values()), planned.why_not


def budget_tokens(config: RunConfig, rows: Sequence[PoolRow]) -> int | None:
    """Return how many tokens of rows fit the budget of hours, or None where all fit, or not even a few steps would."""
    budget, (hours, _, _) = config.cycle.hours, _planned(config, rows)
    lengths = [row.length for row in rows if row.split == "train"]
    if budget is None or hours is None or hours <= budget or not lengths:
        return None
    tokens = int(sum(lengths) * budget / hours)
    return tokens if tokens >= MIN_STEPS * config.batch_size * sum(lengths) / len(lengths) else None


def _inputs(config: RunConfig, database: sqlite3.Connection) -> tuple[Any, ...]:
    """Return what changes whenever the rows may have changed: the store's counts, and size and time of files."""
    paths = config.data.path
    marks: list[Any] = [
        database.execute(
            "SELECT count(*), max(rowid), count(feedback), total(feedback), total(length(row)) FROM interactions"
        ).fetchone(),
        database.execute("SELECT count(*) FROM forgotten").fetchone(),
    ]
    for name in find_sources(paths):
        with contextlib.suppress(FileNotFoundError):  # a log that is renamed at this moment
            status = os.stat(name)
            marks.append((name, status.st_size, status.st_mtime_ns))
    return tuple(marks)


def pool_of(config: RunConfig) -> Snapshot:
    """Return all rows of the config, before a cycle leaves any out. Raises what preparing raises."""
    return prepare_data(config, fetch_model(config.model))


def rows_behind(database: sqlite3.Connection, release: Release) -> frozenset[str]:
    """Return the ids of the rows that a release was trained on or judged by, even if a person registered it. If its
    snapshot is gone, return the rows of all cycles of its name."""
    folder = snapshot_folder(database, release.snapshot)
    if folder is None:
        return trained_rows(database, release.name)
    try:
        return frozenset(row.id for row in open_snapshot(folder).pool())
    except UsageError:  # damaged
        return trained_rows(database, release.name)


def choice_settings(
    database: sqlite3.Connection, config: RunConfig, name: str, champion: Release | None
) -> ChoiceSettings:
    """Return the settings for choosing the rows of the next cycle."""
    behind = frozenset() if champion is None else rows_behind(database, champion)
    return ChoiceSettings(
        known=trained_rows(database, name) | behind,
        suspect=suspect_rows(database, name).keys(),
    )


def cycle_id(pool: Snapshot, suspect: Collection[str], config: RunConfig, champion: Release | None) -> str:
    """Return 12 hex digits: the same rows to choose from, settings, base model and champion are the same cycle."""
    model = folder_for(config.model) / MANIFEST
    parts = {
        "rows": pool.hash,
        "suspect": sorted(suspect),
        "settings": settings_of(config),
        # No other run for these, but another cycle: one that failed by them is not begun again with them.
        **{key: getattr(config, key).model_dump(mode="json") for key in ("gate", "eval")},
        "memory": [config.memory_share, sorted(config.allow)],
        "name": config.cycle.name,
        "model": sha256_file(model) if model.exists() else None,
        "champion": champion.adapter_sha256 if champion is not None else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def innocent_rows(database: sqlite3.Connection, cycle: CycleRow) -> frozenset[str]:
    """Return the ids of the rows behind the champion that the cycle was opened with."""
    champion = champion_then(database, cycle)
    return frozenset() if champion is None else rows_behind(database, champion)


def champion_then(database: sqlite3.Connection, cycle: CycleRow) -> Release | None:
    return next((release for release in releases(database, cycle.name) if release.label == cycle.champion), None)


def rows_of(cycle: CycleRow) -> frozenset[str]:
    """Return the ids of the rows that the run trained on or held out, or all rows of its pool where the run is gone."""
    try:
        return frozenset(row.id for row in open_snapshot(Path(read_record(cycle.run)["snapshot"])).pool())
    except (UsageError, KeyError):
        return frozenset(row.id for row in open_snapshot(Path(cycle.pool)).pool())

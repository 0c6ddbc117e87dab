"""All rows of the config as they are now: how many new groups, what training on them would take, and the id of their
cycle. They are read again only when they changed."""

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.config import RunConfig
from hivetune.cycle.ledger import suspect_rows, trained_rows
from hivetune.cycle.rows import ChoiceSettings, new_groups
from hivetune.data.identity import settings_of
from hivetune.data.intake.files import find_sources
from hivetune.data.prepare.prepare import prepare_data
from hivetune.data.snapshot import PoolRow, Snapshot, open_snapshot
from hivetune.errors import DataRefused, UsageError
from hivetune.models.fetch import fetch_model
from hivetune.models.prepared import folder_for
from hivetune.release.registry import Release, snapshot_folder
from hivetune.serve.swap.wanted import Checks
from hivetune.train.plan.run import plan_document, plan_run

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
        hours = config.cycle.budget_hours  # the choice of rows keeps to it
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
    budget, (hours, _, _) = config.cycle.budget_hours, _planned(config, rows)
    lengths = [row.length for row in rows if row.split == "train"]
    if budget is None or hours is None or hours <= budget or not lengths:
        return None
    tokens = int(sum(lengths) * budget / hours)
    return tokens if tokens >= MIN_STEPS * config.batch_size * sum(lengths) / len(lengths) else None


def _inputs(config: RunConfig, database: sqlite3.Connection) -> tuple[Any, ...]:
    """Return what changes whenever the rows may have changed: the store's counts, and size and time of files."""
    paths = pool_config(config).data.path
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
    return prepare_data(pool_config(config), fetch_model(config.model))


def pool_config(config: RunConfig) -> RunConfig:
    """Return the config with the user's general rows among its data."""
    general = config.cycle.general
    if general is None:
        return config
    paths = [config.data.path] if isinstance(config.data.path, str) else config.data.path
    return config.model_copy(update={"data": config.data.model_copy(update={"path": [*paths, general]})})


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
        general=config.cycle.general,
        replay=config.cycle.replay,
    )


def cycle_id(pool: Snapshot, suspect: Collection[str], config: RunConfig, champion: Release | None) -> str:
    """Return 12 hex digits: the same rows to choose from, settings, base model and champion are the same cycle."""
    model = folder_for(config.model) / MANIFEST
    parts = {
        "rows": pool.hash,
        "suspect": sorted(suspect),
        "settings": settings_of(config),
        # No other run for these, but another cycle: one that failed by them is not begun again with them.
        **{key: getattr(config, key).model_dump(mode="json") for key in ("gate", "eval", "supervise")},
        "name": config.cycle.name,
        "model": sha256_file(model) if model.exists() else None,
        "champion": champion.adapter_sha256 if champion is not None else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

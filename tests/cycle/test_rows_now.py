"""All rows as they are now: refused rows are read again only when they changed, and nothing may be left."""

import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cycle.small import append_rows, make_config, make_rows

import hivetune.cycle.rows
from hivetune.base.database import open_database, transaction
from hivetune.config import RunConfig, load_config, parse_config
from hivetune.cycle.record import CycleRow, begin_cycle
from hivetune.cycle.rows import LookCache, budget_tokens, cycle_id, pool_of, read_rows_now
from hivetune.cycle.stations import close_cycle
from hivetune.errors import DataRefused, UsageError
from hivetune.release.registry import champion_of


def config_of(path: Path, **cycle: Any) -> RunConfig:
    return parse_config({"model": "tiny", "data": {"path": str(path)}, "cycle": {"name": "demo", **cycle}}, "a test")


@pytest.mark.parametrize(("error", "reads"), [(DataRefused("too few rows"), 2), (UsageError("no such model"), 4)])
def test_refused_rows_are_read_again_when_they_changed(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reads: int
) -> None:
    """Faults that a person mends elsewhere, such as the model, are retried at each look."""
    asked: list[RunConfig] = []

    def refused(config: RunConfig) -> None:
        asked.append(config)
        raise error

    monkeypatch.setattr(hivetune.cycle.rows, "pool_of", refused)
    rows, known = tmp_path / "rows.jsonl", LookCache()
    with closing(open_database()) as database:
        for content in ("{}\n", "{}\n{}\n"):
            rows.write_text(content)
            for _ in range(2):
                assert read_rows_now(config_of(rows), database, "demo", None, known).problem == str(error)
    assert len(asked) == reads


def test_a_budget_of_no_rows_is_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are held out, but the steps that the config asks for still take hours."""
    monkeypatch.setattr(hivetune.cycle.rows, "_planned", lambda config, rows: (5.0, 0, ""))
    assert budget_tokens(config_of(Path("rows.jsonl"), hours=1.0), []) is None


def make_champion(database: sqlite3.Connection, version: int, snapshot: str) -> None:
    """Register a champion without files."""
    with transaction(database):
        database.execute(
            "INSERT INTO releases"
            " (name, version, run, model, model_sha256, adapter_sha256, snapshot, proof, created)"
            " VALUES ('demo', ?, '', '', '', '', ?, '{}', 0)",
            (version, snapshot),
        )
        database.execute("INSERT INTO moves VALUES (NULL, 'demo', ?, 'promoted', 0, '', '', 0)", (version,))


@pytest.mark.slow
def test_rows_of_a_champion_that_a_person_deployed_are_not_new(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not new either when another champion replaced it whose cycle trained on only some of them."""
    monkeypatch.setattr(hivetune.cycle.rows, "_planned", lambda config, rows: (1.0, 0, ""))
    config = load_config(make_config(tmp_path))
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 30))
    snapshot, known = pool_of(config), LookCache()

    def groups(database: Any) -> int:
        return read_rows_now(config, database, "demo", champion_of(database, "demo"), known).groups

    with closing(open_database()) as database:
        assert groups(database) == 30
        make_champion(database, 1, snapshot.hash)
        assert groups(database) == 0
        append_rows(tmp_path / "rows.jsonl", make_rows(30, 5))
        assert groups(database) == 5
        append_rows(tmp_path / "new.jsonl", make_rows(30, 5))
        trained = pool_of(load_config(tmp_path / "cycle.yaml", [f"data.path={tmp_path / 'new.jsonl'}"]))
        cycle = CycleRow("c1", "demo", 1.0, "rows", {}, str(trained.folder), "demo@1")
        begin_cycle(database, cycle)
        close_cycle(cycle, "refused", "worse", 2.0)
        make_champion(database, 2, trained.hash)
        assert groups(database) == 0


@pytest.mark.parametrize("changed", [{"eval": {"prompts": 3}}, {"gate": {"tolerance": 0.5}}, {"learning_rate": 0.5}])
def test_other_settings_are_another_cycle(own_home: Path, changed: dict[str, Any]) -> None:
    """One that failed by them is not begun again with those that were mended since."""
    config = config_of(Path("rows.jsonl")).model_copy(update={"model": "smollm2-135m"})
    pool: Any = SimpleNamespace(hash="h")
    other = RunConfig.model_validate(config.model_dump() | changed)
    assert cycle_id(pool, config, None) == cycle_id(pool, config, None) != cycle_id(pool, other, None)

"""All rows as they are now: what is refused is read again only when it changed, and what is left may be nothing."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import hivetune.cycle.pool
from hivetune.base.database import open_database
from hivetune.config import RunConfig, parse_config
from hivetune.cycle.pool import Seen, budget_tokens, read_rows_now
from hivetune.errors import DataRefused, UsageError


def config_of(path: Path, **cycle: Any) -> RunConfig:
    return parse_config({"model": "tiny", "data": {"path": str(path)}, "cycle": {"name": "demo", **cycle}}, "a test")


@pytest.mark.parametrize(("error", "reads"), [(DataRefused("too few rows"), 2), (UsageError("no such model"), 4)])
def test_refused_rows_are_read_again_when_they_changed(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reads: int
) -> None:
    """What a person may mend elsewhere, such as the model, is tried at each look."""
    asked: list[RunConfig] = []

    def refused(config: RunConfig) -> None:
        asked.append(config)
        raise error

    monkeypatch.setattr(hivetune.cycle.pool, "pool_of", refused)
    rows, known = tmp_path / "rows.jsonl", Seen()
    with closing(open_database()) as database:
        for content in ("{}\n", "{}\n{}\n"):
            rows.write_text(content)
            for _ in range(2):
                assert read_rows_now(config_of(rows), database, "demo", known).problem == str(error)
    assert len(asked) == reads


def test_a_budget_of_no_rows_is_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are suspect: the steps that the config asks for still take hours."""
    monkeypatch.setattr(hivetune.cycle.pool, "_planned", lambda config, rows: (5.0, 0, ""))
    assert budget_tokens(config_of(Path("rows.jsonl"), budget_hours=1.0), []) is None

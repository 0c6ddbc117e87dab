"""The demo's interactions: the same on every call, of three agents, with a few percent of damage."""

import json
from collections import Counter
from pathlib import Path

import pytest
from once import demo_rows

from hivetune.synth.demo import SYSTEM_PROMPTS, write_demo_data

pytestmark = pytest.mark.slow  # parses the whole standard library


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_rows(tmp_path_factory.mktemp("demo"))


def read(path: Path) -> tuple[list[dict[str, object]], int]:
    rows, broken = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            broken += 1
    return rows, broken


def test_the_demo_data_is_a_teams_log(path: Path, tmp_path: Path) -> None:
    assert path.read_bytes() == write_demo_data(tmp_path / "b.jsonl").read_bytes()
    rows, broken = read(path)
    agents = Counter(row["agent"] for row in rows)
    assert set(agents) == set(SYSTEM_PROMPTS)
    assert min(agents.values()) >= 100
    damaged = broken + sum(row["success"] is False or not row.get("output") for row in rows)
    assert 0.02 < damaged / (len(rows) + broken) < 0.08
    assert broken > 0


def test_facts_are_not_given_away_by_the_question(path: Path) -> None:
    rows, _ = read(path)
    checked = [row for row in rows if "checker" in row and row["success"] and row.get("output") != row["task"]]
    assert len(checked) > 500
    for row in checked:
        for fact in row["checker"]["any"]:  # type: ignore[index]
            assert fact not in str(row["task"]).rstrip("?").split(".")

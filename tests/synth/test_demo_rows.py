"""The demo's interactions: of three agents, with a few percent of damage, and facts that no question gives away."""

import contextlib
import json
from collections import Counter
from pathlib import Path

import pytest
from once import demo_rows

from hivetune.synth.demo import SYSTEM_PROMPTS

pytestmark = pytest.mark.slow  # parses the whole standard library


def test_the_demo_data_is_a_teams_log(tmp_path: Path) -> None:
    lines, rows = demo_rows(tmp_path).read_text(encoding="utf-8").splitlines(), []
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    agents = Counter(row["agent"] for row in rows)
    assert set(agents) == set(SYSTEM_PROMPTS) and min(agents.values()) >= 100
    broken = len(lines) - len(rows)
    damaged = broken + sum(row["success"] is False or not row.get("output") for row in rows)
    assert broken > 0 and 0.02 < damaged / len(lines) < 0.08
    checked = [row for row in rows if "checker" in row and row["success"] and row.get("output") != row["task"]]
    assert len(checked) > 500
    for row in checked:
        assert not set(row["checker"]["any"]) & set(row["task"].rstrip("?").split("."))

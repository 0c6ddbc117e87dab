"""A plan in chunks: each chunk is trained for all its epochs before the next one begins."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from hivetune.train.plan.steps import Plan, PlanRow, make_plan, read_plan, write_plan


def rows(count: int) -> list[PlanRow]:
    return [PlanRow(row, f"id{row}", 10, 4) for row in range(count)]


def make(part: Sequence[PlanRow], chunk_rows: int | None = None, max_steps: int | None = None) -> Plan:
    return make_plan(
        part,
        snapshot_hash="h",
        settings_hash="s",
        seed=1,
        batch_size=4,
        epochs=2,
        max_steps=max_steps,
        chunk_rows=chunk_rows,
    )


def test_one_chunk_after_the_other(tmp_path: Path) -> None:
    plan = make(rows(25), 10)
    assert plan.chunk_ends == (6, 12, 16)
    steps = list(plan.steps)
    for start, end, chunk in ((0, 6, range(10)), (6, 12, range(10, 20)), (12, 16, range(20, 25))):
        trained = sorted(row for step in steps[start:end] for row in step.rows)
        assert trained == sorted([*chunk, *chunk])
    assert plan.rows_reached() == (set(range(25)), set())
    write_plan(tmp_path, plan)
    read = read_plan(tmp_path)
    assert read.chunk_ends == plan.chunk_ends and list(read.steps) == steps


def test_one_chunk_of_everything_is_the_ordinary_plan() -> None:
    assert list(make(rows(25), 100).steps) == list(make(rows(25)).steps)
    assert list(make([], 100).steps) == []


@pytest.mark.parametrize("most", [1, 6, 8, 16, 99])
def test_the_step_limit_counts_over_all_chunks(most: int) -> None:
    whole = make(rows(25), 10)
    plan = make(rows(25), 10, most)
    assert list(plan.steps) == list(whole.steps)[:most]
    assert set(plan.chunk_ends) - {most} == {end for end in (6, 12, 16) if end < most}
    assert plan.rows_reached(most)[0] == {row for step in plan.steps for row in step.rows}

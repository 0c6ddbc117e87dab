"""The plan: every row once an epoch, sums that add up, amendments that touch only their steps, files."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.base.journal import Journal
from hivetune.errors import UsageError
from hivetune.records import Step
from hivetune.train.plan.steps import Amendment, Plan, PlanRow, append_amendment, make_plan, read_plan, write_plan

counts = st.integers(1, 60)
batches = st.integers(1, 20)


def some_rows(count: int) -> list[PlanRow]:
    return [
        PlanRow(row=3 * i, content_id=hashlib.sha256(str(i).encode()).hexdigest(), length=20 + i, trained=1 + i)
        for i in range(count)
    ]


def a_plan(count: int = 10, batch_size: int = 4, epochs: float = 2, max_steps: int | None = None, **more: Any) -> Plan:
    named = {"snapshot_hash": "s", "settings_hash": "t", "seed": 0, "max_steps": max_steps, **more}
    return make_plan(some_rows(count), batch_size=batch_size, epochs=epochs, **named)


@given(counts, batches, st.integers(1, 4), st.integers(0, 9))
def test_every_row_is_trained_once_an_epoch(count: int, batch_size: int, epochs: int, seed: int) -> None:
    rows, plan = some_rows(count), a_plan(count, batch_size, epochs, seed=seed)
    per_epoch = -(-count // batch_size)
    assert len(plan.steps) == per_epoch * epochs
    for epoch in range(epochs):
        steps = plan.steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for step in steps for row in step.rows) == [row.row for row in rows]
        assert sum(step.trained_tokens for step in steps) == sum(row.trained for row in rows)
        assert all(len(step.rows) == batch_size for step in steps[:-1])


@given(counts, batches, st.floats(0.01, 3), st.one_of(st.none(), st.integers(1, 10)))
def test_rows_add_up_under_limits(count: int, batch_size: int, epochs: float, max_steps: int | None) -> None:
    plan = a_plan(count, batch_size, epochs, max_steps)
    assert max_steps is None or len(plan.steps) <= max_steps
    reached = {row for step in plan.steps for row in step.rows}
    assert plan.rows_reached() == (reached, set()) and plan.num_rows == count
    if max_steps is None:
        assert sum(len(step.rows) for step in plan.steps) == pytest.approx(epochs * count, abs=1)


def test_order_depends_on_seed_epoch_and_content_only() -> None:
    per_epoch = 3
    first, again, other = a_plan(seed=1), a_plan(seed=1), a_plan(seed=2)
    assert list(first.steps) == list(again.steps) != list(other.steps)
    assert first.steps[:per_epoch] != first.steps[per_epoch:]
    shuffled = make_plan(
        some_rows(10)[::-1], snapshot_hash="s", settings_hash="t", seed=1, batch_size=4, epochs=2, max_steps=None
    )
    assert list(shuffled.steps) == list(first.steps)


def test_order_is_fixed_for_all_times() -> None:
    """A change of this literal orphans every unfinished run."""
    assert a_plan(6, 4, 1).steps[0] == Step(rows=(15, 12, 9, 6), trained_tokens=6 + 5 + 4 + 3)


@pytest.mark.slow
def test_order_does_not_depend_on_the_hash_seed_of_python() -> None:
    code = "from tests.train.plan.test_steps import a_plan; print(a_plan(30, 7, 2).sha256)"
    root = Path(__file__).parents[3]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {(a_plan(30, 7, 2).sha256 + "\n").encode()}


def test_one_chunk_is_trained_for_all_its_epochs_before_the_next(tmp_path: Path) -> None:
    plan = a_plan(25, chunk_rows=10)
    assert plan.chunk_ends == (6, 12, 16)
    steps, rows = list(plan.steps), [row.row for row in some_rows(25)]
    for start, end, chunk in ((0, 6, rows[:10]), (6, 12, rows[10:20]), (12, 16, rows[20:])):
        assert sorted(row for step in steps[start:end] for row in step.rows) == sorted([*chunk, *chunk])
    assert plan.rows_reached() == (set(rows), set())
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path).chunk_ends == plan.chunk_ends and list(read_plan(tmp_path).steps) == steps
    assert list(a_plan(25, chunk_rows=100).steps) == list(a_plan(25).steps)
    assert list(a_plan(0, chunk_rows=100).steps) == []


@pytest.mark.parametrize("most", [1, 6, 8, 16, 99])
def test_the_step_limit_counts_over_all_chunks(most: int) -> None:
    whole, plan = a_plan(25, chunk_rows=10), a_plan(25, max_steps=most, chunk_rows=10)
    assert list(plan.steps) == list(whole.steps)[:most]
    assert set(plan.chunk_ends) - {most} == {end for end in (6, 12, 16) if end < most}
    assert plan.rows_reached(most)[0] == {row for step in plan.steps for row in step.rows}


@given(counts, batches, st.integers(0, 12), st.sets(st.integers(0, 59), max_size=8), st.integers(0, 5))
def test_an_amendment_changes_only_its_steps(
    count: int, batch_size: int, from_step: int, chosen: set[int], window: int
) -> None:
    plan = a_plan(count, batch_size, epochs=3)
    trained = {row.row: row.trained for row in some_rows(count)}
    rows = tuple(3 * i for i in chosen if i < count)
    amendment = Amendment(from_step, rows, "test", from_step + window if window else None)
    for i, (before, after) in enumerate(zip(plan.steps, plan.amended(amendment).steps, strict=True)):
        is_covered = from_step <= i and (not window or i < from_step + window)
        if is_covered and set(rows) & set(before.rows):
            assert after.rows == tuple(row for row in before.rows if row not in rows)
            assert after.trained_tokens == sum(trained[row] for row in after.rows)
        else:
            assert after == before


def test_quarantined_rows_are_counted_once_and_a_skipped_window_is_not_quarantine() -> None:
    plan = a_plan(10, 4, 2)
    row = plan.steps[0].rows[0]
    assert [*map(len, plan.amended(Amendment(1, (row,), "non-finite")).rows_reached())] == [9, 1]
    window = Amendment(0, plan.steps[0].rows, "spike", until_step=1)
    assert [*map(len, plan.amended(window).rows_reached())] == [10, 0]
    assert [*map(len, plan.amended(window).rows_reached(steps_done=3))] == [6, 0]
    assert plan.amended(window).steps[0] == Step((), 0)


@given(counts, batches, st.floats(0.1, 3))
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, count: int, batch_size: int, epochs: float) -> None:
    run = tmp_path_factory.mktemp("run")
    plan = a_plan(count, batch_size, epochs)
    write_plan(run, plan)
    assert read_plan(run) == plan
    description = json.loads((run / "plan.json").read_text())
    assert description["steps"] == len(plan.steps) and description["trained_tokens"] == plan.trained_tokens
    assert description["sha256"] == hashlib.sha256((run / "plan.bin").read_bytes()).hexdigest() == plan.sha256


def test_amendments_are_applied_on_read_and_keep_the_plans_hash(tmp_path: Path) -> None:
    plan = a_plan()
    write_plan(tmp_path, plan)
    amendments = (Amendment(2, (3,), "non-finite loss"), Amendment(0, (0, 6), "spike", until_step=2))
    for amendment in amendments:
        append_amendment(tmp_path, amendment)
    again = read_plan(tmp_path)
    assert again == plan.amended(*amendments) and again.sha256 == plan.sha256


def amended(run: Path, *rows: int) -> Path:
    """A run (rows 0, 3 to 117) in which these rows were taken out; its amendments.jsonl."""
    write_plan(run, a_plan(40))
    for row in rows:
        append_amendment(run, Amendment(0, (row,), "not finite"))
    return run / "amendments.jsonl"


def test_an_amendment_of_a_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = amended(tmp_path, 3, 100)
    with pytest.raises(UsageError, match=rf"{path}:2: the plan has no row 100"):
        read_plan(tmp_path)


@pytest.mark.parametrize("wrong", [{"rows": [1.5]}, {"rows": ["1"]}, {"until_step": "x"}, {"more": 1}])
def test_a_line_that_is_no_amendment_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = amended(tmp_path)
    with Journal(path) as journal:
        journal.append("amendment", **({"from_step": 0, "until_step": None, "rows": [1], "reason": "r"} | wrong))
    with pytest.raises(UsageError, match=rf"{path}:1: this is not an amendment"):
        read_plan(tmp_path)


def test_resume_is_going_to_step_i(tmp_path: Path) -> None:
    write_plan(tmp_path, a_plan(50, 7, 2))
    undisturbed = list(a_plan(50, 7, 2).steps)
    for i in range(len(undisturbed)):
        assert read_plan(tmp_path).steps[i] == undisturbed[i]


@pytest.mark.parametrize("damage", [b"", b"HTPLAN1\n", None])
def test_damage_is_noticed(tmp_path: Path, damage: bytes | None) -> None:
    write_plan(tmp_path, a_plan())
    content = (tmp_path / "plan.bin").read_bytes()
    (tmp_path / "plan.bin").write_bytes(content[:-1] + b"\x07" if damage is None else damage)
    with pytest.raises(UsageError, match=r"plan\.bin"):
        read_plan(tmp_path)


def test_a_row_without_trained_tokens_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="row 5 has 0 trained tokens"):
        make_plan([PlanRow(5, "x", 9, 0)], snapshot_hash="", settings_hash="", seed=0, batch_size=1, epochs=1)

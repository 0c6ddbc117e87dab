"""Runs that are watched: whatever is appended, torn, taken back or rewritten, the reading equals the file; and what is
drawn are few points with every extreme, in plots that a strict content policy does not refuse."""

import re
from pathlib import Path
from typing import Any

import pytest
from dashboard.shown import add_events, add_step, end_run, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.base.journal import Journal, JournalPlace, Replaced, read_journal
from hivetune.dashboard.plot import Curve, plot, round_ticks
from hivetune.dashboard.watched import MAX_BUCKETS, Series, WatchedRun, smoothed
from hivetune.run.folder import METRICS
from hivetune.run.status import run_status


@settings(max_examples=60)
@given(turns=st.lists(st.one_of(st.integers(1, 30), st.just("torn"), st.just("anew"), st.just("gone")), max_size=12))
def test_following_a_journal_gives_what_reading_it_gives(tmp_path_factory: Any, turns: list[int | str]) -> None:
    path = tmp_path_factory.mktemp("journal") / "a.jsonl"
    read: list[dict[str, Any]] = []
    place, written = JournalPlace(), 0
    for turn in turns:
        if turn == "gone":
            path.unlink(missing_ok=True)
        elif turn == "torn":
            with open(path, "ab") as file:
                file.write(b'{"event": "x", "nu')
        elif turn == "anew":  # as the worker takes back what it makes again: other bytes in a new file
            kept = [entry for entry in read_journal(path) if entry.get("number", 0) % 3]
            with Journal(path) as journal:
                journal.replace(kept)
        elif isinstance(turn, int):
            with Journal(path) as journal:
                for _ in range(turn):
                    written += 1
                    journal.append("x", number=written)
        try:
            read += read_journal(path, place)
        except Replaced:
            place = JournalPlace()
            read = list(read_journal(path, place))
        assert read == list(read_journal(path))


def test_a_run_is_followed_through_faults_and_steps_that_are_made_again(own_home: Path) -> None:
    folder = make_run("one", steps=100, done=20)
    run = WatchedRun(folder)
    run.refresh()
    assert len(run.read.curves["loss"]) == 20 and run.status().state == "new"
    add_events(folder)
    with Journal(folder / METRICS) as journal:
        add_step(journal, 21)
    run.refresh()
    assert (len(run.read.curves["loss"]), run.status().step, run.status().restarts) == (21, 21, 1)
    assert run.status().state == "interrupted"  # a supervisor began and said nothing of its end
    kept = [entry for entry in read_journal(folder / METRICS) if entry["step"] <= 12]
    with Journal(folder / METRICS) as journal:
        journal.replace(kept)
    with Journal(folder / METRICS) as journal:
        for step in range(13, 40):
            add_step(journal, step)
    end_run(folder, "done", 39)
    run.refresh()
    losses = run.read.curves["loss"]
    assert [bucket.step for bucket in losses.buckets()] == list(range(1, 40))
    drawn = {(bucket.step, bucket.mean) for bucket in losses.buckets()}
    steps = [entry for entry in read_journal(folder / METRICS) if entry["event"] == "step"]
    assert drawn == {(entry["step"], entry["loss"]) for entry in steps}
    assert len(run.read.quarantined) == 1  # the events were not read twice
    assert run.status() == run_status(folder)


def test_a_run_that_ends_while_it_is_looked_at_was_not_interrupted(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last event and the end of its lock may come between two reads."""
    folder = make_run("one", steps=100, done=5)
    add_events(folder)
    run = WatchedRun(folder)
    assert run.status().state == "interrupted"
    monkeypatch.setattr("hivetune.run.status.lock_holder", lambda path: end_run(folder, "stopped", 5))
    assert run.status().state == "stopped" == run_status(folder).state


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4 * MAX_BUCKETS))
def test_buckets_hold_every_point_once(values: list[float]) -> None:
    series = Series()
    for step, value in enumerate(values, 1):
        series.add(step, value, float(step))
    buckets = series.buckets()
    assert len(buckets) <= MAX_BUCKETS and len(series) == len(values)
    assert min(bucket.low for bucket in buckets) == min(values) and max(b.high for b in buckets) == max(values)
    steps = [0, *(bucket.step for bucket in buckets)]
    assert steps == sorted(set(steps)) and steps[-1] == len(values)
    # Sums in another order: at most the rounding of as many additions.
    total = sum((last - before) * bucket.mean for before, last, bucket in zip(steps, steps[1:], buckets, strict=False))
    assert total == pytest.approx(sum(values), abs=1e-9 * 1e6 * len(values))
    assert all(min(values) - 1e-6 <= mean <= max(values) + 1e-6 for _, mean in smoothed(buckets))


def test_a_plot_is_within_its_frame_and_escaped() -> None:
    hostile = '<script>"&'
    points = [(float(x), 3.0 / (x + 1)) for x in range(100)]
    drawn = plot(hostile, "falls", [Curve(hostile, "raw", points, [(x, y - 1, y + 1) for x, y in points])])
    places = [
        tuple(map(float, pair.split(","))) for text in re.findall(r' points="([^"]+)"', drawn) for pair in text.split()
    ]
    assert len(places) == 100 + 200
    assert all(58 <= x <= 710 and 10 <= y <= 196 for x, y in places)
    assert "<script" not in drawn and "&lt;script&gt;" in drawn
    assert "style=" not in drawn and "onclick" not in drawn


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (1.9, 3.4, [2, 2.5, 3]), (0, 1e9, [0, 2e8, 4e8, 6e8, 8e8, 1e9]), (3, 3, [3])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)

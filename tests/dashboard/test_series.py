"""The points that are drawn: bounded, with every extreme, and the same in whatever pieces they came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.dashboard.watched import MAX_BUCKETS, Series


def filled(values: list[float]) -> Series:
    series = Series()
    for step, value in enumerate(values, 1):
        series.add(step, value, float(step))
    return series


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4 * MAX_BUCKETS))
def test_buckets_hold_every_point_once(values: list[float]) -> None:
    series = filled(values)
    assert series.count == len(values) == sum(bucket.count for bucket in series.buckets)
    assert len(series.buckets) <= MAX_BUCKETS
    assert min(b.low for b in series.buckets) == min(values) and max(b.high for b in series.buckets) == max(values)
    assert [b.step for b in series.buckets] == sorted({b.step for b in series.buckets})
    assert series.buckets[-1].step == len(values) and series.last == values[-1]
    # Sums in another order: at most the rounding of as many additions.
    assert sum(b.total for b in series.buckets) == pytest.approx(sum(values), abs=1e-9 * 1e6 * len(values))


def test_one_spike_in_many_points_is_still_there() -> None:
    values = [2.0] * 50_000
    values[31_234] = 90.0
    series = filled(values)
    spiked = [bucket for bucket in series.buckets if bucket.high == 90.0]
    assert len(spiked) == 1 and spiked[0].step >= 31_235 > spiked[0].step - spiked[0].count


def test_the_smoothed_line_is_a_mean_at_first_and_follows_later() -> None:
    assert filled([1.0, 3.0]).buckets[-1].smoothed == 2.0
    assert filled([0.0] * 500 + [1.0] * 500).buckets[-1].smoothed > 0.99
    assert filled([5.0] * 700).buckets[-1].smoothed == pytest.approx(5.0)


def test_a_step_is_found_by_its_time() -> None:
    series = filled([1.0] * 10)
    assert [series.step_at(time) for time in (0.5, 1.0, 4.5, 99.0)] == [0, 1, 4, 10]

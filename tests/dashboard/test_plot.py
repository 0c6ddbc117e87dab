"""Plots of pages: bounded numbers, round ticks, escaped texts, and nothing that a strict content policy refuses."""

import re

import pytest

from hivetune.dashboard.plot import Curve, plot, round_ticks

HOSTILE = '<script>"&'


def test_a_plot_is_within_its_frame_and_escaped() -> None:
    points = [(float(x), 3.0 / (x + 1)) for x in range(100)]
    drawn = plot(HOSTILE, "falls", [Curve(HOSTILE, "raw", points, [(x, y - 1, y + 1) for x, y in points])])
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

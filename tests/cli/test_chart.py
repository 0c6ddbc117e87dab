"""The loss curve as lines that a terminal holds."""

import pytest

from hivetune.cli.runs import TEXT_HEIGHT, TEXT_WIDTH, text_chart

FALLING = [(step, 4.0 - step / 100, "step") for step in range(1, 201)] + [
    (100, 3.5, "validation"),
    (200, 2.5, "validation"),
]


def test_a_falling_curve_falls_from_its_highest_to_its_lowest_line() -> None:
    lines = text_chart(FALLING)
    rows = [line.partition("│")[2] for line in lines[:TEXT_HEIGHT]]
    assert rows[0].index("·") == 0
    assert rows[-1].rindex("·") == TEXT_WIDTH - 1
    assert sum(row.count("●") for row in rows) == 2
    assert lines[TEXT_HEIGHT].endswith("step 200")
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    "points", [[], [(1, 2.0, "step")], [(1, 2.0, "step"), (2, 2.0, "step")], [(3, 1.0, "validation")]]
)
def test_few_or_equal_points_are_no_trouble(points: list[tuple[int, float, str]]) -> None:
    assert bool(text_chart(points)) == bool(points)

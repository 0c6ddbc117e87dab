"""Numbers as people say them."""

import pytest

from hivetune.base.units import size, step_time


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0523, "0.052 s"), (4.84, "4.8 s"), (99.4, "99 s"), (99.6, "100 s"), (263.4, "263 s")],
)
def test_the_time_of_a_step(seconds: float, said: str) -> None:
    assert step_time(seconds) == said


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [(0, "0 B"), (999.4, "999 B"), (999.6, "1 kB"), (999_600, "1 MB"), (999_960_000, "1.0 GB"), (999.96e9, "1.0 TB")],
)
def test_sizes_go_on_to_the_next_unit(size_bytes: float, said: str) -> None:
    assert size(size_bytes) == said

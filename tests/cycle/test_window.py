"""When a cycle may work: hours across midnight and the change of the clocks."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.base.journal import Journal
from hivetune.config import RunConfig, parse_config
from hivetune.cycle.loop import Loop, open_until, parse_window
from hivetune.cycle.record import CycleRow
from hivetune.errors import UsageError


def config(window: str | None) -> RunConfig:
    return parse_config({"model": "tiny", "data": {"path": "rows"}, "cycle": {"name": "desk", "window": window}})


@contextmanager
def clock_of(zone: str) -> Iterator[None]:
    """Set this process's time zone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("window", "now", "until"),
    [
        ("22:00-06:00", "2026-06-10 21:59", None),
        ("22:00-06:00", "2026-06-10 22:00", "2026-06-11 06:00"),
        ("22:00-06:00", "2026-06-11 05:59", "2026-06-11 06:00"),
        ("22:00-06:00", "2026-06-11 06:00", None),
        ("02:00-03:00", "2026-06-11 12:00", None),
        ("22:00-06:00", "2026-03-28 22:00", "2026-03-29 06:00"),  # seven hours
        ("00:00-24:00", "2026-10-24 22:00", "2026-10-25 00:00"),
    ],
)
def test_hours_across_midnight(window: str, now: str, until: str | None) -> None:
    with clock_of("Europe/Berlin"):
        ends = 0.0 if until is None else datetime.fromisoformat(until).timestamp()
        assert open_until(config(window), datetime.fromisoformat(now).timestamp()) == ends


@pytest.mark.parametrize(
    ("now", "within_s", "asked", "why"),
    [
        ("2026-06-10 22:00:00", 30, False, ""),
        ("2026-06-11 05:59:40", 5, False, ""),
        ("2026-06-11 05:59:40", 30, False, "the window ends"),
        ("2026-06-11 06:00:00", 5, False, "the window ends"),
        ("2026-06-11 06:00:00", 5, True, ""),
    ],
)
def test_work_ends_before_its_window_does(tmp_path: Path, now: str, within_s: float, asked: bool, why: str) -> None:
    cycle = CycleRow("a1", "desk", 1.0, "request" if asked else "rows", {}, None)
    with Journal(tmp_path / "cycle.jsonl") as journal:
        loop = Loop(config("22:00-06:00"), "desk", journal)
        loop.clock = lambda: datetime.fromisoformat(now).timestamp()
        assert loop.must_end(cycle, within_s) == why


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["22:00-06:00", "02:30-05:00", "23:00-02:30", "00:00-24:00", "9:00-17:00"]),
    st.datetimes(datetime(2026, 1, 1), datetime(2028, 12, 31)),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]),
)
def test_whatever_the_moment_work_ends_or_begins_after_it(window: str, day: datetime, zone: str) -> None:
    now = day.replace(tzinfo=UTC).timestamp()
    with clock_of(zone):
        until = open_until(config(window), now)
        assert until == 0 or until == open_until(config(window), until - 1) > now


@pytest.mark.parametrize("text", ["22:00", "25:00-06:00", "22:00-22:00", "6:00-24:30", "nightly", "0 22 * * *"])
def test_what_is_not_a_window(text: str) -> None:
    with pytest.raises(UsageError, match=r"cycle\.window"):
        parse_window(text)


def test_without_a_window_or_for_a_person_there_is_no_end() -> None:
    assert open_until(config(None), 1e9) == open_until(config("22:00-06:00"), 1e9, asked=True) == math.inf

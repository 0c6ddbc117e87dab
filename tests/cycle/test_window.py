"""When a cycle may work: hours across midnight and the change of the clocks."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.cycle.window import Permission, Window, allowed_now, local_zone, parse_window
from hivetune.errors import UsageError

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = parse_window("22:00-06:00")


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("now", "end"),
    [
        ("2026-06-10 21:59", None),
        ("2026-06-10 22:00", "2026-06-11 06:00"),
        ("2026-06-11 05:59", "2026-06-11 06:00"),
        ("2026-06-11 06:00", None),
    ],
)
def test_hours_across_midnight(now: str, end: str | None) -> None:
    found = allowed_now(NIGHT, at(now), BERLIN)
    assert (found.now, found.until) == (end is not None, None if end is None else at(end))


def test_a_night_with_a_changing_clock_is_an_hour_shorter_or_longer() -> None:
    for day, hours in (("2026-03-28", 7), ("2026-10-24", 9)):
        start = at(f"{day} 22:00")
        assert allowed_now(NIGHT, start, BERLIN).until == start + hours * 3600


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["22:00-06:00", "02:30-05:00", "23:00-02:30", "00:00-24:00", "9:00-17:00"]).map(parse_window),
    st.datetimes(datetime(2026, 1, 1), datetime(2028, 12, 31)),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]).map(ZoneInfo),
)
def test_whatever_the_moment_work_ends_or_begins_after_it(window: Window, day: datetime, zone: ZoneInfo) -> None:
    now = day.replace(tzinfo=UTC).timestamp()
    found = allowed_now(window, now, zone)
    if found.now:
        assert found.until is not None and found.until > now
        assert allowed_now(window, found.until - 1, zone).now
    else:
        assert found.again is not None and now < found.again <= now + 2 * 86400
        assert allowed_now(window, found.again, zone).now


@pytest.mark.parametrize("text", ["22:00", "25:00-06:00", "22:00-22:00", "6:00-24:30", "nightly", "0 22 * * *"])
def test_what_is_not_a_window(text: str) -> None:
    with pytest.raises(UsageError, match=r"cycle\.window"):
        parse_window(text)


def test_outside_the_window_it_says_when() -> None:
    found = allowed_now(NIGHT, at("2026-06-10 12:00"), BERLIN)
    assert found == Permission(False, None, at("2026-06-10 22:00"), "the window opens at 22:00")


def test_another_day_is_told_with_its_date() -> None:
    found = allowed_now(parse_window("02:00-03:00"), at("2026-06-11 12:00"), BERLIN)
    assert found.reason == "the window opens at 2026-06-12 02:00"


def test_without_a_window_there_is_no_end() -> None:
    assert allowed_now(None, at("2026-06-11 05:00"), BERLIN) == Permission()


def test_who_asks_needs_no_window() -> None:
    found = allowed_now(NIGHT, at("2026-06-10 12:00"), BERLIN, asked=True)
    assert (found.now, found.until) == (True, None)


@pytest.mark.parametrize("name", ["Europe/Berlin", ":Europe/Berlin"])
def test_the_zone_is_the_variable_s(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TZ", name)
    assert local_zone() == BERLIN

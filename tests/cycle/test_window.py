"""When a cycle may train: hours across midnight and the change of the clocks, cron slots that coalesce."""

from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.cycle.decide import Permission
from hivetune.cycle.window import (
    Clocks,
    Cron,
    Daily,
    InUse,
    Slot,
    allowed_now,
    clock_changes,
    is_served,
    parse_window,
    slots_around,
)
from hivetune.errors import UsageError

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = parse_window("22:00-06:00")


def at(text: str, zone: ZoneInfo = BERLIN, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def told(slot: Slot | None, zone: ZoneInfo = BERLIN) -> list[str] | None:
    if slot is None:
        return None
    return [datetime.fromtimestamp(moment, zone).strftime("%m-%d %H:%M") for moment in (slot.start_s, slot.end_s)]


@pytest.mark.parametrize(
    ("now", "slot"),
    [
        ("2026-06-10 21:59", None),
        ("2026-06-10 22:00", ["06-10 22:00", "06-11 06:00"]),
        ("2026-06-11 05:59", ["06-10 22:00", "06-11 06:00"]),
        ("2026-06-11 06:00", None),
    ],
)
def test_hours_across_midnight(now: str, slot: list[str] | None) -> None:
    assert told(slots_around(NIGHT, at(now), BERLIN)[0]) == slot


def test_a_night_with_a_changing_clock_is_an_hour_shorter_or_longer() -> None:
    spring = slots_around(NIGHT, at("2026-03-29 01:00"), BERLIN)[0]
    autumn = slots_around(NIGHT, at("2026-10-25 01:00"), BERLIN)[0]
    assert spring is not None and spring.end_s - spring.start_s == 7 * 3600
    assert autumn is not None and autumn.end_s - autumn.start_s == 9 * 3600


def test_cron_in_spring_and_autumn_fires_once() -> None:
    """02:30 does not exist on 29 March and comes twice on 25 October."""
    window = parse_window("30 2 * * *")
    for day, starts in (("2026-03-29", ["03-29 03:00"]), ("2026-10-25", ["10-25 02:30"])):
        noon = at(f"{day} 12:00")
        assert told(slots_around(window, noon, BERLIN)[0]) is not None
        seen = {told(slots_around(window, noon - 60 * minutes, BERLIN)[0])[0] for minutes in range(0, 720, 5)}  # type: ignore[index]
        assert sorted(start for start in seen if start.startswith(day[5:])) == starts


def test_slots_that_were_missed_coalesce() -> None:
    """The machine was off for three nights: the newest slot is due, and once it is served, none."""
    window = parse_window("0 22 * * *")
    now = at("2026-06-14 09:00")
    slot = slots_around(window, now, BERLIN)[0]
    assert told(slot) == ["06-13 22:00", "06-14 22:00"]
    assert slot is not None
    assert not is_served(slot, at("2026-06-10 22:00"), now)
    assert is_served(slot, slot.start_s, now)


def test_a_clock_that_was_set_back_serves_nothing_twice_and_blocks_nothing() -> None:
    """A cycle was opened while the clock said 2030."""
    window = parse_window("0 22 * * *")
    served, now = at("2030-01-01 22:00"), at("2026-06-14 09:00")
    slot = slots_around(window, now, BERLIN)[0]
    assert slot is not None and is_served(slot, served, now)
    following = slots_around(window, now, BERLIN)[1]
    assert not is_served(following, min(served, now), following.start_s)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["22:00-06:00", "02:30-05:00", "23:00-02:30", "00:00-24:00", "9:00-17:00", None]).map(parse_window)
    | st.sampled_from(["0 22 * * *", "30 2 * * *", "*/15 * * * *", "0 */6 * * 1-5", "15 2 1 * *"]).map(Cron),
    st.datetimes(datetime(2026, 1, 1), datetime(2028, 12, 31)),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]).map(ZoneInfo),
)
def test_slots_hold_their_moment_and_follow_each_other(
    window: Daily | Cron | None, day: datetime, zone: ZoneInfo
) -> None:
    now = day.replace(tzinfo=UTC).timestamp()
    slot, following = slots_around(window, now, zone)
    assert now < following.start_s < following.end_s
    if slot is not None:
        assert slot.start_s <= now < slot.end_s <= following.start_s
        assert slots_around(window, slot.start_s, zone)[0] == slot
        assert slots_around(window, slot.end_s - 1, zone)[0] == slot
    assert slots_around(window, following.start_s, zone)[0] == following


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["2026-03-28", "2026-10-24"]), st.sampled_from(["22:00-06:00", "02:30-05:00", "30 2 * * *"]))
def test_a_clock_that_only_goes_on_meets_each_slot_once(day: str, text: str) -> None:
    window, start = parse_window(text), at(f"{day} 00:00")
    slots = [slots_around(window, start + 600 * step, BERLIN)[0] for step in range(3 * 24 * 6)]
    changes = [after for before, after in pairwise(slots) if after is not None and after != before]
    assert len(changes) == len(set(changes))


@pytest.mark.parametrize(
    "text", ["22:00", "25:00-06:00", "22:00-22:00", "6:00-24:30", "nightly", "0 22 * *", "61 * * * *", "0 0 30 2 *"]
)
def test_what_is_not_a_window(text: str) -> None:
    with pytest.raises(UsageError, match=r"cycle\.window"):
        parse_window(text)


def test_outside_the_window_it_says_when() -> None:
    found = allowed_now(NIGHT, at("2026-06-10 12:00"), BERLIN)
    assert found == Permission(False, None, at("2026-06-10 22:00"), "the window opens at 22:00")


def test_another_day_is_told_with_its_date() -> None:
    found = allowed_now(parse_window("0 22 * * 1"), at("2026-06-11 12:00"), BERLIN, opened_s=at("2026-06-10 12:00"))
    assert found.reason == "the window opens at 2026-06-15 22:00"


def test_a_cron_slot_opens_one_cycle() -> None:
    """It opens late, since the machine was off at 22:00. The open cycle goes on; a second one waits for the next
    slot."""
    window, now = parse_window("0 22 * * *"), at("2026-06-14 09:00")
    assert allowed_now(window, now, BERLIN, opened_s=at("2026-06-12 23:00")).now
    assert not allowed_now(window, now, BERLIN, opened_s=at("2026-06-14 08:59")).now
    assert allowed_now(window, now, BERLIN).until == at("2026-06-14 22:00")


def test_hours_open_as_many_cycles_as_there_are_rows_for() -> None:
    assert allowed_now(NIGHT, at("2026-06-10 23:00"), BERLIN, opened_s=at("2026-06-10 22:01")).now


@pytest.mark.parametrize(
    ("left_hours", "until"), [(None, "2026-06-11 06:00"), (8.0, "2026-06-11 06:00"), (0.5, "2026-06-11 05:30")]
)
def test_the_end_is_that_of_the_window_or_of_the_budget(left_hours: float | None, until: str) -> None:
    found = allowed_now(NIGHT, at("2026-06-11 05:00"), BERLIN, left_hours=left_hours)
    assert found.now and found.until == at(until)


def test_without_a_window_there_is_no_end() -> None:
    assert allowed_now(None, at("2026-06-11 05:00"), BERLIN) == Permission()


@pytest.mark.parametrize(
    ("in_use", "allowed"),
    [
        (InUse(idle_s=10.0), False),
        (InUse(idle_s=float("inf")), True),
        (InUse(idle_s=None), True),
        (InUse(idle_s=1800.0, cores=5.0, all_cores=8), False),
        (InUse(idle_s=1800.0, cores=3.0, all_cores=8), True),
        (InUse(idle_s=None, cores=8.0, all_cores=8), True),  # a server may be busy day and night
        (InUse(idle_s=float("inf"), cores=8.0, all_cores=8), True),
    ],
)
def test_out_of_the_way_of_people_and_programs(in_use: InUse, allowed: bool) -> None:
    now = at("2026-06-10 23:00")
    found = allowed_now(NIGHT, now, BERLIN, in_use=in_use)
    assert found.now is allowed
    assert (found.until if allowed else found.again) == (at("2026-06-11 06:00") if allowed else now + 60)


def test_who_asks_needs_no_window_and_is_not_in_the_way() -> None:
    noon = at("2026-06-10 12:00")
    assert allowed_now(NIGHT, noon, BERLIN, asked=True, in_use=InUse(idle_s=0.0)).now
    assert allowed_now(NIGHT, noon, BERLIN, asked=True, left_hours=1).until == noon + 3600


def test_sleep_and_a_set_clock_are_told_apart() -> None:
    start = Clocks(1000.0, 50.0, 60.0)
    assert clock_changes(start, Clocks(1010.0, 60.0, 70.0)) == []
    assert clock_changes(start, Clocks(8210.0, 60.0, 7270.0)) == ["the machine slept for 7200 s"]
    assert clock_changes(start, Clocks(4610.0, 60.0, 70.0)) == ["the clock was set forward by 3600 s"]
    assert clock_changes(start, Clocks(-2590.0, 60.0, 70.0)) == ["the clock was set back by 3600 s"]

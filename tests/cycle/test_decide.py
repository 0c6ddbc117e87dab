"""The pure decision: the order of the issue, each rule alone, and totality on every abstract state."""

from dataclasses import replace

import pytest

from hivetune.config import CycleConfig
from hivetune.cycle.decide import HEAVY, STATIONS, Action, Allowed, Observed, Opened, decide

NOW = 1_800_000_000.0
SETTINGS = CycleConfig(name="demo", after_rows=10, budget_hours=8.0)
ALL = frozenset(STATIONS)
READY = Observed(desired="demo@1", served="demo@1", new_groups=10, disk_free_bytes=2, disk_needed_bytes=1)
CLOSED_WINDOW = Allowed(now=False, again=NOW + 3600, reason="the window opens at 22:00")


def before(station: str) -> frozenset[str]:
    return frozenset(STATIONS[: STATIONS.index(station)])


@pytest.mark.parametrize(
    ("observed", "kind"),
    [
        (replace(READY, paused=True, served=None), "wait"),
        (replace(READY, served=None, watch_failed="slow"), "restore"),
        (replace(READY, watch_failed="slow", open=Opened("a")), "roll_back"),
        (replace(READY, open=Opened("a"), forgotten_rows=1), "snapshot"),
        (replace(READY, forgotten_rows=1, failed_cycles=3, failed_at=NOW), "rebuild"),
        (replace(READY, failed_cycles=1, failed_at=NOW), "wait"),
        (READY, "open"),
        (replace(READY, new_groups=9), "wait"),
    ],
    ids=["paused", "restore", "roll back", "open cycle", "rebuild", "cooling down", "enough", "else"],
)
def test_the_first_match_wins(observed: Observed, kind: str) -> None:
    assert decide(observed, SETTINGS, NOW).kind == kind


@pytest.mark.parametrize("station", STATIONS)
def test_an_open_cycle_makes_its_next_missing_artefact(station: str) -> None:
    cycle = Opened("a", done=before(station), passed=True)
    assert decide(replace(READY, open=cycle), SETTINGS, NOW).kind == station
    shut = decide(replace(READY, open=cycle, allowed=CLOSED_WINDOW), SETTINGS, NOW)
    assert shut == (Action("wait", f"{station}: {CLOSED_WINDOW.reason}", NOW + 3600) if station in HEAVY else shut)
    assert (shut.kind == "wait") == (station in HEAVY)


@pytest.mark.parametrize(
    ("cycle", "word"),
    [
        (Opened("a", done=ALL, passed=True), "promoted and watched"),
        (Opened("a", done=before("export"), passed=False), "refused"),
        (Opened("a", done=before("promote"), passed=True, asked=True), "person"),
        (Opened("a", void="its rows were forgotten"), "its rows were forgotten"),
        (Opened("a", failures=1, fatal=True, failure="no rows"), "no rows"),
        (Opened("a", failures=3, failed_at=NOW, failure="killed"), "3 times"),
        (Opened("a", done=ALL - {"watch"}, passed=True, withdrawn="slow"), "rolled back: slow"),
        (Opened("a", done=before("train"), spent_hours=9.0), "budget of 8"),
    ],
)
def test_when_an_open_cycle_is_closed(cycle: Opened, word: str) -> None:
    action = decide(replace(READY, open=cycle), SETTINGS, NOW)
    assert action.kind == "close" and word in action.reason


def test_what_was_promoted_is_watched_whatever_else_is_said_of_its_rows() -> None:
    cycle = Opened("a", done=ALL - {"watch"}, passed=True, void="forgotten", promoted_at=NOW - 3600)
    action = decide(replace(READY, open=cycle), SETTINGS, NOW)
    assert (action.kind, action.not_before) == ("wait", NOW + 23 * 3600)
    assert decide(replace(READY, open=cycle), SETTINGS, NOW + 23 * 3600).kind == "watch"


def test_pauses_double_and_a_patient_one_is_never_given_up() -> None:
    pauses = []
    for failures in (1, 2, 9):
        cycle = Opened("a", failures=failures, failed_at=NOW, patient=True, failure="the disk is full")
        pauses.append(decide(replace(READY, open=cycle), SETTINGS, NOW).not_before - NOW)
    assert pauses == [60, 120, 3600]
    cooling = [
        decide(replace(READY, failed_cycles=n, failed_at=NOW), SETTINGS, NOW).not_before - NOW for n in (1, 2, 20)
    ]
    assert cooling == [3600, 7200, 7 * 86400]


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    later = NOW + 365 * 86400
    assert decide(replace(READY, failed_cycles=5, failed_at=later), SETTINGS, NOW).kind == "open"
    assert decide(replace(READY, open=Opened("a", failures=2, failed_at=later)), SETTINGS, NOW).kind == "snapshot"
    watched = Opened("a", done=ALL - {"watch"}, passed=True, promoted_at=later)
    assert decide(replace(READY, open=watched), SETTINGS, NOW).kind == "watch"
    past = replace(CLOSED_WINDOW, again=NOW - 5)
    assert decide(replace(READY, allowed=past), SETTINGS, NOW).not_before > NOW


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"known": True}, "closed already"),
        ({"allowed": CLOSED_WINDOW}, "22:00"),
        ({"predicted_hours": 8.1}, "budget"),
        ({"disk_free_bytes": 0}, "disk"),
    ],
)
def test_what_keeps_a_cycle_from_opening(change: dict[str, object], word: str) -> None:
    action = decide(replace(READY, **change), SETTINGS, NOW)
    assert action.kind == "wait" and word in action.reason


def test_a_request_overrides_threshold_window_and_pause_but_not_budget_or_disk() -> None:
    asked = replace(READY, asked=True, new_groups=1, allowed=CLOSED_WINDOW, failed_cycles=4, failed_at=NOW)
    assert decide(asked, SETTINGS, NOW).kind == "open"
    assert decide(replace(asked, disk_free_bytes=0), SETTINGS, NOW).kind == "wait"
    assert decide(replace(asked, predicted_hours=9.0), SETTINGS, NOW).kind == "wait"
    assert decide(replace(asked, new_groups=0), SETTINGS, NOW).kind == "wait"

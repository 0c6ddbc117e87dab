"""The pure decision: the order of its rules, each rule alone, and totality on every abstract state."""

from dataclasses import replace

import pytest

from hivetune.config import CycleConfig
from hivetune.cycle.decide import HEAVY, STATIONS, Action, FailedAct, Observation, OpenCycle, Permission, decide

NOW = 1_800_000_000.0
SETTINGS = CycleConfig(name="demo", after_rows=10, hours=8.0)
ASK = SETTINGS.model_copy(update={"promote": "ask"})
ALL = frozenset(STATIONS)
READY = Observation(desired="demo@1", served="demo@1", new_groups=10, disk_free_bytes=2, disk_needed_bytes=1)
SHUT = Permission(False, None, NOW + 3600, "the window opens at 22:00")


def before(station: str) -> frozenset[str]:
    return frozenset(STATIONS[: STATIONS.index(station)])


@pytest.mark.parametrize(
    ("observed", "kind"),
    [
        (replace(READY, paused=True, served=None), "wait"),
        (replace(READY, served=None, watch_failed="slow"), "restore"),
        (replace(READY, watch_failed="slow", open=OpenCycle("a")), "roll_back"),
        (replace(READY, open=OpenCycle("a"), forgotten_rows=1), "snapshot"),
        (replace(READY, forgotten_rows=1, failed_cycles=3, failed_at=NOW), "rebuild"),
        (replace(READY, failed_cycles=1, failed_at=NOW), "wait"),
        (READY, "open"),
        (replace(READY, new_groups=9), "wait"),
    ],
    ids=[
        *("paused", "restore", "roll back", "open cycle", "rebuild", "cooling down", "enough", "else"),
    ],
)
def test_the_first_match_wins(observed: Observation, kind: str) -> None:
    assert decide(observed, SETTINGS, NOW).kind == kind


@pytest.mark.parametrize("station", STATIONS)
def test_an_open_cycle_makes_its_next_missing_artefact(station: str) -> None:
    cycle = OpenCycle("a", done=before(station), passed=True)
    assert decide(replace(READY, open=cycle), SETTINGS, NOW).kind == station
    shut = decide(replace(READY, open=cycle, allowed=SHUT), SETTINGS, NOW)
    assert shut == (Action("wait", f"{station}: {SHUT.reason}", NOW + 3600) if station in HEAVY else shut)
    assert (shut.kind == "wait") == (station in HEAVY)


def test_what_is_left_of_a_window_may_be_too_short_to_begin() -> None:
    cycle = OpenCycle("a", done=before("train"))
    short, long = (Permission(True, NOW + left, None, "open") for left in (59, 61))
    assert decide(replace(READY, open=cycle, allowed=short), SETTINGS, NOW).not_before == NOW + 59
    assert decide(replace(READY, open=cycle, allowed=long), SETTINGS, NOW).kind == "train"
    brief = SETTINGS.model_copy(update={"hours": 0.01})  # 36 s in all: begun, and ended when they are used up
    assert decide(replace(READY, open=cycle, allowed=Permission(True, NOW + 36)), brief, NOW).kind == "train"
    used = replace(cycle, spent_hours=0.0095)
    assert decide(replace(READY, open=used, allowed=Permission(True, NOW + 2)), brief, NOW).kind == "close"


def test_an_artefact_that_was_lost_is_made_again_before_what_rests_on_it() -> None:
    cycle = OpenCycle("a", done=ALL - {"train", "watch", "promote"}, passed=True)
    assert decide(replace(READY, open=cycle), SETTINGS, NOW).kind == "train"


@pytest.mark.parametrize(
    ("cycle", "failed", "words"),
    [
        (OpenCycle("a", done=ALL, passed=True), None, "promoted"),
        (OpenCycle("a", done=before("export"), passed=False), None, "refused"),
        (OpenCycle("a", void="its rows were forgotten"), None, "given_up: its rows were forgotten"),
        (OpenCycle("a"), FailedAct("snapshot", 1, NOW, "no rows", final=True), "failed: snapshot failed: no rows"),
        (OpenCycle("a"), FailedAct("snapshot", 3, NOW, "killed"), "failed: snapshot failed: killed"),
        (OpenCycle("a", done=ALL - {"watch"}, passed=True, withdrawn="slow"), None, "rolled_back: slow"),
        (OpenCycle("a", done=before("train"), spent_hours=8.5), None, "failed: 8.52 hours of training are above"),
    ],
)
def test_when_an_open_cycle_is_closed(cycle: OpenCycle, failed: FailedAct | None, words: str) -> None:
    action = decide(replace(READY, open=cycle, failed=failed), SETTINGS, NOW)
    assert action.kind == "close" and action.reason.startswith(words)


@pytest.mark.parametrize(
    "cycle",
    [
        OpenCycle("a", done=before("export"), passed=False, replay_due=True),
        OpenCycle("a", done=ALL - {"watch"}, passed=True, withdrawn="slow", replay_due=True),
    ],
)
def test_a_worse_model_is_closed_when_its_training_was_replayed_without_the_new_rows(cycle: OpenCycle) -> None:
    assert decide(replace(READY, open=cycle), SETTINGS, NOW).kind == "replay"
    assert decide(replace(READY, open=cycle, allowed=SHUT), SETTINGS, NOW).reason == f"replay: {SHUT.reason}"
    failed = FailedAct("replay", 3, NOW, "killed")
    end = "rolled_back: slow" if cycle.withdrawn else "refused: "
    for closed in (replace(cycle, replay_due=False), replace(cycle, void="its rows were forgotten"), cycle):
        action = decide(replace(READY, open=closed, failed=failed), SETTINGS, NOW)
        expected = "given_up: " if closed.void and not cycle.withdrawn else end
        assert action.kind == "close" and action.reason.startswith(expected)


def test_a_name_that_a_person_retired_waits_for_a_person() -> None:
    """Its candidate was compared with the base alone."""
    retired = OpenCycle("a", done=before("promote"), passed=True, retired=True)
    assert decide(replace(READY, open=retired), SETTINGS, NOW).reason.startswith("ready: ")


def test_a_person_promotes_where_the_settings_say_so() -> None:
    ready = replace(READY, open=OpenCycle("a", done=before("promote"), passed=True))
    assert decide(ready, SETTINGS, NOW).kind == "promote"
    assert decide(ready, ASK, NOW).reason.startswith("ready: ")


def test_a_failure_of_another_station_closes_nothing() -> None:
    cycle = OpenCycle("a", done=before("train"))
    failed = FailedAct("snapshot", 9, NOW, "killed", final=True)
    assert decide(replace(READY, open=cycle, failed=failed), SETTINGS, NOW).kind == "train"


def test_what_was_promoted_is_watched_whatever_else_is_said_of_its_rows() -> None:
    cycle = OpenCycle("a", done=ALL - {"watch"}, passed=True, void="forgotten", promoted_at=NOW - 3600)
    action = decide(replace(READY, open=cycle), SETTINGS, NOW)
    assert (action.kind, action.not_before) == ("wait", NOW + 23 * 3600)
    assert decide(replace(READY, open=cycle), SETTINGS, NOW + 23 * 3600).kind == "watch"


def test_pauses_double_and_a_patient_one_is_never_given_up() -> None:
    pauses = []
    for times in (1, 2, 9):
        failed = FailedAct("snapshot", times, NOW, "the disk is full", patient=True)
        pauses.append(decide(replace(READY, open=OpenCycle("a"), failed=failed), SETTINGS, NOW).not_before - NOW)
    assert pauses == [60, 120, 3600]
    cooling = [
        decide(replace(READY, failed_cycles=n, failed_at=NOW), SETTINGS, NOW).not_before - NOW for n in (1, 2, 20)
    ]
    assert cooling == [3600, 7200, 7 * 86400]


@pytest.mark.parametrize("kind", ["restore", "roll_back", "rebuild", "open"])
def test_every_act_that_failed_waits_before_it_is_tried_again(kind: str) -> None:
    states = {
        "restore": replace(READY, served=None),
        "roll_back": replace(READY, watch_failed="slow"),
        "rebuild": replace(READY, forgotten_rows=1),
        "open": READY,
    }
    observed = replace(states[kind], failed=FailedAct(kind, 2, NOW, "the disk is full"))
    action = decide(observed, SETTINGS, NOW)
    assert (action.kind, action.not_before) == ("wait", NOW + 120) and "the disk is full" in action.reason
    assert decide(observed, SETTINGS, NOW + 120).kind == kind


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    later = NOW + 365 * 86400
    assert decide(replace(READY, failed_cycles=5, failed_at=later), SETTINGS, NOW).kind == "open"
    failed = FailedAct("snapshot", 2, later, "killed")
    assert decide(replace(READY, open=OpenCycle("a"), failed=failed), SETTINGS, NOW).kind == "snapshot"
    watched = OpenCycle("a", done=ALL - {"watch"}, passed=True, promoted_at=later)
    assert decide(replace(READY, open=watched), SETTINGS, NOW).kind == "watch"
    past = replace(SHUT, again=NOW - 5)
    assert decide(replace(READY, allowed=past), SETTINGS, NOW).not_before > NOW


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"known": True}, "closed already"),
        ({"allowed": SHUT}, "22:00"),
        ({"predicted_hours": 8.1}, "budget of 8"),
        ({"disk_free_bytes": 0}, "disk"),
    ],
)
def test_what_keeps_a_cycle_from_opening(change: dict[str, object], word: str) -> None:
    action = decide(replace(READY, **change), SETTINGS, NOW)
    assert action.kind == "wait" and word in action.reason


def test_a_request_overrides_threshold_and_pause_but_not_budget_or_disk() -> None:
    asked = replace(READY, asked=True, new_groups=1, failed_cycles=4, failed_at=NOW)
    assert decide(asked, SETTINGS, NOW).kind == "open"
    assert decide(replace(asked, disk_free_bytes=0), SETTINGS, NOW).kind == "wait"
    assert decide(replace(asked, predicted_hours=9.0), SETTINGS, NOW).kind == "wait"
    assert decide(replace(asked, new_groups=0), SETTINGS, NOW).kind == "wait"

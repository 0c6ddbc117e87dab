"""The ladder as a pure function: what comes after what."""

from dataclasses import replace
from typing import Any

import pytest

from hivetune.machine.facts import catalogue, facts
from hivetune.machine.inventory import Card, read_machine
from hivetune.train.supervise.ladder import (
    FORGET_S,
    RUNGS,
    Bounds,
    Failure,
    Reply,
    arithmetic_changes,
    effects_of,
    next_action,
    published_remedies,
    remember_rungs,
    remembered_rungs,
)

HOST, CARD = Bounds(), Bounds(on_device=True, void=frozenset({"plain"}))
FAULT = "device-memory-fault"


def at(step: int, durable: int = 0, fault: str = FAULT, **more: object) -> Failure:
    return Failure(fault, step, durable, **more)  # type: ignore[arg-type]


def test_a_change_of_arithmetic_is_told_with_its_reason() -> None:
    """Two kills at one step ended in another adapter, and nobody was told."""
    small = RUNGS["small"].description
    events = [
        {"event": "failure", "fault": "killed", "step": 4},
        {"event": "action", "action": "again", "why": "once may be chance", "rungs": [], "tried": ""},
        {"event": "failure", "fault": "killed", "step": 4},
        {"event": "action", "action": "change", "why": small, "rungs": ["small"], "tried": "small"},
        {"event": "attempt", "number": 3},
    ]
    assert arithmetic_changes(events[:2], ()) == []
    (told,) = arithmetic_changes(events, ("small", "environment"))  # the second one is exact
    assert small in told and "from step 4 on" in told
    (remembered,) = arithmetic_changes([], ("plain",))
    assert "an earlier run here" in remembered


BLAS = {"rungs": ("blas",), "tried": "blas"}
KILLS = [at(7, fault="killed"), at(7, fault="killed", isolated=True)]
FINE = [at(7), at(7), at(7, isolated=True, **BLAS)]  # no row is at fault
# Failures -> what follows: its kind, the rung that is tried, and all rungs.
NEXT: dict[str, tuple[list[Failure], Bounds, str, str, tuple[str, ...]]] = {
    "once may be chance": ([at(7)], CARD, "again", "", ()),
    "twice at one step is none, noticed a step late": ([at(7), at(8)], CARD, "change", "blas", ("blas",)),
    "a change that helped stays": ([at(7), at(7), at(30, durable=28, **BLAS)], CARD, "again", "", ("blas",)),
    "rows are replayed before the processor": ([at(7), at(7), at(7, **BLAS)], CARD, "isolate", "", ()),
    "a change that did not help is taken back": (FINE, CARD, "change", "cpu", ("cpu",)),
    "the processor is the last attempt": (FINE, replace(CARD, attempts=4), "change", "cpu", ("cpu",)),
    "then it is over": ([*FINE, at(7, rungs=("cpu",), tried="cpu")], replace(CARD, attempts=4), "stop", "", ("cpu",)),
    "a place that was passed is another": (
        [at(7, fault="killed"), at(50, durable=40, fault="killed"), at(7, durable=40, fault="killed")],
        *(HOST, "again", "", ()),
    ),
    "a quarantined row is progress": ([at(7), *(at(7, quarantined=n) for n in range(5))], HOST, "again", "", ()),
    # Each start saves its first step: a run that dies at step 100 each time is at 2, 3, 4 steps and gets nowhere.
    "a step below the failing one is none": (
        [at(100, durable=durable, isolated=True) for durable in range(1, 7)],
        *(HOST, "stop", "", ()),
    ),
    # Eight kills on a busy machine ended in another adapter: the second at one step led to smaller micro-batches.
    "two kills at one step": ([replace(kill, isolated=False) for kill in KILLS], HOST, "isolate", "", ()),
    "of which no row is the reason": (KILLS, HOST, "again", "", ()),
    "three of them": ([*KILLS, at(7, fault="killed")], HOST, "change", "small", ("small",)),
    # On a slow machine each attempt saved its first step and was killed three steps later: no two at one step.
    **{
        f"kill {last} of those in steps that follow each other": (
            [at(10 + n, durable=6 + n, fault="killed") for n in range(last)],
            *(HOST, "again", "", ()),
        )
        for last in range(1, 6)
    },
}


@pytest.mark.parametrize("case", NEXT)
def test_what_follows(case: str) -> None:
    history, bounds, kind, tried, rungs = NEXT[case]
    action = next_action(history, bounds)
    assert (action.kind, action.tried, action.rungs, action.wait_s) == (kind, tried, rungs, 0.0)


def replies_to(fault: str, bounds: Bounds) -> list[Reply]:
    """What is done while every attempt ends in the same way at the same step; no row is to blame."""
    history = [at(4, fault=fault)]
    replies = [next_action(history, bounds)]
    while replies[-1].kind in ("again", "change", "isolate") and len(replies) < 20:
        last = replies[-1]
        if last.kind == "isolate":
            history[-1] = replace(history[-1], isolated=True)
        else:
            history.append(at(4, fault=fault, rungs=last.rungs, tried=last.tried))
        replies.append(next_action(history, bounds))
    return replies


@pytest.mark.parametrize("fault", [fault.id for fault in catalogue()])
@pytest.mark.parametrize("bounds", [HOST, CARD])
def test_without_progress_every_fault_ends_after_the_attempts_that_are_allowed(fault: str, bounds: Bounds) -> None:
    replies = replies_to(fault, bounds)
    assert sum(reply.kind != "isolate" for reply in replies) <= bounds.attempts
    assert all(bounds.on_device or not RUNGS[name].device_only for reply in replies for name in reply.rungs)


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("device-lost", "again"),
        ("device-memory-fault", "again"),
        ("device-out-of-memory", "change"),
        ("wrong-numbers", "change"),
        ("device-kernels-missing", "stop"),
        ("library-mismatch", "stop"),
    ],
)
def test_a_card_that_fails_whatever_is_done_is_left_at_last(fault: str, first: str) -> None:
    """The processor is what always works. What no attempt can help ends the run at once."""
    replies = replies_to(fault, Bounds(on_device=True))
    assert (replies[0].kind, replies[-1].kind) == (first, "stop") and len(replies) < 12
    assert any(reply.tried == "cpu" for reply in replies) == (first != "stop")


def bounds_of(gfx: str, **changes: Any) -> Bounds:
    card = Card("rocm", 0, "a card", 16 << 30, 15 << 30, "6.12", gfx)
    known = published_remedies(replace(read_machine(), cards=(card,)))
    return replace(Bounds(on_device=True, published=known), **changes)


def test_what_helped_others_comes_first_and_says_whose_it_is() -> None:
    known = next_action([at(4)] * 2, bounds_of("gfx1201", void=frozenset({"blas"})))
    assert (known.kind, known.tried) == ("change", "environment") and "legacy-rocm-build/issues/6647" in known.why
    assert next_action([at(4)] * 2, bounds_of("gfx90a")).tried == "blas"
    tried = [reply.tried for reply in replies_to(FAULT, bounds_of("gfx1201")) if reply.tried]
    assert tried == ["blas", "environment", "plain", "cpu"]


def test_faults_and_remedies_name_rungs() -> None:
    assert {rung for fault in catalogue() for rung in fault.rungs} <= {"isolate", *RUNGS}
    remedies = [remedy for fact in facts("finding") for remedy in fact.fields.get("rungs", ())]
    assert {remedy["rung"] for remedy in remedies} <= RUNGS.keys() and len(remedies) == 4
    assert {fault for remedy in remedies for fault in remedy["faults"]} <= {fault.id for fault in catalogue()}


def test_memory_is_saved_step_by_step() -> None:
    first, second, *_ = replies_to("host-out-of-memory", HOST)
    assert (first.rungs[-1], second.rungs[-1]) == ("small", "smallest")
    assert effects_of(second.rungs)[1].halvings == 30


def test_a_smaller_training_only_where_it_is_allowed() -> None:
    history = [at(0, fault="host-out-of-memory", rungs=("small", "smallest"), tried="smallest")]
    assert next_action(history, HOST).tried == ""
    assert next_action(history, Bounds(allow=frozenset({"rank"}))).tried == "rank"


def test_rungs_are_few_and_ordered() -> None:
    order = "blas environment plain float32 small smallest general cpu rank sample"
    assert list(RUNGS) == order.split()


def test_a_failure_past_the_last_one_is_progress_and_one_at_it_is_none() -> None:
    assert at(200, durable=101).progressed(at(100)) and not at(100, durable=100).progressed(at(100))


DAY_S = 86_400.0


def test_a_remembered_rung_expires_though_runs_finish_with_it() -> None:
    """Each finished run renewed its date: one hang that ended on `cpu` kept a nightly cycle there for ever."""
    remember_rungs("machine", "model", ["cpu"], now_s=0.0)
    for day in range(1, 30):
        rungs = remembered_rungs("machine", "model", day * DAY_S)
        assert rungs == ("cpu",)
        remember_rungs("machine", "model", rungs, day * DAY_S)
    assert remembered_rungs("machine", "model", FORGET_S) == ()


def test_a_rung_that_is_needed_again_begins_anew() -> None:
    remember_rungs("machine", "model", ["blas"], now_s=0.0)
    later = FORGET_S + DAY_S
    assert remembered_rungs("machine", "model", later) == ()
    remember_rungs("machine", "model", ["blas", "rank"], later)
    assert remembered_rungs("machine", "model", later + DAY_S) == ("blas",)
    assert remembered_rungs("another", "model", later) == ()

"""Faults of cards as others published them: what the doctor, the diagnosis and the ladder make of each."""

import re
from dataclasses import replace

import pytest

from hivetune.machine.inventory import Card, read_machine
from hivetune.machine.knowledge.facts import Fact, facts, is_met
from hivetune.process.protocol import ChildError, Outcome
from hivetune.train.supervise.diagnose import diagnose, evidence_of
from hivetune.train.supervise.history import published_remedies
from hivetune.train.supervise.ladder import RUNGS, Bounds, Failure, next_action

PUBLISHED = facts("published")


def bounds_of(gfx: str, **changes: object) -> Bounds:
    card = Card("rocm", 0, "a card", 16 << 30, 15 << 30, "6.12", gfx)
    known = published_remedies(replace(read_machine(), cards=(card,)))
    return replace(Bounds(attempts=5, on_device=True, published=known), **changes)


def changes_tried(fault: str, bounds: Bounds) -> list[str]:
    """The changes that are tried while the worker dies at one step whatever is done; no row is to blame."""
    history, tried = [Failure(fault, 4, 0)], []
    for _ in range(20):
        reply = next_action(history, bounds)
        if reply.kind == "stop":
            break
        if reply.kind == "isolate":
            history[-1] = replace(history[-1], isolated=True)
            continue
        if reply.tried:
            tried.append(reply.tried)
        history.append(Failure(fault, 4, 0, rungs=reply.rungs, tried=reply.tried))
    return tried


def test_thirteen_and_more_are_known() -> None:
    assert len(PUBLISHED) >= 13
    assert {fact.more["rung"] for fact in facts("remedy")} <= RUNGS.keys()


@pytest.mark.parametrize("fact", PUBLISHED, ids=lambda fact: fact.id)
def test_each_is_found_named_and_answered(fact: Fact) -> None:
    bad = [one for one in facts("build") if one.more["verdict"] == "bad"]
    findings = {one.id for one in (*facts("condition"), *bad) if is_met(one.when, fact.when)}
    assert fact.more["finding"] in findings
    good = [one.id for one in facts("build") if one.more["verdict"] == "good" and is_met(one.when, fact.when)]
    assert not good or not fact.when["gfx"].startswith("gfx12"), "a build that faults is not called good"
    if not fact.more["words"]:
        return
    named = re.match(r"(?:torch\.)?(\w+(?:Error|Failed)): (.*)", fact.more["words"])
    kind, message = (named[1], named[2]) if named else ("RuntimeError", fact.more["words"])
    error = ChildError(kind, message, "", 1, "")
    outcome = Outcome("hung" if "hang" in fact.more["fault"] else "failed", 1, None, 1.0, {}, "", error)
    found = diagnose(evidence_of(outcome)).fault
    assert found.id == fact.more["fault"]
    tried = changes_tried(found.id, bounds_of(fact.when["gfx"])) if found.retry else []
    assert tried[: len(fact.more["rungs"])] == fact.more["rungs"]
    assert not found.retry or tried[-1] == "cpu"


def test_what_helped_others_is_tried_at_once_and_says_whose_it_is() -> None:
    """legacy-rocm-build#6600: the same again from the same state dies at the same step."""
    known = next_action([Failure("device-memory-fault", 4, 0)], bounds_of("gfx1201", void=frozenset({"blas"})))
    assert (known.kind, known.tried) == ("change", "no-cache") and "legacy-rocm-build/issues/6647" in known.why
    assert next_action([Failure("device-memory-fault", 4, 0)], bounds_of("gfx90a")).kind == "again"


def test_with_the_usual_attempts_two_remedies_come_before_the_processor() -> None:
    bounds = bounds_of("gfx1201", attempts=3, void=frozenset({"blas"}))
    assert changes_tried("device-memory-fault", bounds) == ["no-cache", "rank64", "cpu"]

"""Remedies that others published for a card: the ladder tries them first."""

from dataclasses import replace

from hivetune.machine.facts import catalogue, facts
from hivetune.machine.inventory import Card, read_machine
from hivetune.train.supervise.ladder import RUNGS, Bounds, Failure, next_action, published_remedies


def bounds_of(gfx: str, **changes: object) -> Bounds:
    card = Card("rocm", 0, "a card", 16 << 30, 15 << 30, "6.12", gfx)
    known = published_remedies(replace(read_machine(), cards=(card,)))
    return replace(Bounds(on_device=True, published=known), **changes)


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


def test_remedies_name_rungs() -> None:
    remedies = [remedy for fact in facts("finding") for remedy in fact.more.get("rungs", ())]
    assert {remedy["rung"] for remedy in remedies} <= RUNGS.keys() and len(remedies) == 4
    assert {fault for remedy in remedies for fault in remedy["faults"]} <= {fault.id for fault in catalogue()}


def test_what_helped_others_comes_first_and_says_whose_it_is() -> None:
    twice = [Failure("device-memory-fault", 4, 0)] * 2
    known = next_action(twice, bounds_of("gfx1201", void=frozenset({"blas"})))
    assert (known.kind, known.tried) == ("change", "environment") and "legacy-rocm-build/issues/6647" in known.why
    assert next_action(twice, bounds_of("gfx90a")).tried == "blas"


def test_two_remedies_of_others_and_one_of_ours_come_before_the_processor() -> None:
    assert changes_tried("device-memory-fault", bounds_of("gfx1201")) == ["blas", "environment", "plain", "cpu"]

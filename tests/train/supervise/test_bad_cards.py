"""A card that fails whatever is done: each fault has its name, what helped others with it is tried first, and at last
the processor takes over or the words say what to do. What the doctor sees of it before is in tests/machine."""

from dataclasses import replace

import pytest

from hivetune.machine.facts import catalogue, facts
from hivetune.machine.inventory import Card, read_machine
from hivetune.process.protocol import ChildError, Outcome
from hivetune.train.supervise.diagnose import diagnose, evidence_of
from hivetune.train.supervise.ladder import RUNGS, Bounds, Failure, Reply, next_action, published_remedies

CARD = Bounds(on_device=True)


def replies_to(fault: str, bounds: Bounds) -> list[Reply]:
    """What is done while every attempt ends in the same way at the same step; no row is to blame."""
    history = [Failure(fault, 4, 0)]
    replies = [next_action(history, bounds)]
    while replies[-1].kind in ("again", "change", "isolate") and len(replies) < 20:
        last = replies[-1]
        if last.kind == "isolate":
            history[-1] = replace(history[-1], isolated=True)
        else:
            history.append(Failure(fault, 4, 0, rungs=last.rungs, tried=last.tried))
        replies.append(next_action(history, bounds))
    return replies


def fault_of(kind: str, message: str) -> str:
    ended = Outcome("failed", 1, 1.0, {}, "", ChildError(kind, message, "", 1, ""))
    return diagnose(evidence_of(ended)).fault.id


@pytest.mark.parametrize(
    ("kind", "message", "name", "first"),
    [
        ("RuntimeError", "CUDA error: GPU is lost. Reboot the system to recover this GPU", "device-lost", "again"),
        ("RuntimeError", "No HIP GPUs are available", "device-lost", "again"),
        ("OutOfMemoryError", "HIP out of memory. Tried to allocate 1.16 GiB", "device-out-of-memory", "change"),
        ("RuntimeError", "HSA_STATUS_ERROR_RESOURCE_BUSY: the queue is taken", "device-lost", "again"),
        (
            "CanaryFailed",
            "canary product m 8 n 412 k 896 in bfloat16 on cuda:0: 3 of 8 rows",
            "wrong-numbers",
            "change",
        ),
        ("RuntimeError", "HIP error: an illegal memory access was encountered", "device-memory-fault", "again"),
    ],
)
def test_a_card_that_fails_is_named_and_at_last_left(kind: str, message: str, name: str, first: str) -> None:
    replies = replies_to(name, CARD)
    assert fault_of(kind, message) == name and replies[0].kind == first
    assert any(reply.tried == "cpu" for reply in replies), "the processor is what always works"
    assert replies[-1].kind == "stop" and len(replies) < 12


@pytest.mark.parametrize(
    ("kind", "message", "name", "title"),
    [
        (
            "RuntimeError",
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
            "device-kernels-missing",
            "does not fit the card or its driver",
        ),
        (  # ulimit -v
            "ImportError",
            "libtorch_cpu.so: failed to map segment from shared object",
            "library-mismatch",
            "does not fit the others",
        ),
    ],
    ids=["driver", "addresses"],
)
def test_what_no_attempt_can_help_ends_the_run_with_what_to_do(kind: str, message: str, name: str, title: str) -> None:
    (only,) = replies_to(name, CARD)
    assert fault_of(kind, message) == name and only.kind == "stop" and title in only.why


def bounds_of(gfx: str, **changes: object) -> Bounds:
    card = Card("rocm", 0, "a card", 16 << 30, 15 << 30, "6.12", gfx)
    known = published_remedies(replace(read_machine(), cards=(card,)))
    return replace(Bounds(on_device=True, published=known), **changes)


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
    tried = [reply.tried for reply in replies_to("device-memory-fault", bounds_of("gfx1201")) if reply.tried]
    assert tried == ["blas", "environment", "plain", "cpu"]

"""What can be wrong with a card when a run is under way: each has its name, and an end: another way, the processor, or
the words that say what to do. What the doctor sees of it before is in tests/machine."""

from dataclasses import replace

import pytest

from hivetune.process.protocol import ChildError, Outcome
from hivetune.train.supervise.diagnose import diagnose, evidence_of
from hivetune.train.supervise.ladder import Bounds, Failure, Reply, next_action

CARD = Bounds(on_device=True)


def answers(kind: str, message: str) -> tuple[str, list[Reply]]:
    """The fault's name, and what is done while every attempt ends in the same way at the same step."""
    error = ChildError(kind, message, "", 1, "")
    ended = Outcome("failed", 1, None, 1.0, {}, "", error)
    fault = diagnose(evidence_of(ended)).fault
    history, replies = [Failure(fault.id, 4, 0)], [next_action([Failure(fault.id, 4, 0)], CARD)]
    while replies[-1].kind in ("again", "change", "isolate") and len(replies) < 20:
        last = replies[-1]
        if last.kind == "isolate":  # no row did it
            history[-1] = replace(history[-1], isolated=True)
        else:
            history.append(Failure(fault.id, 4, 0, rungs=last.rungs, tried=last.tried))
        replies.append(next_action(history, CARD))
    return fault.id, replies


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
    found, replies = answers(kind, message)
    assert found == name and replies[0].kind == first
    assert any(reply.tried == "cpu" for reply in replies), "the processor is what always works"
    assert replies[-1].kind == "stop" and len(replies) < 12


def test_a_driver_that_is_too_old_ends_the_run_with_what_to_do() -> None:
    text = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
    found, replies = answers("RuntimeError", text)
    assert found == "device-kernels-missing" and [reply.kind for reply in replies] == ["stop"]
    assert "does not fit the card or its driver" in replies[0].why


def test_a_limit_of_addresses_ends_the_run() -> None:
    """ulimit -v."""
    found, replies = answers("ImportError", "libtorch_cpu.so: failed to map segment from shared object")
    assert found == "library-mismatch" and [reply.kind for reply in replies] == ["stop"]

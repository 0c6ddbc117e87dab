"""What an earlier supervisor of a run left in its events: rungs, failures that still count, another machine."""

from typing import Any

from hivetune.base.typed import from_plain
from hivetune.machine.faults import fault as fault_of
from hivetune.machine.inventory import Machine
from hivetune.train.supervise.ladder import RUNGS, Failure

_WITH_RUNGS = ("attempt", "action", "supervisor_ended")


def union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def last_rungs(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """The rungs in effect when the last supervisor ended or was killed: a resumed run keeps its arithmetic.

    A rung of an older Hivetune that is gone (rank16) is left out; what it padded changes rounding alone."""
    of = [entry["rungs"] for entry in events if entry["event"] in _WITH_RUNGS and "rungs" in entry]
    return tuple(name for name in of[-1] if name in RUNGS) if of else ()


def open_failures(events: list[dict[str, Any]]) -> list[Failure]:
    """The failures since the last clean end: a killed supervisor's count goes on, a person's new start begins anew."""
    failures: list[Failure] = []
    names = Failure.__dataclass_fields__.keys()
    for entry in events:
        if entry["event"] == "supervisor_ended":
            failures = []
        elif entry["event"] == "failure" and names <= entry.keys():
            failures.append(from_plain(Failure, {name: entry[name] for name in names}))
    return [failure for failure in failures if _is_known(failure.fault)]


def _is_known(identifier: str) -> bool:
    try:
        fault_of(identifier)
    except KeyError:
        return False
    return True


def drift(events: list[dict[str, Any]], machine: Machine) -> list[str]:
    """What differs from the machine and packages that the run began with; it goes on, but a reader must know."""
    started = (entry for entry in events if entry["event"] == "supervisor_started")
    first = next((entry for entry in started if {"versions", "fingerprint"} <= entry.keys()), None)
    if first is None:
        return []
    now, then = dict(machine.versions), first["versions"]
    changed = [
        f"{name} {then.get(name)} -> {now.get(name)}" for name in {**then, **now} if then.get(name) != now.get(name)
    ]
    if first["fingerprint"] != machine.fingerprint and not changed:
        changed = ["the processor, the card or its driver"]
    return [f"changed since this run began: {', '.join(changed)}; rounding may differ"] if changed else []

"""What a new supervisor knows from before: this run's events, this machine's profile, and other people's cards."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hivetune.base.typed import from_plain
from hivetune.machine.facts import catalogue, remedies_of
from hivetune.machine.inventory import Machine
from hivetune.machine.profile import read_profile, write_profile
from hivetune.train.supervise.ladder import RUNGS, Failure

# Remembered rungs are dropped after this long: what filled the memory or broke the card may be gone.
FORGET_S = 30 * 86_400.0
# These rungs concern one run's data, not the machine.
OF_THE_RUN = frozenset({"rank", "sample"})


def published_remedies(machine: Machine) -> dict[str, dict[str, str]]:
    """Return by fault the rungs that helped others with a card of `machine`, in their order: name -> the thread."""
    remedies: dict[str, dict[str, str]] = {}
    for remedy in (each for card in machine.cards if card.kind == "rocm" for each in remedies_of(card.architecture)):
        for fault in remedy["faults"]:
            remedies.setdefault(fault, {}).setdefault(remedy["rung"], f"as in {remedy['source']}")
    return remedies


def remembered_rungs(fingerprint: str, model: str, now_s: float | None = None) -> tuple[str, ...]:
    """Return the rungs that a run of `model` begins with here: rungs that a run needed within the last 30 days.

    They are kept in the machine's profile per model; another driver, card or torch has another profile.
    """
    now = time.time() if now_s is None else now_s
    needed = read_profile(fingerprint).rungs.get(model, {})
    return tuple(name for name, time_s in needed.items() if name in RUNGS and now - time_s < FORGET_S)


def remember_rungs(fingerprint: str, model: str, rungs: Sequence[str], now_s: float | None = None) -> None:
    """Remember that a run of `model` needed these rungs here. One that it began with keeps the time of its need."""
    now = time.time() if now_s is None else now_s
    profile, remembered = read_profile(fingerprint), remembered_rungs(fingerprint, model, now)
    before = profile.rungs.get(model, {})
    needed = {name: before[name] if name in remembered else round(now) for name in rungs if name not in OF_THE_RUN}
    write_profile(replace(profile, rungs={**profile.rungs, model: needed}))


_WITH_RUNGS = ("attempt", "action", "supervisor_ended")


def last_rungs(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the rungs in effect when the last supervisor ended or was killed: a resumed run keeps its arithmetic."""
    of = [entry["rungs"] for entry in events if entry["event"] in _WITH_RUNGS and "rungs" in entry]
    return tuple(name for name in of[-1] if name in RUNGS) if of else ()


def open_failures(events: list[dict[str, Any]]) -> list[Failure]:
    """Return the failures since the last clean end.

    A killed supervisor's count continues; a person's new start begins a new one.
    """
    failures: list[Failure] = []
    names = Failure.__dataclass_fields__.keys()
    for entry in events:
        if entry["event"] == "supervisor_ended":
            failures = []
        elif entry["event"] == "failure" and names <= entry.keys():
            failures.append(from_plain(Failure, {name: entry[name] for name in names}))
    known = {fault.id for fault in catalogue()}  # another Hivetune may have written the events
    return [failure for failure in failures if failure.fault in known]


def drift(events: list[dict[str, Any]], machine: Machine) -> list[str]:
    """Return warnings about what differs from the machine and packages that the run began with. The run continues."""
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

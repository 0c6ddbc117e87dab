"""Which rungs of the ladder got a run through on this machine, or on others with its card.

What helped here is where the next run begins. It is kept in the machine's profile (one per fingerprint: another driver,
card or torch starts anew), per model.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from hivetune.machine.inventory import Machine
from hivetune.machine.knowledge.facts import facts, is_met
from hivetune.machine.profile import read_profile, write_profile
from hivetune.train.supervise.ladder import RUNGS

# Tried again without them after this long: what filled the memory or broke the card may be gone.
FORGET_S = 30 * 86_400.0
# Isolation, rank and sample concern one run's data, not the machine.
OF_THE_RUN = frozenset({"rank", "sample"})
KEY = "rungs"


def published_remedies(machine: Machine) -> dict[str, dict[str, str]]:
    """By fault, the rungs that helped others with a card of `machine`, in their order: name -> the thread."""
    seen = [{"gfx": card.architecture} for card in machine.cards if card.kind == "rocm"]
    known: dict[str, dict[str, str]] = {}
    for fact in facts("remedy"):
        if any(is_met(fact.when, one) for one in seen):
            for fault in fact.more["faults"]:
                known.setdefault(fault, {}).setdefault(fact.more["rung"], f"as in {fact.source[0]}")
    return known


def remembered_rungs(fingerprint: str, model: str, now_s: float | None = None) -> tuple[str, ...]:
    """The rungs that a run of `model` begins with here."""
    entry = read_profile(fingerprint).choices.get(KEY, {}).get(model, {})
    age_s = (time.time() if now_s is None else now_s) - entry.get("time", 0.0)
    return tuple(name for name in entry.get(KEY, ()) if name in RUNGS) if age_s < FORGET_S else ()


def remember_rungs(fingerprint: str, model: str, rungs: Sequence[str]) -> None:
    """These rungs were in effect when a run of `model` got on here."""
    profile = read_profile(fingerprint)
    kept = [name for name in rungs if name not in OF_THE_RUN]
    known = {**profile.choices.get(KEY, {}), model: {KEY: kept, "time": round(time.time())}}
    write_profile(replace(profile, choices={**profile.choices, KEY: known}))

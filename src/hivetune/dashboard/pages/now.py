"""Now: what runs, how far it is, what comes next and why, what needs a person, and the state of the machine."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import home
from hivetune.base.journal import read_tail
from hivetune.cycle.ledger import JOURNAL, loop_folder
from hivetune.dashboard.overview import CycleLoop, overview
from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.watched import Watcher
from hivetune.machine.doctor.findings import judge_machine
from hivetune.machine.doctor.look import Surroundings, look
from hivetune.machine.doctor.observe import Demand
from hivetune.machine.doctor.report import facts_as_text, of_this_account
from hivetune.machine.telemetry import sample


def now_page(watcher: Watcher, request: PageRequest) -> Page:
    runs = watcher.runs()
    home_state = overview([status for _, _, status in runs])
    values = {
        "found": home_state,
        "running": [(identity, run, status) for identity, run, status in runs if status.state == "running"],
        "recent": [(identity, status) for identity, _, status in runs if status.state != "running"][:5],
        "loops": [shown_loop(loop) for loop in home_state.loops],
        "problem": "",
        "device": _device(),
        "now": time.time(),
    }
    return Page("now.html", "Now", values, live=True)


def shown_loop(loop: CycleLoop) -> dict[str, Any]:
    """Return a loop with its last decision: the action, its reason, and its earliest time (0: at once)."""
    decisions = [entry for entry in read_tail(loop_folder(loop.name) / JOURNAL) if entry["event"] == "decision"]
    last: Mapping[str, Any] = decisions[-1] if decisions else {}
    return {
        "loop": loop,
        "action": last.get("kind", "").replace("_", " "),
        "reason": last.get("reason", ""),
        "decided": last.get("now", 0.0),
        "not_before": last.get("not_before", 0.0) if last.get("kind") == "wait" else 0.0,
    }


def _device() -> Mapping[str, Any]:
    """Return rounded numbers, so that a page that hardly changed is not sent again."""
    measured = sample(None, home() if home().exists() else Path.home())
    cards: Sequence[Mapping[str, Any]] = measured.get("cards", ())
    return {
        "available_bytes": round(measured["available_bytes"], -8),
        "disk_free_bytes": round(measured["disk_free_bytes"], -8),
        "load": round(measured["load"], 1),
        "cards": cards,
    }


def doctor_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the facts of this machine as `hivetune doctor --quick` does. Nothing is measured, which would disturb a
    training."""
    facts_seen = look(Surroundings(measure=False))
    judgement = judge_machine(facts_seen, Demand())
    redaction = of_this_account()
    facts = [line.split(maxsplit=1) for line in redaction.text(facts_as_text(facts_seen)).splitlines()]
    values = {
        "facts": [(fact[0], fact[1] if len(fact) > 1 else "") for fact in facts if fact],
        "findings": judgement.findings,
        "redacted": redaction.text,
        "not_known": [redaction.text(question) for question in judgement.not_known],
        "fit": judgement.fit,
        "looked": time.time(),
    }
    return Page("doctor.html", "Doctor", values)

"""Doctor: the facts of this machine and what is wrong with it, as `hivetune doctor --quick` tells them."""

import time

from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.watched import Watcher
from hivetune.machine.doctor.findings import judge_machine
from hivetune.machine.doctor.look import Surroundings, look
from hivetune.machine.doctor.observe import Demand
from hivetune.machine.doctor.report import facts_as_text, of_this_account


def doctor_page(watcher: Watcher, asked: PageRequest) -> Page:
    """Nothing is measured: the disk belongs to whoever trains."""
    seen = look(Surroundings(measure=False))
    judgement = judge_machine(seen, Demand())
    redaction = of_this_account()
    facts = [line.split(maxsplit=1) for line in redaction.text(facts_as_text(seen)).splitlines()]
    values = {
        "facts": [(fact[0], fact[1] if len(fact) > 1 else "") for fact in facts if fact],
        "findings": judgement.findings,
        "told": redaction.text,
        "not_known": [redaction.text(question) for question in judgement.not_known],
        "fit": judgement.fit,
        "looked": time.time(),
    }
    return Page("doctor.html", "Doctor", values)

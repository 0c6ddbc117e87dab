"""The specialists of a shared release in `hive.db`: the outcome of each domain, step by step, with its reason.

A step is a line that is never edited. A specialist is served when its release is a champion (registry.py), which is not
said here.
"""

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hivetune.base.database import transaction
from hivetune.errors import UsageError
from hivetune.release.registry import MAX_NAME_LENGTH, Release, check_release_name, desired, find, retire
from hivetune.routing.domains import RowDomain, one_key

# too-small, nothing-left, not-born, not-enough-evidence: no expert now; another shared adapter or more rows ask anew.
# born: a fork showed that it is worth it. refused: its own gate said no. serving: it is a champion. merged, retired:
# it is none any more.
SpecialistStepName = Literal[
    "too-small", "nothing-left", "not-born", "not-enough-evidence", "born", "refused", "serving", "merged", "retired"
]


@dataclass(frozen=True)
class SpecialistStep:
    """One step of a domain. `parent`: SHA-256 of the shared adapter at that time. `details`: the numbers behind the
    reason.
    """

    shared: str
    domain: RowDomain
    step: SpecialistStepName
    reason: str
    specialist: str
    parent: str
    details: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0


def specialist_name(shared: str, domain: RowDomain) -> str:
    """Return NAME-DOMAIN, as a release is called. Raises UsageError where that is not a name."""
    room = MAX_NAME_LENGTH - len(domain.slug) - 1
    return check_release_name(f"{shared[:room]}-{domain.slug}")


def add_steps(database: sqlite3.Connection, *steps: SpecialistStep) -> None:
    """Add all of these steps or none."""
    with transaction(database):
        for step in steps:
            domain = {"kind": step.domain.kind, "values": list(step.domain.values), "title": step.domain.title}
            values = (step.shared, json.dumps(domain), step.step, step.reason, step.specialist, step.parent)
            database.execute(
                "INSERT INTO expert_steps (shared, domain, step, reason, expert, parent, details, time)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, json.dumps(dict(step.details)), time.time()),
            )


def specialist_steps(database: sqlite3.Connection, shared: str) -> list[SpecialistStep]:
    """Return all steps of a shared release, oldest first."""
    rows = database.execute(
        "SELECT domain, step, reason, expert, parent, details, time FROM expert_steps WHERE shared = ? ORDER BY number",
        (shared,),
    )
    steps = []
    for domain, step, reason, specialist, parent, details, moment in rows:
        fields = json.loads(domain)
        values = tuple(dict.fromkeys(one_key(fields["kind"], value) for value in fields["values"]))
        row_domain = RowDomain(fields["kind"], values, fields["title"])
        steps.append(SpecialistStep(shared, row_domain, step, reason, specialist, parent, json.loads(details), moment))
    return steps


def newest_steps(database: sqlite3.Connection, shared: str) -> dict[str, SpecialistStep]:
    """Return the newest step of each specialist, by its name."""
    return {step.specialist: step for step in specialist_steps(database, shared)}


def families(database: sqlite3.Connection) -> dict[str, list[str]]:
    """Return shared release -> names of all that were ever its specialists."""
    by_shared: dict[str, list[str]] = {}
    for shared, specialist in database.execute(
        "SELECT DISTINCT shared, expert FROM expert_steps WHERE step = 'serving' ORDER BY shared, expert"
    ):
        by_shared.setdefault(shared, []).append(specialist)
    return by_shared


def champion_domains(database: sqlite3.Connection, shared: str) -> dict[str, RowDomain]:
    """Return the domain of each specialist that is a champion now, also of one that a person promoted."""
    steps, champions = newest_steps(database, shared), desired(database)
    return {name: steps[name].domain for name in families(database).get(shared, ()) if name in champions}


def retire_release(database: sqlite3.Connection, reference: str, *, by: str, reason: str) -> Release:
    """Take the champion of a name out of service without a successor; an expert's step reports it.

    Raises UsageError where `reference` is not a champion.
    """
    champion = find(database, reference)
    if "champion" not in champion.aliases:
        raise UsageError(f"{champion.label} is not the champion", hint="see the champion: hivetune registry")
    for shared, specialists in families(database).items():
        if champion.name in specialists:
            # First: an expert whose step says that it serves, and that has no champion, would stay so after a kill.
            step = newest_steps(database, shared)[champion.name]
            add_steps(database, replace(step, step="retired", reason=reason, details={"release": champion.label}))
    retire(database, champion.name, by=by, reason=reason)
    return find(database, champion.label)

"""The experts of a shared release in `hive.db`: what became of each domain, step by step, with its reason.

A step is a line that is never edited. Whether an expert is served is not said here: it is, when its release is a
champion (registry.py).
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
ExpertStepName = Literal[
    "too-small", "nothing-left", "not-born", "not-enough-evidence", "born", "refused", "serving", "merged", "retired"
]


@dataclass(frozen=True)
class ExpertStep:
    """One line. `parent`: SHA-256 of the shared adapter at that time; `details`: numbers behind the reason."""

    shared: str
    domain: RowDomain
    step: ExpertStepName
    reason: str
    expert: str
    parent: str
    details: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0


def expert_name(shared: str, domain: RowDomain) -> str:
    """NAME-DOMAIN, as a release is called. Raises UsageError where that is no name."""
    room = MAX_NAME_LENGTH - len(domain.slug) - 1
    return check_release_name(f"{shared[:room]}-{domain.slug}")


def add_steps(database: sqlite3.Connection, *steps: ExpertStep) -> None:
    """All of them or none."""
    with transaction(database):
        for step in steps:
            domain = {"kind": step.domain.kind, "values": list(step.domain.values), "title": step.domain.title}
            values = (step.shared, json.dumps(domain), step.step, step.reason, step.expert, step.parent)
            database.execute(
                "INSERT INTO expert_steps (shared, domain, step, reason, expert, parent, details, time)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, json.dumps(dict(step.details)), time.time()),
            )


def expert_steps(database: sqlite3.Connection, shared: str) -> list[ExpertStep]:
    """All steps of a shared release, oldest first."""
    rows = database.execute(
        "SELECT domain, step, reason, expert, parent, details, time FROM expert_steps WHERE shared = ? ORDER BY number",
        (shared,),
    )
    found = []
    for domain, step, reason, expert, parent, details, moment in rows:
        said = json.loads(domain)
        values = tuple(dict.fromkeys(one_key(said["kind"], value) for value in said["values"]))
        known = RowDomain(said["kind"], values, said["title"])
        found.append(ExpertStep(shared, known, step, reason, expert, parent, json.loads(details), moment))
    return found


def newest_steps(database: sqlite3.Connection, shared: str) -> dict[str, ExpertStep]:
    """The newest step of each expert, by its name."""
    return {step.expert: step for step in expert_steps(database, shared)}


def families(database: sqlite3.Connection) -> dict[str, list[str]]:
    """Shared release -> names of all that were ever its experts."""
    found: dict[str, list[str]] = {}
    for shared, expert in database.execute(
        "SELECT DISTINCT shared, expert FROM expert_steps WHERE step = 'serving' ORDER BY shared, expert"
    ):
        found.setdefault(shared, []).append(expert)
    return found


def champion_domains(database: sqlite3.Connection, shared: str) -> dict[str, RowDomain]:
    """The domain of each expert of a shared release that is a champion now, also of one that a person promoted."""
    steps, champions = newest_steps(database, shared), desired(database)
    return {name: steps[name].domain for name in families(database).get(shared, ()) if name in champions}


def retire_release(database: sqlite3.Connection, reference: str, *, by: str, reason: str) -> Release:
    """Take the champion of a name out of service without a successor; an expert's step says so.

    Raises UsageError where `reference` is no champion.
    """
    champion = find(database, reference)
    if "champion" not in champion.aliases:
        raise UsageError(f"{champion.label} is not the champion", hint="see who is: hivetune registry")
    for shared, experts in families(database).items():
        if champion.name in experts:
            # First: an expert whose step says that it serves, and that has no champion, would stay so after a kill.
            step = newest_steps(database, shared)[champion.name]
            add_steps(database, replace(step, step="retired", reason=reason, details={"release": champion.label}))
    retire(database, champion.name, by=by, reason=reason)
    return find(database, champion.label)

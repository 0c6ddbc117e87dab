"""The doctor's report as text and as JSON, without the names of user and host."""

import os
import platform
import pwd
import re
from dataclasses import asdict
from typing import Any

from hivetune.base.units import size
from hivetune.machine.findings import Judgement
from hivetune.machine.inventory import describe_machine
from hivetune.machine.look import Look, SeenCard
from hivetune.process.sandbox import landlock_version, protection

# Accounts that name no person, and a host that names no machine.
NOBODYS = frozenset({"root", "nobody", "user", "ubuntu", "admin", "localhost", ""})


def redacted(value: Any, user: str | None = None, host: str | None = None) -> Any:
    """Return plain values without the names of user and host, by default of this account and machine."""
    user, host = pwd.getpwuid(os.getuid()).pw_name if user is None else user, platform.node() if host is None else host
    if isinstance(value, dict):
        return {key: redacted(inner, user, host) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, user, host) for inner in value]
    if isinstance(value, str):
        names = {host: "HOST", host.partition(".")[0]: "HOST", user: "USER"}
        for name in sorted(names.keys() - NOBODYS, key=len, reverse=True):  # a host before its first part
            value = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", names[name], value)
    return value


def report_document(look: Look, judgement: Judgement) -> dict[str, Any]:
    """Return the content of `doctor --json` before redaction."""
    cards = [{**vars(seen.card), "access": seen.access, "used": seen.in_question} for seen in look.cards]
    return {
        "fit": judgement.fit,
        "findings": [asdict(finding) for finding in judgement.findings],
        "machine": {**describe_machine(look.machine), "cards": cards},
        "observed": dict(look.observed),
        "packages": dict(look.packages),
        "variables": dict(look.variables),
    }


def facts_as_text(look: Look) -> str:
    """Return what was observed, a line each, by the names that the facts use."""
    machine = look.machine
    limit = "" if machine.memory_limit == "machine" else f" (limit of {machine.memory_limit})"
    rows = [
        ("processor", f"{machine.cpu}, {machine.cores} cores; {' '.join(machine.isa) or 'no vector instructions'}"),
        ("memory", f"{size(machine.available_bytes)} of {size(machine.memory_bytes)} available{limit}"),
        *([("card", _card(seen)) for seen in look.cards] or [("card", "none")]),
        ("sandbox", protection(landlock_version())),
        *((name, _value(value)) for name, value in look.observed.items() if value is not False),
        ("packages", ", ".join(f"{name} {version}" for name, version in look.packages.items())),
        *(("variable", f"{name}={value}") for name, value in look.variables.items()),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in rows)


def _card(seen: SeenCard) -> str:
    access = {"ok": "", "denied": ", not open to this user", "absent": ", without /dev/kfd"}[seen.access]
    unused = "" if seen.in_question else ", not used for training"
    free = f"{size(seen.card.free_bytes)} of {size(seen.card.memory_bytes)} free"
    return f"{seen.name}, {free}, driver {seen.card.driver}{access}{unused}"


def _value(value: Any) -> str:
    return "yes" if value is True else " ".join(value) if isinstance(value, tuple) else str(value)


def findings_as_text(judgement: Judgement) -> str:
    """Return each finding with its evidence and command."""
    lines = [] if judgement.findings else ["nothing is wrong"]
    for number, finding in enumerate(judgement.findings, 1):
        card = f" [{finding.about}]" if finding.about else ""
        lines += [f"{number}. {finding.severity}: {finding.title}{card}", f"   {finding.explanation}"]
        parts = {"seen here": ", ".join(finding.evidence), "do": finding.fix, "sources": " ".join(finding.source)}
        lines += [f"   {title}: {text}" for title, text in parts.items() if text]
    return "\n".join(lines)

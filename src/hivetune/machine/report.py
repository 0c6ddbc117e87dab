"""The doctor's report as text and as JSON, without the names of user, host and home."""

import os
import platform
import pwd
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hivetune.base.units import size
from hivetune.machine.findings import Judgement
from hivetune.machine.inventory import describe_machine
from hivetune.machine.look import Look, SeenCard
from hivetune.process.sandbox import landlock_version, protection

# Accounts that name no person.
NOBODYS = frozenset({"root", "nobody", "user", "ubuntu", "admin", ""})


class Redaction:
    """The removal of personal names from texts: the account, the machine's name, and the home folder."""

    def __init__(self, user: str, host: str, homes: Sequence[str]):
        names = [(home, "~") for home in sorted(set(homes), key=len, reverse=True) if len(home) > 1]
        names += [(name, "USER") for name in (user,) if name not in NOBODYS]
        names += [(name, "HOST") for name in (host, host.partition(".")[0]) if name not in ("", "localhost")]
        self._patterns = [(re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])"), mask) for word, mask in names]

    def text(self, text: str) -> str:
        for pattern, mask in self._patterns:
            text = pattern.sub(mask, text)
        return text

    def document(self, value: Any) -> Any:
        """Return a document of plain values with every text redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.document(inner) for key, inner in value.items()}
        return [self.document(inner) for inner in value] if isinstance(value, list | tuple) else value


def of_this_account() -> Redaction:
    """Return the redaction for the user of this process, from the account and the environment."""
    account = pwd.getpwuid(os.getuid())
    homes = [account.pw_dir, os.environ.get("HOME", ""), str(Path.home())]
    return Redaction(account.pw_name, platform.node(), [home.rstrip("/") for home in homes])


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

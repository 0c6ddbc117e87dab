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
from hivetune.machine.doctor.findings import CPU_BF16, Judgement
from hivetune.machine.doctor.look import Look, SeenCard, describe_look
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
        if isinstance(value, list | tuple):
            return [self.document(inner) for inner in value]
        return value


def of_this_account() -> Redaction:
    """Return the redaction for the user of this process, from the account and the environment."""
    account = pwd.getpwuid(os.getuid())
    homes = [account.pw_dir, os.environ.get("HOME", ""), str(Path.home())]
    return Redaction(account.pw_name, platform.node(), [home.rstrip("/") for home in homes])


def report_document(look: Look, judgement: Judgement) -> dict[str, Any]:
    """Return the content of `doctor --json` before redaction."""
    return {
        "fit": judgement.fit,
        "findings": [asdict(finding) for finding in judgement.findings],
        "facts": describe_look(look),
    }


def facts_as_text(look: Look) -> str:
    """Return the observed facts, one line each."""
    host, software = look.host, look.software
    shown = {name: version for name, version in software.packages.items() if name not in ("torch", "hivetune")}
    packages = [f"{name} {version}" for name, version in shown.items()]
    servers = [host.llama_server] if host.llama_server else []
    servers += [text for text in packages if text.startswith("xllamacpp ")]
    rows = [
        ("system", f"{host.system or 'Linux'}, kernel {host.kernel}{', in a container' if host.container else ''}"),
        ("processor", _processor(look)),
        ("memory", _memory(look)),
        ("home", _disk(look)),
        *(("card", _card(card)) for card in look.cards),
        *([] if look.cards else [("card", "none")]),
        ("torch", _torch(look)),
        ("python", f"{software.python}; {', '.join(packages)}"),
        ("ROCm", _rocm(look)),
        ("compiler", host.compiler or "none: the plain kernels in torch run"),
        ("llama.cpp", ", ".join(servers) or "none"),
        ("its sandbox", protection(landlock_version())),
        *(("variable", f"{name}={value}") for name, value in look.variables.items()),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in rows if text)


def findings_as_text(judgement: Judgement) -> str:
    """Return each finding with its evidence and command."""
    lines = [] if judgement.findings else ["nothing is wrong"]
    for number, finding in enumerate(judgement.findings, 1):
        card = f" [{finding.about}]" if finding.about else ""
        lines += [f"{number}. {finding.severity}: {finding.title}{card}", f"   {finding.explanation}"]
        parts = {
            "seen here": ", ".join(finding.evidence),
            "do": finding.fix,
            "sources": " ".join(finding.source),
        }
        lines += [f"   {title}: {text}" for title, text in parts.items() if text]
    return "\n".join(lines)


def _processor(look: Look) -> str:
    machine = look.machine
    bf16 = "bfloat16 of its own" if CPU_BF16 & {*machine.isa} else "no bfloat16 of its own"
    return f"{machine.cpu}, {machine.cores} cores; {' '.join(machine.isa) or 'no vector instructions'}; {bf16}"


def _memory(look: Look) -> str:
    machine, host = look.machine, look.host
    where = "" if machine.memory_limit == "machine" else f" (limit of {machine.memory_limit})"
    swap = f"; swap {size(host.swap_used_bytes)} of {size(host.swap_bytes)} used" if host.swap_bytes else ""
    return f"{size(machine.available_bytes)} of {size(machine.memory_bytes)} available{where}{swap}"


def _disk(look: Look) -> str:
    return f"{look.host.filesystem or 'unknown file system'}, {size(look.host.free_bytes)} free"


def _card(seen_card: SeenCard) -> str:
    card = seen_card.card
    access = {"ok": "", "denied": ", not open to this user", "absent": ", without /dev/kfd"}[seen_card.access]
    unused = "" if seen_card.in_question else ", not used for training"
    free = f"{size(card.free_bytes)} of {size(card.memory_bytes)} free"
    return f"{seen_card.name}, {free}, driver {card.driver}{access}{unused}"


def _torch(look: Look) -> str:
    torch = look.software.torch
    if torch.kind == "none":
        return "not installed"
    built = {"cpu": "processors", "cuda": f"CUDA {torch.cuda}", "rocm": f"ROCm {torch.rocm}", "none": ""}[torch.kind]
    kernels = f", matrix kernels for {' '.join(torch.kernels)}" if torch.kernels else ""
    return f"{torch.version}, built for {built}{kernels}"


def _rocm(look: Look) -> str:
    software = look.software
    parts = [f"{name} {version}" for name, version in software.rocm_packages.items()]
    parts += [f"/opt/rocm {software.system_rocm}"] if software.system_rocm else []
    parts += [f"LD_LIBRARY_PATH {software.path_rocm}"] if software.path_rocm else []
    return ", ".join(parts)

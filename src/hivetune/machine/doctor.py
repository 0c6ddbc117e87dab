"""The parts of `doctor` besides look and findings: a self-test of each device, and a document without names of user and
host.

The self-test takes seconds: products of LoRA's shapes, on each device, are compared with float64 on the processor. Only
its child (`machine/worker/selftest.py`) imports torch, because a crash or a hang of the device is also a result. The
self-test detects a torch that does not work on this machine, but not a kernel that is only rarely wrong.
"""

import os
import platform
import pwd
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hivetune.base.paths import install_command
from hivetune.base.typed import to_plain
from hivetune.machine.findings import Judgement, MachineFinding, advised_variables, candidate_cards
from hivetune.machine.look import Look
from hivetune.process.sandbox import landlock_version, protection
from hivetune.records import Progress, silent

TIMEOUT_S = 60.0  # torch on a cold disk takes 20
PROGRAM = "hivetune.machine.worker.selftest"
# Accounts that name no person, and a host that names no machine.
NOBODYS = frozenset({"root", "nobody", "user", "ubuntu", "admin", "localhost", ""})


def check_device(device: str, environment: Mapping[str, str] | None = None) -> MachineFinding | None:
    """Run the self-test of a device in a child with these variables. Return the finding, None if the device passed."""
    command = [sys.executable, "-m", PROGRAM, device]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        problem = f"it did not answer for {TIMEOUT_S:.0f} s"
    else:
        if ended.returncode == 0:
            return None
        words = (ended.stderr.strip() or "torch ended without a word").splitlines()[-1]
        by_signal = ended.returncode < 0
        problem = f"torch ended by {signal.Signals(-ended.returncode).name}" if by_signal else words
    on_cpu = device == "cpu"
    return MachineFinding(
        id=f"selftest-{device}",
        severity="fatal" if on_cpu else "risk",
        title=f"torch does not compute right on {device}",
        explanation=problem,
        fix=install_command("train") if on_cpu else "hivetune train CONFIG --set device=cpu",
        about=device,
    )


def failed_devices(found: Look, progress: Progress = silent) -> list[MachineFinding]:
    """Test each device in the environment of a worker. Return the findings of those that failed."""
    changes = {variable.name: variable.value for variable in advised_variables(found, keep_set=True)}
    wanted = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    environment = {name: value for name, value in wanted.items() if changes.get(name, value) is not None}
    cards = [card for card in candidate_cards(found) if card.card.kind == found.observed["build"]]
    devices = [*(f"cuda:{number}" for number in range(len(cards))), "cpu"]
    failed = []
    for number, device in enumerate(devices, 1):
        failed.append(check_device(device, environment))
        progress(number, len(devices))
    return [finding for finding in failed if finding is not None]


def report_document(look: Look, judgement: Judgement) -> dict[str, Any]:
    """Return the content of `doctor --json`. A person may paste it into an issue, so it names neither user nor host."""
    cards = [{**vars(seen.card), "access": seen.access, "used": seen.is_candidate} for seen in look.cards]
    document = {
        "fit": judgement.fit,
        "findings": [asdict(finding) for finding in judgement.findings],
        "machine": {"fingerprint": look.machine.fingerprint, **to_plain(look.machine), "cards": cards},
        "sandbox": protection(landlock_version()),
        "observed": dict(look.observed),
        "packages": dict(look.packages),
        "variables": dict(look.variables),
    }
    return dict(redacted(document, pwd.getpwuid(os.getuid()).pw_name, platform.node()))


def redacted(value: Any, user: str, host: str) -> Any:
    """Return plain values without the names of user and host."""
    if isinstance(value, dict):
        return {key: redacted(inner, user, host) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, user, host) for inner in value]
    if isinstance(value, str):
        names = {host: "HOST", host.partition(".")[0]: "HOST", user: "USER"}
        for name in sorted(names.keys() - NOBODYS, key=len, reverse=True):  # a host before its first part
            value = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", names[name], value)
    return value

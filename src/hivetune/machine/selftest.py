"""The self-test of seconds: products as LoRA has them, on each device, against float64 on the processor.

The child (`machine/worker/selftest.py`) alone imports torch, because a device that crashes or hangs is a result too.
Nothing is kept. The test finds a torch that does not work here, but not a kernel that is rarely wrong.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from hivetune.base.paths import install_command
from hivetune.machine.findings import MachineFinding, advised_variables, candidate_cards
from hivetune.machine.look import Look
from hivetune.records import Progress, silent

TIMEOUT_S = 60.0  # torch on a cold disk takes 20
PROGRAM = "hivetune.machine.worker.selftest"


def check_device(device: str, environment: Mapping[str, str] | None = None) -> MachineFinding | None:
    """Run the self-test of a device in a child with these variables. Return the finding, None where all is right."""
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
    """Test each device in the environment that a worker gets. Return the findings of those that failed."""
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

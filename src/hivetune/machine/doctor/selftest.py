"""The self-test of seconds: products as LoRA has them, on each device, against float64 on the processor.

The child (`machine/worker/selftest.py`) alone imports torch, because a device that crashes or hangs is a result too.
Nothing is kept. The test finds a torch that does not work here, but not a kernel that is rarely wrong.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hivetune.machine.doctor.findings import MachineFinding

TIMEOUT_S = 60.0  # torch on a cold disk takes 20
PROGRAM = "hivetune.machine.worker.selftest"


@dataclass(frozen=True)
class TestedDevice:
    """The result of one device; `problem` is empty where every product was right."""

    device: str
    problem: str


def check_device(device: str, environment: Mapping[str, str] | None = None) -> TestedDevice:
    """Run the self-test of a device in a child. `environment`: its variables."""
    command = [sys.executable, "-m", PROGRAM, device]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return TestedDevice(device, f"it did not answer for {TIMEOUT_S:.0f} s")
    if ended.returncode < 0:
        return TestedDevice(device, f"torch ended by {signal.Signals(-ended.returncode).name}")
    lines = (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines()
    return TestedDevice(device, "" if ended.returncode == 0 else lines[-1] if lines else "torch ended without a word")


def finding_of(tested: TestedDevice) -> MachineFinding:
    """Return the finding about a device that failed."""
    on_cpu = tested.device == "cpu"
    return MachineFinding(
        id=f"selftest-{tested.device}",
        severity="fatal" if on_cpu else "risk",
        title=f"torch does not compute right on {tested.device}",
        explanation=tested.problem,
        fix="hivetune doctor 'THE MESSAGE'" if on_cpu else "hivetune train CONFIG --set device=cpu",
        about=tested.device,
    )

"""The self-test of seconds: products as LoRA has them, on each device, against float64 on the processor.

The child (`machine/worker/selftest.py`) alone imports torch, because a device that crashes or hangs is a result too.
Nothing is kept. The test finds a torch that does not work here, but not a kernel that is rarely wrong.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping

from hivetune.machine.findings import MachineFinding

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
        fix="hivetune doctor 'THE MESSAGE'" if on_cpu else "hivetune train CONFIG --set device=cpu",
        about=device,
    )

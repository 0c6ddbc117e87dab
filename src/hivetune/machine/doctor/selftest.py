"""The self-test of seconds: products as LoRA has them, on each device, against float64 on the processor.

`python -m hivetune.machine.doctor.selftest DEVICE` is the child, which alone imports torch: a device that crashes or
hangs is a result too. Nothing is kept. It finds a torch that does not work here; a rare fault of a kernel it does not.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hivetune.machine.doctor.findings import MachineFinding

TIMEOUT_S = 60.0  # torch on a cold disk takes 20
# Rows, inner size, columns: a projection of a small model, both matrices of an adapter, and a ragged one.
SHAPES = ((64, 896, 896), (512, 896, 8), (512, 8, 896), (77, 301, 129))
# Of float64, relative to the largest value.
NEAR = {"float32": 1e-5, "bfloat16": 2e-2}
PROGRAM = "hivetune.machine.doctor.selftest"


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


def main(device: str) -> None:
    """Compute every shape in each precision, and end with the first wrong one."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in SHAPES:
        a = torch.randn((rows, inner), generator=generator, dtype=torch.float64)
        b = torch.randn((inner, columns), generator=generator, dtype=torch.float64)
        for name, near in NEAR.items():
            dtype = getattr(torch, name)
            mine_a, mine_b = a.to(device, dtype), b.to(device, dtype)
            truth = mine_a.cpu().double() @ mine_b.cpu().double()
            distance = ((mine_a @ mine_b).cpu().double() - truth).abs().max() / truth.abs().max()
            if not distance <= near:
                sys.exit(f"{rows} x {inner} x {columns} in {name} is wrong by {distance:.2g}")


if __name__ == "__main__":
    main(sys.argv[1])

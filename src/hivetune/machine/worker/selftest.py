"""The self-test that runs in a child process: `python -m hivetune.machine.worker.selftest DEVICE`
(machine/doctor.py)."""

import sys

import torch

# Rows, inner size, columns: a projection of a small model, both matrices of an adapter, and a ragged one.
SHAPES = ((64, 896, 896), (512, 896, 8), (512, 8, 896), (77, 301, 129))
# Of float64, relative to the largest value.
NEAR = {"float32": 1e-5, "bfloat16": 2e-2}


def main(device: str) -> None:
    """Compute a product of each shape in each precision, and stop at the first wrong one."""
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

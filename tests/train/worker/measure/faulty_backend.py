"""A prover whose backends are broken in a way that the environment names: run as a child, or its pieces in a test."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Prove
from hivetune.run.choices import Choices
from hivetune.train.worker.measure.prove import main
from hivetune.train.worker.model.fast.computing import Computing, backend_of
from hivetune.train.worker.model.fast.ops import TorchOps

FAULT = "HIVETUNE_TEST_FAULT"
ROWS = 100  # between the two sizes of the tests' job, and above its weights' outputs


class Zeros(TorchOps):
    """No more than ROWS rows of a norm are written."""

    def add_norm(self, x_TD, delta_TD, sum_TD, w_D, eps, y_TD, rstd_T):  # type: ignore[no-untyped-def]
        super().add_norm(x_TD, delta_TD, sum_TD, w_D, eps, y_TD, rstd_T)
        y_TD[ROWS:] = 0


def zeros_above(a: Tensor, b: Tensor) -> Tensor:
    """ROCm/rocm-libraries#5706 and ROCm/legacy-rocm-build#6595: zeros beyond a number of rows."""
    c = a @ b
    c[ROWS:] = 0
    return c


def nan_once(every: int) -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        c = a @ b
        if calls % every == 0:
            c[0, 0] = torch.nan
        return c

    return multiply


def crash(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[0] > ROWS:
        ctypes.string_at(1)
    return a @ b


def hang(a: Tensor, b: Tensor) -> Tensor:
    """At once, so that no slow minute of the machine can be taken for it. Holds the GIL, as a driver call can."""
    ctypes.PyDLL(None).sleep(600)
    return a @ b


FAULTS = {"zeros": zeros_above, "nan": nan_once(1000), "crash": crash, "hang": hang}


def faulty(choices: Choices, device: torch.device, dtype: torch.dtype) -> tuple[Computing, str]:
    backend, name = backend_of(replace(choices, kernels="torch"), device, dtype)
    return replace(backend, multiply=FAULTS[os.environ[FAULT]]), name


def prove(task: Prove, heartbeat: Heartbeat) -> dict:  # type: ignore[type-arg]
    return main(task, heartbeat, backend_for=faulty)


if __name__ == "__main__":
    run_child(prove, Prove)

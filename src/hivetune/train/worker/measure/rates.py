"""The rates of a device, whatever is trained: products a second by precision, memory, launches, the host's link.

The plan uses these rates; they are measured once a machine and kept in its profile.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from hivetune.models.architecture import Architecture
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, MeasureRates
from hivetune.train.worker.device import DTYPES, check_device, default_threads
from hivetune.train.worker.model.products import product_seconds, timed

# Large enough that neither the call nor the caches decide: 17 GFLOP on a CPU (0.1 s), 137 GFLOP on a card (1 ms).
CANARY_SHAPE = {"cpu": (1024, 2048, 4096), "cuda": (4096, 4096, 4096)}
CANARY_ROUNDS = 3
# 30 ms for SmolLM2's on two cores: long enough that one interruption does not decide, 1 % of five steps.
OWN_CANARY_ROUNDS = 25
# More than most caches hold; on a card 1 ms of work.
COPY_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
LAUNCHES = 500


def main(task: MeasureRates, heartbeat: Heartbeat) -> dict[str, Any]:
    """Measure the rates of the device of `task`."""
    device = check_device(task.device)
    torch.set_num_threads(default_threads())
    heartbeat.beat(Beat.PREPARING)
    gemm = canary_rates(device)
    heartbeat.beat(Beat.PREPARING)
    return {"gemm": gemm, "other": other_rates(device)}


def canary_rates(device: torch.device) -> dict[str, float]:
    """Return the FLOP/s of a large GEMM for each dtype that the device multiplies natively, by the fastest library."""
    rows, inner, columns = CANARY_SHAPE[device.type]
    rates: dict[str, float] = {}
    for name in ("float32", "bfloat16", *(("float16",) if device.type == "cuda" else ())):
        # A first small product tells a dtype that is emulated (on AVX2, bfloat16 is up to 500 times slower).
        dtype = DTYPES[name]
        small_s = min(product_seconds((128, 128, 128), dtype, device, CANARY_ROUNDS))
        if rates and 2 * 128**3 / small_s < 0.02 * max(rates.values()) and device.type == "cpu":
            continue
        # The least: a disturbance makes it slower, nothing faster.
        seconds = min(product_seconds(CANARY_SHAPE[device.type], dtype, device, CANARY_ROUNDS))
        rates[name] = 2 * rows * inner * columns / seconds
    return rates


def own_canary(architecture: Architecture, dtype: str, device: torch.device) -> float:
    """Return the FLOP/s of the run's own largest product.

    Measured again in the run, it shows whether the machine changed.
    """
    shape = (512, architecture.hidden, architecture.ffn)
    return 2.0 * math.prod(shape) / statistics.median(product_seconds(shape, DTYPES[dtype], device, OWN_CANARY_ROUNDS))


def other_rates(device: torch.device) -> dict[str, float]:
    """Return the other rates of a device.

    `bandwidth`: bytes a second that a copy in the device's memory reads and writes. `launch_s`: seconds of an operation
    on one value. On a card `to_device` and `from_device`: bytes a second from and to pinned host memory.
    """
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = {"bandwidth": 2 * source.numel() / best_s(lambda: target.copy_(source), device)}
    scalar = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            scalar.add_(1.0)

    rates["launch_s"] = best_s(launches, device) / LAUNCHES
    if device.type == "cuda":
        host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
        rates["to_device"] = host.numel() / best_s(lambda: target.copy_(host, non_blocking=True), device)
        rates["from_device"] = host.numel() / best_s(lambda: host.copy_(source, non_blocking=True), device)
    return rates


def best_s(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the least seconds of `work`, after one to warm up: a disturbance makes it slower, nothing faster."""
    return min(timed(work, device, rounds))


if __name__ == "__main__":
    run_child(main, MeasureRates)

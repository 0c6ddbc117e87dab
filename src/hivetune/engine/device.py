"""Where and in which precision a run computes: chosen once by measurement, then read from the run's choices.

A choice that is in `config.resolved.yaml` is never measured again, so a resumed run computes as it began.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from hivetune.base.disk import write_atomic
from hivetune.config import RunConfig, parse_config
from hivetune.errors import MachineNotFit, UsageError
from hivetune.run.folder import CONFIG

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# A product of a small model's step (512 tokens, width 1024). Smaller ones measure the call, larger ones take longer.
PROBE_ROWS, PROBE_WIDTH, PROBE_ROUNDS = 512, 1024, 5
# Half precision costs accuracy; it has to be worth it. On CPUs without native bf16 it is 40 to 500 times slower than
# fp32 (pytorch/pytorch#146508), with it 1.7 to 2.3 times faster.
WORTH_IT = 1.25


def read_resolved(run: Path) -> tuple[RunConfig, dict[str, Any]]:
    """The settings and the measured choices of a run folder."""
    path = run / CONFIG
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="start the run with: hivetune train") from None
    return parse_config(tree["config"], str(path)), dict(tree.get("choices") or {})


def settle(run: Path, config: RunConfig, choices: dict[str, Any], *, write: bool = True) -> dict[str, Any]:
    """`choices` with device, dtype and threads in it; what was missing is measured and written before step 0."""
    settled = {**choose(config.device, config.dtype, choices), **choices}
    if settled != choices and write:
        tree = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        text = yaml.safe_dump({**tree, "choices": settled}, sort_keys=False, allow_unicode=True)
        write_atomic(run / CONFIG, text.encode())
    torch.set_num_threads(settled["threads"])
    return settled


def with_changes(config: RunConfig, settled: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settled choices with a recovery's changes over them (supervise/ladder.py); nothing is written.

    Another device is measured anew.
    """
    if changes.get("device", settled["device"]) != settled["device"]:
        settled = {**settled, **choose(changes["device"], config.dtype, {})}
    changed = {**settled, **changes}
    torch.set_num_threads(changed["threads"])
    return changed


def choose(device: str, dtype: str, choices: Mapping[str, Any]) -> dict[str, Any]:
    """device, dtype and threads as plain values. Raises MachineNotFit for a device that is not there."""
    if "device" in choices:
        device = choices["device"]
    elif device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = check_device(device)
    if "dtype" in choices:
        dtype = choices["dtype"]
    elif dtype == "auto":
        dtype = fastest_dtype(place)
    return {"device": device, "dtype": dtype, "threads": choices.get("threads") or default_threads()}


def check_device(name: str) -> torch.device:
    """Raises MachineNotFit when torch can't use it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise MachineNotFit(f"device {name}: {reason}", hint="device: auto chooses one that torch can use") from None
    return device


def cap_memory(device: torch.device, share: float) -> None:
    """Beyond `share` of a card an allocation fails: a card that also draws the desktop keeps room for it."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device.index)


def default_threads() -> int:
    """OMP_NUM_THREADS, else the cores this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fastest_dtype(device: torch.device) -> str:
    """bfloat16 if its matrix product is clearly faster than fp32's here, else float32."""
    seconds = {name: _product_s(DTYPES[name], device) for name in ("float32", "bfloat16")}
    return "bfloat16" if seconds["float32"] > WORTH_IT * seconds["bfloat16"] else "float32"


def peak_memory_bytes(device: torch.device) -> int:
    """The most this process held: on the card by torch's allocator, else resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Count the peak anew from what is held now; where the system can't (not Linux), it stays that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # proc(5): resets the peak resident set size


def _product_s(dtype: torch.dtype, device: torch.device) -> float:
    """Median time of one product, after a warm-up."""
    x, w = (torch.ones(n, PROBE_WIDTH, dtype=dtype, device=device) for n in (PROBE_ROWS, PROBE_WIDTH))
    seconds = []
    for _ in range(PROBE_ROUNDS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        torch.nn.functional.linear(x, w)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])

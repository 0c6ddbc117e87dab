"""The device and precision of a run: chosen once by measurement, then read from the run's choices."""

import contextlib
import functools
import os
from dataclasses import replace
from pathlib import Path

import torch

from hivetune.base.kernel import usable_cores
from hivetune.config import RunConfig
from hivetune.errors import MachineNotFit
from hivetune.machine.inventory import WORKERS_PER_MACHINE, read_machine
from hivetune.machine.profile import read_profile
from hivetune.process.lease import card_name, train_on
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved
from hivetune.train.plan.choose import auto_dtype
from hivetune.train.worker.model.fast.kernels.build import missing_kernels_reason
from hivetune.train.worker.model.fast.kernels.calls import KERNEL_SUFFIXES
from hivetune.train.worker.model.products import chosen_products, product_seconds

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# A product of a small model's step (512 tokens, width 1024). Smaller ones measure the call, larger ones take longer.
PROBE_ROWS, PROBE_WIDTH, PROBE_ROUNDS = 512, 1024, 5


def settle(run: Path, config: RunConfig, choices: Choices, *, write: bool = True) -> Choices:
    """Return `choices` with device, dtype and threads; missing choices are measured and written before step 0."""
    settled = complete(config.device, config.dtype, with_threads(config, choices))
    if settled != choices and write:
        write_resolved(run, config, settled)
    return settled


def with_threads(config: RunConfig, choices: Choices) -> Choices:
    """Return `choices` with the threads of each worker, where workers share a CPU: a quarter of the cores.

    It does not depend on the number of workers, since the number of threads decides how some products are rounded.
    OMP_NUM_THREADS overrules it.
    """
    if config.workers is None or choices.threads or os.environ.get("OMP_NUM_THREADS"):
        return choices
    return replace(choices, threads=max(1, default_threads() // WORKERS_PER_MACHINE))


def with_changes(config: RunConfig, settled: Choices, changes: Choices) -> Choices:
    """Return the settled choices with a recovery's changes over them (supervise/ladder.py); nothing is written.

    Another device is measured again.
    """
    if changes.device not in (None, settled.device):
        anew = replace(settled, device=changes.device, dtype=None, threads=None)
        settled = complete(config.device, config.dtype, anew)
    return changes.over(settled)


def complete(device: str, dtype: str, choices: Choices) -> Choices:
    """Return `choices` with device, dtype and threads chosen where they are not. `device` and `dtype` are the settings.

    Raises MachineNotFit for a device that is not there, or that computes wrong numbers.
    """
    name = choices.device or (("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    checked = check_device(name)
    if choices.dtype is None:  # a run that begins
        profile = read_profile(read_machine().fingerprint)
        precision = dtype
        if dtype == "auto":  # by the profile's rates, where a probe has measured them; else measure now
            # Near a tie the earlier decision on this machine stands; the probe writes it down.
            place = device_name(checked)
            decided = profile.decided("dtypes", place)
            precision = auto_dtype(profile.rates.get(place) or product_rates(checked), decided)
        choices = replace(choices, dtype=precision)
        if precision in ("float32", "bfloat16") and checked.type == "cpu" and choices.products is None:
            decided = profile.decided("products", f"{name} {precision}")
            choices = replace(choices, products=chosen_products(decided, DTYPES[precision]))
        if checked.type == "cpu" and choices.kernels is None:  # the run must not continue with others silently
            has_kernels = DTYPES[precision] in KERNEL_SUFFIXES
            reason = missing_kernels_reason() if has_kernels else ""
            native = has_kernels and not reason
            choices = replace(choices, kernels="native" if native else "torch", kernels_why=reason or None)
    return replace(choices, device=name, threads=choices.threads or default_threads())


def device_name(device: torch.device) -> str:
    """Return the name that profiles use: cpu, cuda:0."""
    return f"cuda:{device.index or 0}" if device.type == "cuda" else device.type


def start_with(choices: Choices, memory_share: float | None = None) -> tuple[torch.device, torch.dtype]:
    """Return device and precision of settled choices as torch names them; sets torch's number of threads.

    `memory_share`: of a card, as `cap_memory` has it.
    """
    if choices.device is None or choices.dtype is None or choices.threads is None:
        raise ValueError("device, dtype and threads must be settled first")
    torch.set_num_threads(choices.threads)
    device = torch.device(choices.device)
    if device.type == "cuda":
        _hold_card(card_name(int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index))
    if memory_share is not None:
        cap_memory(device, memory_share)
    return device, DTYPES[choices.dtype]


@functools.cache
def _hold_card(card: str) -> int:
    """Hold the card's lease until this process ends. Raises Busy when a server does not give it back."""
    return train_on(card)


def check_device(name: str) -> torch.device:
    """Return the device. Raises MachineNotFit when torch can't use it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        hint = "hivetune doctor says why; device: auto chooses one that torch can use"
        raise MachineNotFit(f"device {name}: {reason}", hint=hint) from None
    return device


def cap_memory(device: torch.device, share: float) -> None:
    """Let allocations beyond `share` of a card fail: a card that also draws the desktop keeps room for it."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device.index)


def default_threads() -> int:
    """Return OMP_NUM_THREADS, else the cores that this process may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    return usable_cores()


def product_rates(device: torch.device) -> dict[str, float]:
    """Return the rate of a small matrix product, in products per second, by precision."""
    shape = (PROBE_ROWS, PROBE_WIDTH, PROBE_WIDTH)
    # The least: a disturbance makes it slower, nothing faster.
    return {
        name: 1 / min(product_seconds(shape, DTYPES[name], device, PROBE_ROUNDS)) for name in ("float32", "bfloat16")
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process held: on the card by torch's allocator, else resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Begin to count the peak again. Without support (only Linux has it), it is the peak of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # proc(5): resets the peak resident set size

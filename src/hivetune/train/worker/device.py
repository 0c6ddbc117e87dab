"""The device, precision and kernels of a run: chosen once by rules, then read from the run's choices."""

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from hivetune.base.kernel import usable_cores
from hivetune.config import RunConfig
from hivetune.errors import MachineNotFit
from hivetune.machine.inventory import WORKERS_PER_MACHINE, Machine, read_machine
from hivetune.process.lease import train_on
from hivetune.run.choices import Choices
from hivetune.train.plan.device import computes_bfloat16
from hivetune.train.worker.model.fast.backend import KERNEL_SUFFIXES
from hivetune.train.worker.model.fast.kernels.build import missing_kernels_reason

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


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

    On another device everything that the device decides is decided anew.
    """
    if changes.device not in (None, settled.device):
        anew = replace(settled, device=changes.device, dtype=None, threads=None, kernels=None, products=None)
        settled = complete(config.device, config.dtype, anew)
    return changes.over(settled)


def complete(device: str, dtype: str, choices: Choices) -> Choices:
    """Return `choices` with device, dtype, kernels, products and threads, by rules alone; what was chosen stays.

    `device` and `dtype` are the settings. Raises MachineNotFit for a device that is not there.
    """
    name = choices.device or (_first_device() if device == "auto" else device)
    checked = check_device(name)
    precision = choices.dtype or (native_dtype(checked) if dtype == "auto" else dtype)
    choices = replace(choices, device=name, dtype=precision, threads=choices.threads or default_threads())
    if checked.type == "cpu" and choices.kernels is None:  # the run must not continue with others silently
        has_kernels = DTYPES[precision] in KERNEL_SUFFIXES
        reason = missing_kernels_reason() if has_kernels else ""
        native = has_kernels and not reason
        choices = replace(choices, kernels="native" if native else "torch", kernels_why=reason or None)
    if checked.type == "cpu" and choices.products is None:
        choices = replace(choices, products=products_for(precision, choices.kernels == "native", read_machine()))
    return choices


def _first_device() -> str:
    """Return the first card that is no part of a processor, else the first card, else the processor."""
    if not torch.cuda.is_available():
        return "cpu"
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    index = next((index for index, card in enumerate(cards) if not card.is_integrated), 0)
    return f"cuda:{index}" if index else "cuda"


def native_dtype(device: torch.device) -> str:
    """Return bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cpu":
        native = computes_bfloat16("cpu", "", read_machine().isa)
    else:
        card = torch.cuda.get_device_properties(device)
        chip = card.gcnArchName.partition(":")[0] if torch.version.hip else f"{card.major}.{card.minor}"
        native = computes_bfloat16("rocm" if torch.version.hip else "cuda", chip)
    return "bfloat16" if native else "float32"


def products_for(dtype: str, has_kernels: bool, machine: Machine) -> Literal["torch", "onednn", "native"]:
    """Return what multiplies large matrices on this processor.

    In bfloat16 our own kernel, which adds the adapter's share on the way, where AVX512-BF16 does the work; AMX is
    oneDNN's. In float32 MKL takes its AVX2 path on other vendors' processors that have AVX-512 (84 GFLOP/s a core for
    [512, 576] x [576, 1632] on a Zen 5), oneDNN does not (175).
    """
    if dtype == "bfloat16" and has_kernels and "avx512_bf16" in machine.isa and "amx_bf16" not in machine.isa:
        return "native"
    if dtype == "float32" and "avx512f" in machine.isa and "Intel" not in machine.cpu:
        return "onednn" if torch.backends.mkldnn.is_available() else "torch"
    return "torch"


def start_with(choices: Choices, memory_share: float | None = None) -> tuple[torch.device, torch.dtype]:
    """Return device and precision of settled choices as torch names them; sets torch's number of threads.

    `memory_share`: of a card, as `cap_memory` has it.
    """
    if choices.device is None or choices.dtype is None or choices.threads is None:
        raise ValueError("device, dtype and threads must be settled first")
    torch.set_num_threads(choices.threads)
    device = torch.device(choices.device)
    if device.type == "cuda":
        _hold_card(f"cuda:{os.environ.get('LOCAL_RANK', 0) if device.index is None else device.index}")
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


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that no program holds now."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else read_machine().available_bytes


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

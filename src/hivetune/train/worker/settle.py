"""The choices of a run, made by rules: device, precision and kernels, then the form of its steps, then the path.

Each choice is a function of the config, the rows and the machine's facts, and is written to config.resolved.yaml, so a
resumed run computes as it began. Nothing is timed. Free memory only decides whether a run starts.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch

from hivetune.base.disk import MANIFEST, sha256_bytes
from hivetune.base.kernel import usable_cores
from hivetune.base.units import size
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import DoesNotFit, MachineNotFit
from hivetune.machine.inventory import WORKERS_PER_MACHINE, Machine, as_torch_sees, read_machine
from hivetune.machine.profile import read_profile
from hivetune.models.architecture import read_architecture
from hivetune.process.lease import train_on
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved
from hivetune.train.plan.choose import Workload, first_that_fits, with_alternatives
from hivetune.train.plan.device import computes_bfloat16, device_of_machine
from hivetune.train.plan.layout import pack_tokens
from hivetune.train.plan.memory import predict_peak, setup_of_run
from hivetune.train.plan.steps import Plan
from hivetune.train.worker import model as engine
from hivetune.train.worker.check import TOKENS, check_documents, verified_choices
from hivetune.train.worker.model.fast.build import DTYPE_FLAGS, missing_kernels_reason
from hivetune.train.worker.model.load import is_known, load_model
from hivetune.train.worker.model.protocol import LoraModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# The first steps of a plan stand for all.
STEPS_LOOKED_AT = 64


def settle(run: Path, config: RunConfig, choices: Choices, model: Path, plan: Plan, snapshot: Snapshot) -> Choices:
    """Return `choices` with the missing ones made, and write them to config.resolved.yaml.

    Raises MachineNotFit for a device that does not exist; DoesNotFit, with settings that would fit, and also if other
    programs use so much memory that the run can't start.
    """
    settled = choices
    # The number of threads decides how some products are rounded, so it does not depend on the number of ranks.
    if config.workers is not None and not choices.threads and not os.environ.get("OMP_NUM_THREADS"):
        settled = replace(choices, threads=max(1, default_threads() // WORKERS_PER_MACHINE))
    settled = complete(config.device, config.dtype, settled)
    if config.workers is not None and settled.pack_tokens is None:
        lengths = [length for _, _, length, _ in snapshot.plan_rows("train")]
        kind = torch.device(settled.device or "cpu").type
        settled = replace(settled, pack_tokens=pack_tokens(sum(lengths), len(lengths), config.batch_size, kind))
    if settled.budget_tokens is None:
        settled = _with_form(config, settled, model, plan, snapshot)
    if settled.agreement is None and settled.path is None:
        settled = _with_path(config, settled, model, plan, snapshot)
    if settled != choices:
        write_resolved(run, config, settled)
    on_card = (settled.device or "cpu") != "cpu"
    free = int(torch.cuda.mem_get_info(settled.device)[0]) if on_card else read_machine().available_bytes
    has_begun = bool(checkpoints.steps(run))  # such a run is not ended by what other programs hold
    if settled.peak_bytes is not None and settled.peak_bytes > free and not has_begun:
        raise DoesNotFit(
            f"the run needs about {size(settled.peak_bytes)} of memory, and {size(free)} are free now",
            hint="end other programs, or choose smaller settings: hivetune plan CONFIG",
        )
    return settled


def _with_form(config: RunConfig, settled: Choices, model: Path, plan: Plan, snapshot: Snapshot) -> Choices:
    """Return `settled` with the first form of the steps that fits: whole, recomputed, recomputed and streamed."""
    device = device_of_machine(as_torch_sees(read_machine(), os.environ), settled.device or "auto")
    setup = setup_of_run(config, read_architecture(model), settled, device.kind)
    if setup.path == "fast" and not is_known(model):
        setup = replace(setup, path="general")
    # The middle one of the first steps is the typical one.
    steps = sorted(plan.steps[:STEPS_LOOKED_AT], key=lambda step: sum(snapshot.length(row) for row in step.rows))
    typical = steps[len(steps) // 2]
    work = Workload(
        lengths=tuple(snapshot.length(row) for row in typical.rows),
        trained=tuple(snapshot.num_trained(row) for row in typical.rows),
        longest=max((snapshot.length(row) for row in set(plan.entry_rows)), default=2),
        rows=plan.num_rows,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    try:
        chosen = first_that_fits(setup, device, work, memory_share=config.memory_share)
    except DoesNotFit as error:
        raise with_alternatives(error, setup, device, work, config.memory_share) from None
    # What a person or a test set in the choices stays.
    form = chosen.to_choices().updated(settled)
    return replace(form, budget_tokens=chosen.budget_tokens, peak_bytes=chosen.peak.bytes)


def _with_path(config: RunConfig, settled: Choices, model: Path, plan: Plan, snapshot: Snapshot) -> Choices:
    """Return `settled` after the fast path was compared with transformers on a few rows, unless it was so before."""
    # A streamed model is not compared: transformers has no room for it.
    if config.method == "qlora" or settled.streamed or not is_known(model):
        return settled
    key = _conditions(model, settled)
    known = read_profile(read_machine().fingerprint).agreements.get(key)
    if known is not None:
        return replace(settled, agreement=known)
    # In a process of its own: what transformers and a float64 model leave in memory would count as the run's.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        changes = pool.submit(_compared, config, settled, model, snapshot.folder, plan.steps[0].rows).result()
    if changes.agreement is not None:
        changes = replace(changes, agreement={**changes.agreement, "key": key})
    return settled.updated(changes)


def _compared(config: RunConfig, settled: Choices, model: Path, snapshot: Path, rows: Sequence[int]) -> Choices:
    """Return the choices under which the model computes what transformers does on some of these rows."""
    plain = config.lora.model_copy(update={"dropout": 0.0, "start": None})

    def load(changes: Choices) -> LoraModel:
        choices = settled.updated(changes)
        device, dtype = apply_choices(choices)
        return load_model(model, plain, method=config.method, dtype=dtype, device=device, choices=choices)

    # transformers computes in the widest precision that has room, or in the run's own.
    setup = setup_of_run(config, read_architecture(model), settled, torch.device(settled.device or "cpu").type)
    limit = read_machine().memory_bytes * config.memory_share
    general = replace(setup, path="general", products=None, kind="cpu")
    fitting = (w for w in ("float64", "float32") if predict_peak(replace(general, dtype=w), TOKENS).bytes <= limit)
    return verified_choices(load, check_documents(open_snapshot(snapshot), rows), next(fitting, setup.dtype))


def _conditions(model: Path, settled: Choices) -> str:
    """Return the hash of what the agreement depends on: the weights, the engine's code, device, precision, kernels."""
    digest = hashlib.sha256()
    for source in sorted(Path(engine.__path__[0]).rglob("*")):
        if source.suffix in (".py", ".cpp", ".h"):
            digest.update(source.read_bytes())
    manifest = model / MANIFEST
    digest.update(sha256_bytes(manifest.read_bytes()).encode() if manifest.is_file() else str(model).encode())
    named = (settled.device, settled.dtype, settled.kernels, settled.products, settled.attention)
    digest.update(repr(named).encode())
    return digest.hexdigest()[:32]


def complete(device: str, dtype: str, choices: Choices) -> Choices:
    """Return `choices` with device, dtype, kernels, products and threads, by rules alone; values that are set are kept.

    `device` and `dtype` are the settings. Raises MachineNotFit for a device that does not exist.
    """
    name = choices.device or (_first_device() if device == "auto" else device)
    checked = check_device(name)
    precision = choices.dtype or (native_dtype(checked) if dtype == "auto" else dtype)
    choices = replace(choices, device=name, dtype=precision, threads=choices.threads or default_threads())
    if choices.kernels is None:  # the run must not continue with others silently
        kernels, reason = _kernels_for(checked, precision)
        choices = replace(choices, kernels=kernels, kernels_why=reason or None)
    if checked.type == "cpu" and choices.products is None:
        choices = replace(choices, products=products_for(precision, choices.kernels == "native", read_machine()))
    return choices


def with_recovery_changes(config: RunConfig, settled: Choices, changes: Choices) -> Choices:
    """Return the settled choices, overridden by a recovery's changes (supervise/ladder.py); nothing is written.

    If the device changes, everything that depends on it is chosen again.
    """
    # A run that leaves its card computes with the processor's precision and kernels, as one that began there. A rank
    # on another card has to round as rank 0 does.
    kinds = {(device or "").partition(":")[0] for device in (changes.device or settled.device, settled.device)}
    if len(kinds) > 1:
        anew = replace(settled, device=changes.device, dtype=None, threads=None, kernels=None, products=None)
        settled = complete(config.device, config.dtype, anew)
    return settled.updated(changes)


def _first_device() -> str:
    """Return the first card that is not part of a processor, else the first card, else the processor."""
    if not torch.cuda.is_available():
        return "cpu"
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    index = next((index for index, card in enumerate(cards) if not card.is_integrated), 0)
    return f"cuda:{index}" if index else "cuda"


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


def native_dtype(device: torch.device) -> str:
    """Return bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cpu":
        native = computes_bfloat16("cpu", "", read_machine().isa)
    else:
        card = torch.cuda.get_device_properties(device)
        chip = card.gcnArchName.partition(":")[0] if torch.version.hip else f"{card.major}.{card.minor}"
        native = computes_bfloat16("rocm" if torch.version.hip else "cuda", chip)
    return "bfloat16" if native else "float32"


def _kernels_for(device: torch.device, precision: str) -> tuple[Literal["native", "compiled", "torch"], str]:
    """Return the implementation of the row-wise operations, and, if it is plain torch, why."""
    if device.type == "cpu":
        reason = missing_kernels_reason() if precision in DTYPE_FLAGS else ""
        return "native" if precision in DTYPE_FLAGS and not reason else "torch", reason
    # torch.compile writes its kernels in Triton's language, and Triton compiles what starts them.
    if importlib.util.find_spec("triton") is None:
        return "torch", "Triton, which comes with torch for cards, is not installed"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return ("compiled", "") if compiler else ("torch", "there is no C compiler: install gcc")


def products_for(dtype: str, has_kernels: bool, machine: Machine) -> Literal["torch", "onednn", "native"]:
    """Return the library that multiplies large matrices on this processor."""
    # Our own kernel adds the adapter's share on the way, where AVX512-BF16 does the work. AMX is oneDNN's.
    if dtype == "bfloat16" and has_kernels and "avx512_bf16" in machine.isa and "amx_bf16" not in machine.isa:
        return "native"
    # MKL takes its AVX2 path on other vendors' processors that have AVX-512 (84 GFLOP/s a core for [512, 576] x
    # [576, 1632] on a Zen 5), oneDNN does not (175).
    if dtype == "float32" and "avx512f" in machine.isa and "Intel" not in machine.cpu:
        return "onednn" if torch.backends.mkldnn.is_available() else "torch"
    return "torch"


def default_threads() -> int:
    """Return OMP_NUM_THREADS, else the cores that this process may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() and int(setting) > 0 else usable_cores()


def apply_choices(choices: Choices, memory_share: float | None = None) -> tuple[torch.device, torch.dtype]:
    """Return device and precision of settled choices as torch's objects; set torch's number of threads.

    `memory_share`: of a card's memory. Allocations beyond it fail, which leaves memory for a desktop on the card.
    """
    if choices.device is None or choices.dtype is None or choices.threads is None:
        raise ValueError("device, dtype and threads must be settled first")
    torch.set_num_threads(choices.threads)
    device = torch.device(choices.device)
    if device.type == "cuda":
        _hold_card(f"cuda:{device.index or 0}")
        if memory_share is not None:
            torch.cuda.set_per_process_memory_fraction(memory_share, device.index)
    return device, DTYPES[choices.dtype]


@functools.cache
def _hold_card(card: str) -> int:
    """Hold the card's lease until this process ends. Raises Busy when a server does not give it back."""
    return train_on(card)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: on a card as torch's allocator counts it, else resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024

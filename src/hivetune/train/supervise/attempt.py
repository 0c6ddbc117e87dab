"""One attempt of the supervisor: the life of one worker, its devices and recovery changes, and how it ended."""

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.journal import read_journal, read_tail
from hivetune.config import RunConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import UsageError
from hivetune.machine.inventory import WORKERS_PER_MACHINE, Machine
from hivetune.process.protocol import Beat, Outcome
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.folder import METRICS, read_resolved, write_resolved
from hivetune.train.plan.steps import Amendment, append_amendment, read_plan
from hivetune.train.supervise.diagnose import Diagnosis
from hivetune.train.supervise.ladder import effects_of


@dataclass(frozen=True)
class Terms:
    """Callbacks of the caller of a run. All but the last two are called about four times a second.

    `on_step` gets the number of finished steps. `ends` returns 0, 1 for an end after a checkpoint, or 2 for an end at
    once. `on_wait` gets the reason for a wait that a person has to end. `on_change` gets each variable set for the
    workers.
    """

    on_step: Callable[[int], None] = lambda done: None
    ends: Callable[[], int] = lambda: 0
    on_wait: Callable[[str], None] = lambda reason: None
    on_change: Callable[[str], None] = lambda words: None


@dataclass(frozen=True)
class Ended:
    """The end of an attempt. `step`: the step in which it died, -1 while loading; `durable`: the newest saved step.

    `diagnosis` is None if the worker finished or stopped as requested. `phase`: its last heartbeat.
    """

    outcome: Outcome
    step: int
    durable: int
    phase: Beat | None = None
    diagnosis: Diagnosis | None = None


def step_of_death(run: Path, pid: int) -> int:
    """Return the step (from 0) in which the worker with this pid died, by the run's metrics; -1 if it began none."""
    step = -1
    for entry in read_journal(run / METRICS):
        if entry["event"] == "started":
            step = entry["step"] if entry.get("pid") == pid else -1
        elif entry["event"] == "step" and step >= 0:
            step = entry["step"]
    return step


def last_step(run: Path) -> int:
    """Return the newest step in the metrics, read from the end of the file; 0 if there is none."""
    steps = (entry["step"] for entry in reversed(read_tail(run / METRICS)) if entry["event"] == "step")
    return next(steps, 0)


def rank_devices(config: RunConfig, machine: Machine, model: Path, device: str, threads: int | None) -> tuple[str, ...]:
    """Return the device of each rank of a run; `device` (cpu, cuda, cuda:N) is that of rank 0.

    With `workers: auto`, and for this machine's part of a cluster, there is a rank on each card, or on a CPU one for
    each `threads` cores (default: a quarter of the cores), as far as memory allows. Raises UsageError for too few
    cards.
    """
    number = config.workers
    if number is None:
        return (device,)
    if device == "cpu":
        each = threads or max(1, machine.cores // WORKERS_PER_MACHINE)
        # The weights, and as much again for activations, torch and the adapter.
        needed_bytes = 2 * sum(path.stat().st_size for path in model.glob("*.safetensors")) + (1 << 30)
        fitting = int(machine.memory_bytes * config.memory_share // needed_bytes)
        most = max(1, min(machine.cores // each, fitting))
        return ("cpu",) * (most if isinstance(number, str) else number)
    own_index = int(device.partition(":")[2] or 0)
    others = [f"cuda:{card.index}" for card in machine.cards if card.index != own_index]
    count = len(others) if isinstance(number, str) else number - 1
    if count > len(others):
        raise UsageError(f"workers is {number}, this machine has {len(machine.cards)} cards", hint="set workers: auto")
    return (device, *others[:count])


def worker_effects(run: Path, rungs: Sequence[str]) -> tuple[dict[str, str | None], Choices]:
    """Return the environment variables (None: removed) and choices of a worker with the recovery changes `rungs`."""
    # The variables that the run was settled with hold, except where a rung changes them.
    settled = read_resolved(run)[1].environment or {}
    changed, choices = effects_of(rungs)
    return {**settled, **changed}, choices


def halve_rank(run: Path) -> str:
    """Halve the LoRA rank and begin again; checkpoints of the old rank are moved away. Return a sentence about it."""
    config, choices = read_resolved(run)
    before, rank = config.lora.r, max(1, config.lora.r // 2)
    # The scale alpha / r stays.
    lora = config.lora.model_copy(update={"r": rank, "alpha": config.lora.alpha * rank / before})
    write_resolved(run, config.model_copy(update={"lora": lora}), choices)
    checkpoints.distrust_after(run, 0)
    return f"rank {before} -> {rank}, from step 0"


def skip_half_of_remaining_rows(run: Path, snapshot: Path) -> str:
    """Remove every second untrained row from the plan, evenly over agents and categories. Return a sentence on it."""
    plan, data = read_plan(run), open_snapshot(snapshot)
    steps = plan.steps
    step = checkpoints.newest_good(run).step
    trained = {row for i in range(step) for row in steps[i].rows}
    coming = sorted({row for i in range(step, len(steps)) for row in steps[i].rows} - trained)
    counts: collections.Counter[tuple[str | None, str | None]] = collections.Counter()
    left_out = []
    for row in coming:
        info = data.info(row)
        counts[info.agent, info.category] += 1
        if counts[info.agent, info.category] % 2 == 0:
            left_out.append(row)
    reason = "sample: every second row is left out, as allow permits"
    # It ends with the plan's last step, so the rows count as not reached, not as quarantined.
    append_amendment(run, Amendment(step, tuple(left_out), reason, len(steps)))
    return f"{len(left_out)} of {len(coming)} coming rows left out from step {step}"

"""The processes that compute packs beside a run's worker on this machine: started with it, watched, ended with it.

None of them holds anything that a run could lose, so the death of one is no failure of the run: the others compute its
packs, and it is started again. A recovery that helps one card and leaves its arithmetic alone is tried on that card.
The devices of a cluster are not watched from here (train/worker/exchange/cluster.py).
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import sha256_bytes
from hivetune.base.journal import Journal
from hivetune.base.private import temporary_folder
from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.machine.inventory import Machine, cpu_workers
from hivetune.machine.telemetry import process_tree
from hivetune.process.cluster import cluster_of
from hivetune.process.parent import Child, Limits, start_child
from hivetune.process.protocol import ComputePacks, Meeting, Outcome
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.run.folder import WORKERS, read_resolved
from hivetune.train.supervise.diagnose import REFUSALS, Diagnosis, diagnose, evidence_of
from hivetune.train.supervise.ladder import EVERY_LAYER, RUNGS, effects_of

# Ends without a finished pack between them, after which a worker is not started again.
MAX_ENDS = 3


def devices_beside(run: Path, model: Path, config: RunConfig, machine: Machine, device: str) -> tuple[str, ...]:
    """Return the device of each worker beside the run's own, which has `device` (cpu, cuda, cuda:N); none of them for a
    cluster, which has devices of its own.

    Raises UsageError when there are fewer cards than workers.
    """
    number = config.workers
    if number is None or cluster_of(config) is not None:
        return ()
    if device == "cpu":
        most = cpu_workers(machine.cores, read_resolved(run)[1].threads)
        most = min(most, int(machine.memory_bytes * config.memory_share // _memory_of_worker(model)))
        return ("cpu",) * (max(1, most) - 1 if isinstance(number, str) else number - 1)
    own_index = int(device.partition(":")[2] or 0)
    others = [f"cuda:{index}" for index in range(len(machine.cards)) if index != own_index]
    count = len(others) if isinstance(number, str) else number - 1
    if count > len(others):
        raise UsageError(
            f"workers: {number}, but this machine has {len(machine.cards)} cards", hint="set workers: auto"
        )
    return tuple(others[:count])


def _memory_of_worker(model: Path) -> int:
    """Return about the memory of one worker: the weights, and as much again for activations, torch and the adapter."""
    return 2 * sum(path.stat().st_size for path in model.glob("*.safetensors")) + (1 << 30)


@dataclass
class _Worker:
    """One device and its history. `ends`: deaths of its workers since the last finished pack."""

    number: int
    device: str
    child: Child | None = None
    ends: int = 0
    again_at: float = 0.0
    given_up: bool = False
    rungs: tuple[str, ...] = ()
    changes: Choices = NO_CHOICES


class Workers:
    """The workers on `devices` around the life of one worker of the run. Use as a context, and call `tend` often.

    `environment`: of the run's own worker. `module` replaces the worker's own module; `limits` makes the limits of one
    start. `meeting` is where the workers meet the run's own, None without any.
    """

    def __init__(
        self,
        run: Path,
        model: Path,
        devices: Sequence[str],
        events: Journal,
        *,
        environment: Mapping[str, str | None],
        limits: Callable[[], Limits],
        module: str | None = None,
    ):
        self._run, self._model, self._events = run, model, events
        self._environment, self._limits, self._module = environment, limits, module
        self._workers = [_Worker(number, device) for number, device in enumerate(devices, 1)]
        self.meeting = Meeting(str(_meeting_of(run)), secrets.token_hex(32)) if devices else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if worker.child is not None:
                worker.child.kill()
                worker.child.outcome()
        if self.meeting is not None:
            Path(self.meeting.address).unlink(missing_ok=True)

    def tend(self) -> None:
        """Look at each worker once. One that ended is explained and started again after a pause."""
        for worker in self._workers:
            if worker.child is None:
                if not worker.given_up and time.monotonic() >= worker.again_at:
                    self._start(worker)
                continue
            outcome = _end_of(worker.child)
            if worker.child.worked:
                worker.ends = 0
            if outcome is not None:
                self._ended(worker, outcome)

    def sample(self) -> list[dict[str, object]]:
        """Return memory and processor time of each worker that lives, for the run's telemetry."""
        return [
            {"worker": worker.number, "device": worker.device, **process_tree(worker.child.process.pid)}
            for worker in self._workers
            if worker.child is not None
        ]

    def _start(self, worker: _Worker) -> None:
        assert self.meeting is not None
        changed, choices = effects_of(worker.rungs)
        worker.child = start_child(
            ComputePacks(self._model, worker.number, self.meeting, worker.device, worker.changes.over(choices)),
            self._run / WORKERS / str(worker.number),
            module=self._module,
            limits=self._limits(),
            environment={**self._environment, **changed},
        )
        pid, rungs = worker.child.process.pid, list(worker.rungs)
        self._events.append("worker_started", worker=worker.number, pid=pid, device=worker.device, rungs=rungs)

    def _ended(self, worker: _Worker, outcome: Outcome) -> None:
        worker.child = None
        worker.ends += 1
        # What a worker lacks that refuses does not come by itself.
        refused = outcome.error is not None and f"exit:{outcome.error.exit_code}" in REFUSALS
        diagnosis = None if outcome.status == "done" else diagnose(evidence_of(outcome))
        if outcome.error is not None and refused:
            reason = outcome.error.message
        else:
            reason = "the run's process closed the connection" if diagnosis is None else diagnosis.words
        worker.given_up = refused or worker.ends >= MAX_ENDS
        if diagnosis is not None and not refused:
            self._climb(worker, diagnosis)
        # At once the first time; then a card that is reset, or a machine that is full, gets a moment.
        at_once = worker.ends == 1 and outcome.status != "done"
        worker.again_at = time.monotonic() + (0.0 if at_once else 2.0**worker.ends)
        self._events.append(
            "worker_ended",
            worker=worker.number,
            device=worker.device,
            status=outcome.status,
            signal=outcome.signal,
            seconds=round(outcome.seconds, 3),
            words=reason,
            given_up=worker.given_up,
        )

    def _climb(self, worker: _Worker, diagnosis: Diagnosis) -> None:
        """Choose the next rung for this device alone, among those that leave its arithmetic as it is."""
        fault = diagnosis.fault
        if fault.domain == "memory" or fault.id == "device-out-of-memory":
            worker.changes = Choices(recompute=EVERY_LAYER)  # the arithmetic stays the same
        exact = (name for name in fault.rungs if name in RUNGS and RUNGS[name].exact and name not in worker.rungs)
        if worker.ends > 1 and (rung := next(exact, None)) is not None:
            worker.rungs = (*worker.rungs, rung)


def _end_of(child: Child) -> Outcome | None:
    """Return how a worker ended, None while it lives. A worker that hangs is ended."""
    child.wait_beats(0)
    if child.ended:
        child.kill()  # what it may have left running in its session
        return child.outcome()
    return child.end_hung() if child.hung else None


def _meeting_of(run: Path) -> Path:
    """Return an empty file for the store of `torch.distributed`.

    Its name is the same for each attempt of a run, so that the next attempt removes what a killed supervisor left.
    """
    path = temporary_folder("hivetune") / sha256_bytes(str(run.resolve()).encode())[:16]
    path.unlink(missing_ok=True)
    path.touch(0o600)
    return path

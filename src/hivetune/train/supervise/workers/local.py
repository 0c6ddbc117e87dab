"""Workers on this machine's own devices: which devices, and each as a child of this process."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hivetune.base.disk import sha256_bytes
from hivetune.base.private import temporary_folder
from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.machine.inventory import Machine, cpu_workers
from hivetune.machine.telemetry import process_tree
from hivetune.process.cluster import cluster_of
from hivetune.process.limits import Limits
from hivetune.process.parent import Child, start_child
from hivetune.process.protocol import ComputePacks, Meeting, Outcome
from hivetune.run.choices import Choices, read_resolved
from hivetune.run.folder import WORKERS


def devices_beside(run: Path, model: Path, config: RunConfig, machine: Machine, device: str) -> tuple[str, ...]:
    """The device of each worker beside the run's own, which has `device` (cpu, cuda, cuda:N); none of them for a
    cluster, which has devices of its own.

    Raises UsageError when there are fewer cards than workers.
    """
    number = config.workers
    if number is None or config.learn.stage == 2 or cluster_of(config) is not None:
        return ()
    if device == "cpu":
        most = cpu_workers(machine.cores, read_resolved(run)[1].threads)
        most = min(most, int(machine.memory_bytes * config.supervise.memory_share // _taken(model)))
        return ("cpu",) * (max(1, most) - 1 if isinstance(number, str) else number - 1)
    own = int(device.partition(":")[2] or 0)
    others = [f"cuda:{index}" for index in range(len(machine.cards)) if index != own]
    wanted = len(others) if isinstance(number, str) else number - 1
    if wanted > len(others):
        raise UsageError(
            f"workers: {number}, but this machine has {len(machine.cards)} cards", hint="set workers: auto"
        )
    return tuple(others[:wanted])


def _taken(model: Path) -> int:
    """Memory of one worker, roughly: the weights, and as much again for activations, torch and the adapter."""
    return 2 * sum(path.stat().st_size for path in model.glob("*.safetensors")) + (1 << 30)


class LocalPlaces:
    """`WorkerPlaces` on `devices` of this machine; the meeting is a socket that no other machine sees.

    `environment`: of the run's own worker. `module` replaces the engine's own, as for that one; `limits` makes those of
    one start.
    """

    def __init__(
        self,
        run: Path,
        model: Path,
        devices: Sequence[str],
        *,
        environment: Mapping[str, str | None],
        limits: Callable[[], Limits],
        module: str | None = None,
    ):
        self._run, self._model, self._limits, self._module = run, model, limits, module
        self._environment = environment
        self.devices = tuple(devices)
        self.meeting = Meeting(str(_socket_of(run)), secrets.token_hex(32)) if devices else None

    @property
    def count(self) -> int:
        return len(self.devices)

    def look(self) -> tuple[str, ...]:
        return ()

    def start(self, number: int, changes: Choices, environment: Mapping[str, str | None]) -> "LocalWorker":
        assert self.meeting is not None
        device = self.devices[number - 1]
        child = start_child(
            ComputePacks(self._model, number, self.meeting, device, changes),
            self._run / WORKERS / str(number),
            module=self._module,
            limits=self._limits(),
            environment={**self._environment, **environment},
        )
        return LocalWorker(child, device)

    def close(self) -> None:
        if self.meeting is not None:
            Path(self.meeting.address).unlink(missing_ok=True)


def _socket_of(run: Path) -> Path:
    """A name that no process has bound. It is the same for each attempt, so that what a killed supervisor left is
    removed by the next one."""
    path = temporary_folder("hivetune") / sha256_bytes(str(run.resolve()).encode())[:16]
    path.unlink(missing_ok=True)
    return path


class LocalWorker:
    """`BesideWorker` as a child."""

    def __init__(self, child: Child, device: str):
        self._child, self.device, self.host = child, device, ""

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def worked(self) -> bool:
        return self._child.worked

    def look(self) -> Outcome | None:
        self._child.wait_beats(0)
        if self._child.ended:
            self._child.kill()  # what it may have left running in its session
            return self._child.outcome()
        return self._child.end_hung() if self._child.hung else None

    def stand_still(self, still: bool) -> None:
        if still != self._child.still and not self._child.ended:
            self._child.stand_still(still)

    def end(self) -> None:
        self._child.kill()
        self._child.outcome()

    def taken(self) -> Mapping[str, object]:
        return process_tree(self._child.process.pid)

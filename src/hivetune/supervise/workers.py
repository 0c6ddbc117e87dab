"""The processes that compute packs beside a run's worker: started with it, watched, started again, ended with it.

None of them holds anything that a run could lose, so the death of one is no failure of the run: its packs go to the
others, and it comes back when it can. What helps one card and leaves its arithmetic alone is tried on that card.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.journal import Journal
from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.machine.inventory import CORES_A_WORKER, Machine
from hivetune.machine.telemetry import process_tree
from hivetune.process.limits import Limits
from hivetune.process.parent import Child, start_child
from hivetune.process.protocol import ComputePacks, Meeting, Outcome
from hivetune.run.choices import NO_CHOICES, Choices, read_resolved
from hivetune.run.folder import WORKERS
from hivetune.supervise.diagnose import REFUSALS, Diagnosis, diagnose, evidence_of
from hivetune.supervise.ladder import RUNGS, effects_of

# Ends without a finished pack between them, after which a worker is not started again.
MOST_ENDS = 3
# Layers recomputed where a card's memory is too small; the arithmetic stays the same.
ALL_LAYERS = 10_000


def devices_beside(run: Path, model: Path, config: RunConfig, machine: Machine, device: str) -> tuple[str, ...]:
    """The device of each worker beside the run's own, which has `device` (cpu, cuda, cuda:N).

    Raises UsageError when there are fewer cards than workers.
    """
    number = config.workers
    if number is None or config.learn.stage == 2:
        return ()
    if device == "cpu":
        threads = read_resolved(run)[1].threads or max(1, machine.cores // CORES_A_WORKER)
        most = min(machine.cores // threads, int(machine.memory_bytes * config.supervise.memory_share // _taken(model)))
        return ("cpu",) * (max(1, most) - 1 if number == "auto" else number - 1)
    own = int(device.partition(":")[2] or 0)
    others = [f"cuda:{index}" for index in range(len(machine.cards)) if index != own]
    wanted = len(others) if number == "auto" else number - 1
    if wanted > len(others):
        raise UsageError(
            f"workers: {number}, but this machine has {len(machine.cards)} cards", hint="set workers: auto"
        )
    return tuple(others[:wanted])


def _taken(model: Path) -> int:
    """Memory of one worker, roughly: the weights, and as much again for activations, torch and the adapter."""
    return 2 * sum(path.stat().st_size for path in model.glob("*.safetensors")) + (1 << 30)


@dataclass
class _Place:
    """One worker's device and what happened there. `ends`: since the last finished pack."""

    number: int
    device: str
    child: Child | None = None
    ends: int = 0
    again_at: float = 0.0
    given_up: bool = False
    rungs: tuple[str, ...] = ()
    changes: Choices = NO_CHOICES


class Workers:
    """Use as a context around the life of one worker of the run; `tend` often. `meeting`: None without any.

    `module` replaces the engine's own, as for the run's worker; `limits` makes those of one start.
    """

    def __init__(
        self,
        run: Path,
        model: Path,
        devices: Sequence[str],
        *,
        events: Journal,
        environment: dict[str, str | None],
        limits: Callable[[], Limits],
        module: str | None = None,
    ):
        self._run, self._model, self._events, self._module = run, model, events, module
        self._environment, self._limits = environment, limits
        self._places = [_Place(number, device) for number, device in enumerate(devices, 1)]
        # Not below the run: the name of a socket has at most 108 bytes.
        self._folder = tempfile.mkdtemp(prefix="hivetune-") if devices else ""
        self.meeting = Meeting(f"{self._folder}/meeting", secrets.token_hex(32)) if devices else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            if place.child is not None:
                place.child.kill()
                place.child.outcome()
        if self._folder:
            shutil.rmtree(self._folder)

    def tend(self, *, still: bool = False) -> None:
        """One look at each: those that ended are explained, and started again after a pause. `still`: stand still."""
        for place in self._places:
            if place.child is None:
                if not place.given_up and not still and time.monotonic() >= place.again_at:
                    self._start(place)
                continue
            child = place.child
            child.wait_beats(0)
            if child.worked:
                place.ends = 0
            if still != child.still and not child.ended:
                child.stand_still(still)
            if child.ended:
                child.kill()  # what it may have left running in its session
                self._ended(place, child.outcome())
            elif child.hung:
                self._ended(place, child.end_hung())

    def sample(self) -> list[dict[str, object]]:
        """Memory and processor time of each that lives, for the run's telemetry."""
        alive = [place for place in self._places if place.child is not None]
        return [
            {"worker": place.number, "device": place.device, **process_tree(place.child.process.pid)}
            for place in alive
            if place.child is not None
        ]

    def _start(self, place: _Place) -> None:
        assert self.meeting is not None
        changed, choices = effects_of(place.rungs)
        task = ComputePacks(self._model, place.number, self.meeting, place.device, place.changes.over(choices))
        place.child = start_child(
            task,
            self._run / WORKERS / str(place.number),
            module=self._module,
            limits=self._limits(),
            environment={**self._environment, **changed},
        )
        self._events.append(
            "worker_started",
            worker=place.number,
            pid=place.child.process.pid,
            device=place.device,
            rungs=list(place.rungs),
        )

    def _ended(self, place: _Place, outcome: Outcome) -> None:
        place.child = None
        place.ends += 1
        # What a worker lacks that refuses does not come by itself.
        refused = outcome.error is not None and f"exit:{outcome.error.exit_code}" in REFUSALS
        diagnosis = None if outcome.status == "done" else diagnose(evidence_of(outcome))
        if outcome.error is not None and refused:
            words = outcome.error.message
        else:
            words = "the run's process closed the connection" if diagnosis is None else diagnosis.words
        place.given_up = refused or place.ends >= MOST_ENDS
        if diagnosis is not None and not refused:
            self._climb(place, diagnosis)
        # At once the first time; then a card that is reset, or a machine that is full, gets a moment.
        at_once = place.ends == 1 and outcome.status != "done"
        place.again_at = time.monotonic() + (0.0 if at_once else 2.0**place.ends)
        self._events.append(
            "worker_ended",
            worker=place.number,
            status=outcome.status,
            signal=outcome.signal,
            seconds=round(outcome.seconds, 3),
            words=words,
            given_up=place.given_up,
        )

    def _climb(self, place: _Place, diagnosis: Diagnosis) -> None:
        """The next rung for this device alone: only such as leave its arithmetic as it is."""
        fault = diagnosis.fault
        if fault.domain == "memory" or fault.id == "device-out-of-memory":
            place.changes = Choices(recompute=ALL_LAYERS)
        exact = (name for name in fault.rungs if name in RUNGS and RUNGS[name].exact and name not in place.rungs)
        if place.ends > 1 and (rung := next(exact, None)) is not None:
            place.rungs = (*place.rungs, rung)

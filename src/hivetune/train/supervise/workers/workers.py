"""The processes that compute packs beside a run's worker: started with it, watched, started again, ended with it.

None of them holds anything that a run could lose, so the death of one is no failure of the run: its packs go to the
others, and it comes back when it can. What helps one card and leaves its arithmetic alone is tried on that card.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hivetune.base.journal import Journal
from hivetune.process.protocol import Meeting, Outcome
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.supervise.diagnose import REFUSALS, Diagnosis, diagnose, evidence_of
from hivetune.train.supervise.ladder import RUNGS, effects_of

# Ends without a finished pack between them, after which a worker is not started again.
MOST_ENDS = 3
# Layers recomputed where a card's memory is too small; the arithmetic stays the same.
ALL_LAYERS = 10_000


class BesideWorker(Protocol):
    """One worker that was started, wherever it is. `pid` is 0 and `host` empty while that is not known yet."""

    @property
    def pid(self) -> int: ...

    @property
    def host(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def worked(self) -> bool:
        """Whether it has finished a pack."""

    def look(self) -> Outcome | None:
        """How it ended, once; None while it lives. One that hangs is ended."""

    def stand_still(self, still: bool) -> None: ...

    def end(self) -> None:
        """At once; nobody asks how."""

    def taken(self) -> Mapping[str, object]:
        """Its memory and processor time."""


class WorkerPlaces(Protocol):
    """Where workers can be started. `count` of them, which may grow; `meeting`: None where there is no place."""

    @property
    def meeting(self) -> Meeting | None: ...

    @property
    def count(self) -> int: ...

    def look(self) -> tuple[str, ...]:
        """What there is to tell about the places themselves."""

    def start(self, number: int, changes: Choices, environment: Mapping[str, str | None]) -> BesideWorker:
        """Worker `number`, from 1. `environment`, `changes`: of a recovery on its device."""

    def close(self) -> None: ...


@dataclass
class _Place:
    """One worker and what happened there. `told`: its start was journaled; `ends`: since the last finished pack."""

    number: int
    worker: BesideWorker | None = None
    told: bool = False
    ends: int = 0
    again_at: float = 0.0
    given_up: bool = False
    rungs: tuple[str, ...] = ()
    changes: Choices = NO_CHOICES


class Workers:
    """Use as a context around the life of one worker of the run; `tend` often. `meeting`: None without any."""

    def __init__(self, places: WorkerPlaces, events: Journal):
        self._where, self._events = places, events
        self._places: list[_Place] = []
        self.meeting = places.meeting

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            if place.worker is not None:
                place.worker.end()
        self._where.close()

    def tend(self, *, still: bool = False) -> None:
        """One look at each: those that ended are explained, and started again after a pause. `still`: stand still."""
        for text in self._where.look():
            self._events.append("warning", text=text)
        while len(self._places) < self._where.count:
            self._places.append(_Place(len(self._places) + 1))
        for place in self._places:
            if place.worker is None:
                if not place.given_up and not still and time.monotonic() >= place.again_at:
                    self._start(place)
                continue
            outcome = place.worker.look()
            self._tell_start(place, place.worker)
            if place.worker.worked:
                place.ends = 0
            if outcome is not None:
                self._ended(place, place.worker, outcome)
            else:
                place.worker.stand_still(still)

    def sample(self) -> list[dict[str, object]]:
        """Memory and processor time of each that lives, for the run's telemetry."""
        return [
            {"worker": place.number, **_where(place.worker), **place.worker.taken()}
            for place in self._places
            if place.worker is not None
        ]

    def _start(self, place: _Place) -> None:
        changed, choices = effects_of(place.rungs)
        place.worker = self._where.start(place.number, place.changes.over(choices), changed)
        place.told = False
        self._tell_start(place, place.worker)

    def _tell_start(self, place: _Place, worker: BesideWorker) -> None:
        if place.told or not worker.pid:
            return
        place.told = True
        self._events.append(
            "worker_started", worker=place.number, pid=worker.pid, **_where(worker), rungs=list(place.rungs)
        )

    def _ended(self, place: _Place, worker: BesideWorker, outcome: Outcome) -> None:
        place.worker = None
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
            **_where(worker),
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


def _where(worker: BesideWorker) -> dict[str, object]:
    """Of a journal's entry: the device, and the machine where that is another one."""
    return {"device": worker.device, **({"host": worker.host} if worker.host else {})}

"""What an act is given, and how one ends with its window."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from hivetune.base.database import open_database
from hivetune.config import RunConfig
from hivetune.cycle.acts.night import LOOK_EVERY_S
from hivetune.cycle.decide import Allowed, Observed
from hivetune.cycle.ledger import CycleRow, open_cycle
from hivetune.cycle.observe import champion_of
from hivetune.errors import HivetuneError
from hivetune.process.still import STILL_LOOK_S, stands_still
from hivetune.records import Progress, silent
from hivetune.release.registry import Release
from hivetune.train.open import Run, load_run


class SliceEnded(HivetuneError):
    """The window, the budget or a person ended a slice of training; nothing failed."""


@dataclass
class Doing:
    """What an act needs. `allowed` is asked while it goes on; `details` is what the outcome keeps of it."""

    config: RunConfig
    name: str
    observed: Observed
    reason: str
    allowed: Callable[[], Allowed]
    now: float
    progress: Callable[[str], Progress] = lambda label: silent
    details: dict[str, Any] = field(default_factory=dict)

    def cycle(self) -> CycleRow:
        with closing(open_database()) as database:
            found = open_cycle(database, self.name)
        assert found is not None, "decided for an open cycle"
        return found

    def champion(self) -> Release | None:
        with closing(open_database()) as database:
            return champion_of(database, self.name)

    def run(self) -> Run:
        return load_run(self.cycle().run)


def ends_with_window(doing: Doing, label: str) -> Progress:
    """Tells how far it is, ends the work when it is not allowed any more, and holds up what is computed here while the
    children stand still."""
    report = doing.progress(label)
    looked = float("-inf")

    def progress(done: int, total: int | None) -> None:
        nonlocal looked
        report(done, total)
        while True:
            if time.monotonic() - looked >= LOOK_EVERY_S:
                looked = time.monotonic()
                _check_window(doing.allowed())
            if not stands_still():
                return
            time.sleep(STILL_LOOK_S)

    return progress


def _check_window(allowed: Allowed) -> None:
    """Raises SliceEnded also when the next look would come after the window's end."""
    if not allowed.now or (allowed.until is not None and time.time() + LOOK_EVERY_S >= allowed.until):
        raise SliceEnded(f"the window ended first: {allowed.reason}")

"""Exporters beside a run: a process for each tool, started again when it dies, never waited for."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import home
from hivetune.base.private import make_folder, open_plain
from hivetune.errors import UsageError
from hivetune.process.detach import report_command

AGAIN_S = 30.0
# Codes with which an exporter ends for good: all is sent, or a person has to do something first.
_FINAL = (0, UsageError.exit_code)
_Process = subprocess.Popen[bytes]


@dataclass
class _Exporter:
    target: str
    process: _Process | None = None
    ended: bool = False
    next_start: float = 0.0


class Exporters:
    """Call `look` now and then while the run goes on. The processes end by themselves when the run does, and live on
    when this one is killed."""

    def __init__(
        self,
        run: Path,
        targets: Sequence[str],
        *,
        start: Callable[[Path, str], _Process] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._start, self._clock = run, start or start_exporter, clock
        self._exporters = [_Exporter(target) for target in dict.fromkeys(targets)]

    def look(self) -> None:
        """Start what does not run. A start that fails is tried again: no exporter is worth the run."""
        for exporter in self._exporters:
            if exporter.process is not None and (code := exporter.process.poll()) is not None:
                exporter.process, exporter.ended = None, code in _FINAL
            if exporter.process is None and not exporter.ended and self._clock() >= exporter.next_start:
                exporter.next_start = self._clock() + AGAIN_S
                with contextlib.suppress(OSError):  # no memory, no process, a full disk: in AGAIN_S again
                    exporter.process = self._start(self._run, exporter.target)


def start_exporter(run: Path, target: str) -> _Process:
    """In a session of its own, deaf to this terminal; what it says is in `reports/RUN-TARGET.log` of the home.

    Raises OSError.
    """
    folder = home() / "reports"
    make_folder(folder)
    path = folder / f"{run.name}-{target}.log"
    with open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
        return subprocess.Popen(
            report_command(run, target), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

"""The use of this machine by others: a person at its desktop (by logind), and programs (by processor time)."""

import subprocess
from collections import deque
from dataclasses import dataclass

_PROGRAM = "loginctl"
_TIMEOUT_S = 3.0
WINDOW_S, MIN_WINDOW_S = 60.0, 30.0
_PROPERTIES = ("Remote", "Class", "Active", "IdleHint", "IdleSinceHint")


@dataclass(frozen=True)
class CoreUse:
    """The processor seconds of all programs and of our own processes at one moment."""

    time_s: float
    all_s: float
    own_s: float = 0.0


class OtherPrograms:
    """The number of cores that other programs keep busy, averaged over a minute so that a short burst counts little."""

    def __init__(self) -> None:
        self._looks: deque[CoreUse] = deque()

    def cores(self, now: CoreUse) -> float:
        """Return the average; 0 until the first sample is MIN_WINDOW_S old."""
        self._looks.append(now)
        while len(self._looks) > 2 and self._looks[1].time_s <= now.time_s - WINDOW_S:
            self._looks.popleft()
        before = self._looks[0]
        return cores_of_others(before, now) if now.time_s - before.time_s >= MIN_WINDOW_S else 0.0


def cores_of_others(before: CoreUse, after: CoreUse) -> float:
    """Return how many cores other programs kept busy between two moments, on average."""
    seconds = after.time_s - before.time_s
    if seconds <= 0:
        return 0.0
    return max(0.0, (after.all_s - before.all_s) - max(0.0, after.own_s - before.own_s)) / seconds


def person_idle_s(now_s: float, program: str = _PROGRAM) -> float | None:
    """Return the seconds since a person last used keyboard or mouse: infinite without a session, None if unknown.

    `now_s` is the wall clock. logind knows this, since each desktop reports its idle sessions to it. Sessions over the
    network do not count.
    """
    listed = _ask(program, "list-sessions", "--no-legend")
    if listed is None:
        return None
    names = [line.split()[0] for line in listed.splitlines() if line.split()]
    idle_s = float("inf")
    for name in names:
        shown = _ask(program, "show-session", name, *(f"--property={key}" for key in _PROPERTIES))
        session = dict(line.partition("=")[::2] for line in (shown or "").splitlines())
        if (session.get("Remote"), session.get("Class"), session.get("Active")) != ("no", "user", "yes"):
            continue
        since_us = session.get("IdleSinceHint", "")
        is_idle = session.get("IdleHint") == "yes" and since_us.isdigit()
        idle_s = min(idle_s, max(0.0, now_s - int(since_us) / 1e6) if is_idle else 0.0)
    return idle_s


def _ask(program: str, *arguments: str) -> str | None:
    try:
        shown = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return shown.stdout if shown.returncode == 0 else None

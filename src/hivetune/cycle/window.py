"""Whether a cycle may work now, and until when. A window is a part of each day: "22:00-06:00", across midnight too.

All moments are seconds since 1970, shown as local time.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hivetune.errors import UsageError

_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)")
_LOCALTIME = Path("/etc/localtime")


@dataclass(frozen=True)
class Permission:
    """Permission for long work now. `until`: when it must end, None for never. `again`: when it may continue, if not
    now. `reason`: why, in words, also when it may."""

    now: bool = True
    until: float | None = None
    again: float | None = None
    reason: str = "no window is set"


@dataclass(frozen=True)
class Window:
    """A part of each day, in minutes after midnight. An end at or before the start is on the next day."""

    start: int
    end: int


def parse_window(text: str | None) -> Window | None:
    """Read a window. Raises UsageError unless it is HH:MM-HH:MM."""
    if text is None:
        return None
    hours = _HOURS.fullmatch(text.strip())
    if hours:
        first, first_minute, last, last_minute = map(int, hours.groups())
        start, end = 60 * first + first_minute, 60 * last + last_minute
        if end <= 24 * 60 and start != end:
            return Window(start, end)
    raise UsageError(f"cycle.window: {text!r} is not a window", hint='write hours: "22:00-06:00"')


def allowed_now(window: Window | None, now_s: float, zone: tzinfo, *, asked: bool = False) -> Permission:
    """Return whether long work is allowed at `now_s`. `asked`: a person asked for it, so the window does not count."""
    if window is None or asked:
        return Permission(reason="a person asked for it" if asked else "no window is set")
    now = datetime.fromtimestamp(now_s, zone)
    days = [_hours_of_day(window, now, shift) for shift in (-1, 0, 1, 2)]
    end_s = next((end_s for start_s, end_s in days[:2] if start_s <= now_s < end_s), None)
    if end_s is not None:
        return Permission(True, end_s, None, f"open until {_moment(end_s, now_s, zone)}")
    coming_s = next(start_s for start_s, _ in days[1:] if start_s > now_s)
    return Permission(False, None, coming_s, f"the window opens at {_moment(coming_s, now_s, zone)}")


def _hours_of_day(window: Window, now: datetime, shift: int) -> tuple[float, float]:
    """Return start and end on a day. A time that daylight saving skips counts as usual; of a repeated one the first
    does."""
    day = now.replace(hour=0, minute=0, second=0, microsecond=0, fold=0) + timedelta(days=shift)
    ends = day + timedelta(days=window.end <= window.start or window.end == 24 * 60)
    start, end = (
        at.replace(hour=minutes // 60, minute=minutes % 60).timestamp()
        for at, minutes in ((day, window.start), (ends, window.end % (24 * 60)))
    )
    return start, end


def _moment(moment_s: float, now_s: float, zone: tzinfo) -> str:
    """Return a moment for people: the time, with the date if that is not today's."""
    moment = datetime.fromtimestamp(moment_s, zone)
    same_day = moment.date() == datetime.fromtimestamp(now_s, zone).date()
    return moment.strftime("%H:%M" if same_day else "%Y-%m-%d %H:%M")


def local_zone() -> tzinfo:
    """Return this machine's time zone with its clock changes; of a rule in POSIX's form (CET-1CEST) today's offset."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if not name and not _LOCALTIME.exists():
        return UTC
    with contextlib.suppress(ZoneInfoNotFoundError, ValueError, OSError):
        if name and not os.path.isabs(name):
            return ZoneInfo(name)
        with open(name or _LOCALTIME, "rb") as file:
            return ZoneInfo.from_file(file)
    return datetime.now().astimezone().tzinfo or UTC

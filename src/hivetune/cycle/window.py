"""Whether a cycle may work now, and until when. A window is a part of each day: "22:00-06:00", across midnight too.

All moments are seconds since 1970. The system knows its time zone and the changes of its clocks: a time that daylight
saving skips counts as usual, of a repeated one the first does.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from hivetune.errors import UsageError

_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)")
_DAY = 24 * 60


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
    if hours := _HOURS.fullmatch(text.strip()):
        first, first_minute, last, last_minute = map(int, hours.groups())
        start, end = 60 * first + first_minute, 60 * last + last_minute
        if end <= _DAY and start != end:
            return Window(start, end)
    raise UsageError(f"cycle.window: {text!r} is not a window", hint='write hours: "22:00-06:00"')


def allowed_now(window: Window | None, now_s: float, *, asked: bool = False) -> Permission:
    """Return whether long work is allowed at `now_s`. `asked`: a person asked for it, so the window does not count."""
    if window is None or asked:
        return Permission(reason="a person asked for it" if asked else "no window is set")
    midnight = datetime.fromtimestamp(now_s).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    last = window.end if window.end > window.start else window.end + _DAY
    days = [
        (_moment(midnight, day * _DAY + window.start), _moment(midnight, day * _DAY + last)) for day in (-1, 0, 1, 2)
    ]
    for start_s, end_s in days:
        if start_s <= now_s < end_s:
            return Permission(True, end_s, None, f"open until {_shown(end_s, now_s)}")
    coming_s = next(start_s for start_s, _ in days if start_s > now_s)
    return Permission(False, None, coming_s, f"the window opens at {_shown(coming_s, now_s)}")


def _moment(midnight: datetime, minutes: int) -> float:
    """Return a time of the clock so many minutes after midnight; days with 23 or 25 hours are the system's business."""
    days, minute = divmod(minutes, _DAY)
    return (midnight + timedelta(days=days)).replace(hour=minute // 60, minute=minute % 60).timestamp()


def _shown(moment_s: float, now_s: float) -> str:
    """Return a moment for people: the time, with the date if that is not today's."""
    moment = datetime.fromtimestamp(moment_s)
    same_day = moment.date() == datetime.fromtimestamp(now_s).date()
    return moment.strftime("%H:%M" if same_day else "%Y-%m-%d %H:%M")

"""Whether a cycle may work now, and until when. `allowed_now` is pure; `read_clocks` and `local_zone` ask the machine.

A window is a part of each day ("22:00-06:00", across midnight too) or a cron expression: a slot begins when it says,
ends when the next one begins, and opens one cycle. Of several missed slots only the newest counts. All moments are
seconds since 1970, shown as local time.
"""

import contextlib
import math
import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from hivetune.cycle.decide import Permission
from hivetune.errors import UsageError

_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)")
IDLE_S = 300.0  # without a touch before a person counts as away
OTHERS_SHARE = 0.5  # of all cores, kept busy by other programs: from here on the machine is in use
LATER_S = 60.0  # when a machine that is in use is looked at again
_TWICE = timedelta(hours=3)  # more than any clock is set back by at the end of summer
NOTICED_S = 2.0  # a clock that moved by less was only corrected


@dataclass(frozen=True)
class Daily:
    """A part of each day, in minutes after midnight. An end at or before the start is on the next day."""

    start: int
    end: int


@dataclass(frozen=True)
class Cron:
    """A cron expression of five fields."""

    expression: str


Window = Daily | Cron | None


@dataclass(frozen=True)
class Slot:
    """A stretch of time in which a cycle may work: from `start_s` on, before `end_s`."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class InUse:
    """The use of the machine by people and other programs. `idle_s`: since a person's last touch, infinite where nobody
    is there, None if unknown. `cores`: how many of `all_cores` other programs keep busy."""

    idle_s: float | None = None
    cores: float = 0.0
    all_cores: int = 1


@dataclass(frozen=True)
class Clocks:
    """Three clocks at one moment: the wall clock, the time awake (monotonic), and since the boot, sleep included."""

    wall_s: float
    awake_s: float
    boot_s: float


def parse_window(text: str | None) -> Window:
    """Read a window. Raises UsageError unless it is HH:MM-HH:MM or a cron expression."""
    if text is None:
        return None
    hours = _HOURS.fullmatch(text.strip())
    if hours:
        first, first_minute, last, last_minute = map(int, hours.groups())
        start, end = 60 * first + first_minute, 60 * last + last_minute
        if end <= 24 * 60 and start != end:
            return Daily(start, end)
    elif len(text.split()) == 5:
        try:
            next(CronSim(text, datetime(2024, 1, 1)))  # a date that never comes has no slot: 0 0 30 2 *
        except (CronSimError, StopIteration) as error:
            raise _not_a_window(text, f": {error}" if str(error) else ": it never comes") from None
        return Cron(text)
    raise _not_a_window(text)


def _not_a_window(text: str, reason: str = "") -> UsageError:
    return UsageError(
        f"cycle.window: {text!r} is not a window{reason}",
        hint='write hours ("22:00-06:00") or a cron expression of five fields ("0 22 * * 1-5")',
    )


def slots_around(window: Window, now_s: float, zone: tzinfo) -> tuple[Slot | None, Slot]:
    """Return the slot at `now_s`, or None, and the first that begins after it.

    Of a cron expression the slot at `now_s` is the newest one, even if it began long ago.
    """
    now = datetime.fromtimestamp(now_s, zone)
    if not isinstance(window, Cron):
        daily = Daily(0, 24 * 60) if window is None else window
        days = [_slot_of_day(daily, now, shift) for shift in (-1, 0, 1, 2)]
        present = next((slot for slot in days[:2] if slot.start_s <= now_s < slot.end_s), None)
        return present, next(slot for slot in days[1:] if slot.start_s > now_s)
    # From some hours before, since cronsim counts in local time, of which an hour comes twice in autumn.
    first = next(CronSim(window.expression, now - _TWICE, reverse=True))
    starts, moments = [first.timestamp()], CronSim(window.expression, first)
    while len(starts) < 3 or starts[-2] <= now.timestamp():
        moment = next(moments).timestamp()
        if moment > starts[-1]:
            starts.append(moment)
    before, following, end = starts[-3:]
    return Slot(before, following), Slot(following, end)


def _slot_of_day(window: Daily, now: datetime, shift: int) -> Slot:
    """Return the slot of a day. A time that daylight saving skips counts as usual; of a repeated one the first does."""
    day = now.replace(hour=0, minute=0, second=0, microsecond=0, fold=0) + timedelta(days=shift)
    ends = day + timedelta(days=window.end <= window.start or window.end == 24 * 60)
    moments = ((day, window.start), (ends, window.end % (24 * 60)))
    return Slot(*(at.replace(hour=minutes // 60, minute=minutes % 60).timestamp() for at, minutes in moments))


def is_served(slot: Slot, opened_s: float | None, now_s: float) -> bool:
    """Return whether a cycle was opened in the slot or later. `opened_s`: when the newest one was opened.

    A cycle that was opened in the future was opened before the clock was set back. Then the slots up to now count as
    served, so that nothing is done twice, and later ones are free.
    """
    return opened_s is not None and slot.start_s <= min(opened_s, now_s)


def allowed_now(
    window: Window,
    now_s: float,
    zone: tzinfo,
    *,
    opened_s: float | None = None,
    left_hours: float | None = None,
    in_use: InUse | None = None,
    asked: bool = False,
) -> Permission:
    """Return whether long work is allowed at `now_s`, and until when.

    `opened_s`: when the newest cycle was opened, where none is open; a slot of a cron expression opens one.
    `left_hours`: of the cycle's budget. `asked`: a person asked for it, so neither the window nor other users of the
    machine count.
    """
    window = None if asked else window
    slot, coming = slots_around(window, now_s, zone)
    if slot is None or (isinstance(window, Cron) and is_served(slot, opened_s, now_s)):
        return Permission(False, None, coming.start_s, f"the window opens at {_moment(coming.start_s, now_s, zone)}")
    use = None if asked or in_use is None else _used_by(in_use)
    if use is not None:
        return Permission(False, None, min(now_s + LATER_S, slot.end_s), use)
    ends = [slot.end_s] if window is not None else []
    ends += [now_s + 3600 * left_hours] if left_hours is not None else []
    if not ends:
        return Permission(reason="a person asked for it" if asked else "no window is set")
    return Permission(True, min(ends), None, f"open until {_moment(min(ends), now_s, zone)}")


def _used_by(in_use: InUse) -> str | None:
    """Return who else uses the machine, in words, or None. Other programs count only where a person has a desktop and
    may have left for a coffee: a server that is busy day and night would never train."""
    if in_use.idle_s is None or in_use.idle_s == math.inf:
        return None
    if in_use.idle_s < IDLE_S:
        return f"a person uses this machine; training waits until it was left alone for {IDLE_S / 60:.0f} minutes"
    if in_use.cores > OTHERS_SHARE * in_use.all_cores:
        return f"other programs keep at least {OTHERS_SHARE * in_use.all_cores:g} of {in_use.all_cores} cores busy"
    return None


def clock_changes(before: Clocks, after: Clocks) -> list[str]:
    """Describe what happened to the clock between two readings: time asleep, a wall clock that was set."""
    changes = []
    real_s = after.boot_s - before.boot_s
    asleep_s = real_s - (after.awake_s - before.awake_s)
    moved_s = (after.wall_s - before.wall_s) - real_s
    if asleep_s > NOTICED_S:
        changes.append(f"the machine slept for {asleep_s:.0f} s")
    if abs(moved_s) > NOTICED_S:
        changes.append(f"the clock was set {'forward' if moved_s > 0 else 'back'} by {abs(moved_s):.0f} s")
    return changes


def _moment(moment_s: float, now_s: float, zone: tzinfo) -> str:
    """Return a moment for people: the time, with the date if that is not today's."""
    moment = datetime.fromtimestamp(moment_s, zone)
    same_day = moment.date() == datetime.fromtimestamp(now_s, zone).date()
    return moment.strftime("%H:%M" if same_day else "%Y-%m-%d %H:%M")


_LOCALTIME = Path("/etc/localtime")


def read_clocks() -> Clocks:
    """Read the three clocks."""
    awake_s = time.monotonic()
    return Clocks(time.time(), awake_s, time.clock_gettime(time.CLOCK_BOOTTIME))


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

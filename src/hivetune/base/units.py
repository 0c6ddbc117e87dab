"""Seconds, bytes and numbers for people."""


def duration(seconds: float) -> str:
    """Return seconds as 42 s, 3 min or 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def step_time(seconds: float) -> str:
    """Return the time of a step as text, with two digits below 100 s: 0.052 s, 4.8 s, 263 s."""
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:.0f} s"


def size(size_bytes: float) -> str:
    """Return bytes with a unit in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if abs(size_bytes) < 999.5:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} GB" if size_bytes < 999.95 else f"{size_bytes / 1000:.1f} TB"


def count(value: int, singular: str, many: str = "") -> str:
    """Return a count such as "1 row" or "2,000 rows"."""
    return f"{value:,} {singular if value == 1 else many or singular + 's'}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` decimals, or "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"

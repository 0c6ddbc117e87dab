"""Curves as SVG, without scripts and fonts. Lines also differ in their dashes, so a plot is readable without colours.
Colours are classes of the style sheet.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from markupsafe import Markup

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720.0, 220.0, 58.0, 10.0, 10.0, 24.0
MAX_TICKS = 5  # their numbers do not touch at this size
ROOM_SHARE = 0.04  # above and below the curves, so that no line lies on the frame


@dataclass(frozen=True)
class Curve:
    """A curve of a plot. `points`: (x, y) in order of x. `band`: (x, minimum, maximum), drawn below the line. `dots`:
    mark the points too. `label`: text at the last point.
    """

    name: str
    kind: Literal["raw", "smooth", "second"]
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False
    label: str = ""


def plot(
    title: str,
    summary: str,
    curves: Sequence[Curve],
    *,
    number: Callable[[float], str] = "{:.4g}".format,
    from_zero: bool = False,
) -> Markup:
    """Return a plot; empty if no curve has two points. `summary`: its content in a sentence, for people who do not see
    it. `number` formats a value. `from_zero`: the vertical axis begins at 0, as for shares of a whole such as memory.
    """
    drawn = [point for curve in curves for point in curve.points]
    if not any(len(curve.points) > 1 for curve in curves):
        return Markup()
    levels = [y for _, y in drawn] + [y for curve in curves for _, *bounds in curve.band for y in bounds]
    low, high = min(levels), max(levels)
    low = min(0.0, low) if from_zero else low
    room = (high - low) * ROOM_SHARE or abs(high) * ROOM_SHARE or 1.0
    low, high = (low if from_zero else low - room), high + room
    first, last = min(x for x, _ in drawn), max(x for x, _ in drawn)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - first) / ((last - first) or 1.0)
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    parts = []
    for value in round_ticks(low, high):
        y = place(first, value)[1]
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="up" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(number(value))}</text>')
    for value in round_ticks(first, last):
        x = place(value, low)[0]
        anchor = "end" if x > WIDTH - 40 else "middle"  # the last number would leave the picture
        text = f"{round(value):,}" if abs(value) >= 10 or math.isclose(value, round(value)) else f"{value:.1f}"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<text x="0" y="{HEIGHT - 6}">step</text>')
    # Later curves lie above: the smoothed one above what was measured.
    parts += [part for curve in curves if curve.points for part in _drawn(curve, place)]
    label, box = escape(f"{title}: {summary}"), f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    # With these a point of the picture can be read back as step and value.
    ends = f'data-x="{first:g},{last:g}" data-y="{low!r},{high!r}"'
    return Markup(f'<svg class="chart" {box} role="img" aria-label="{label}" {ends}>{"".join(parts)}</svg>')


def round_ticks(low: float, high: float) -> list[float]:
    """Return at most MAX_TICKS + 1 round numbers from `low` to `high`, in steps of 1, 2, 2.5 or 5 times a power
    of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    # 1e-9: a rounding error does not justify a wider step.
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _drawn(curve: Curve, place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    def route(points: Sequence[tuple[float, float]]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)

    if curve.band:
        upper = route([(x, high) for x, _, high in curve.band])
        back = route([(x, low) for x, low, _ in reversed(curve.band)])
        yield f'<polygon class="{curve.kind}" points="{upper} {back}"/>'
    yield f'<polyline class="{curve.kind}" data-name="{escape(curve.name)}" points="{route(curve.points)}"/>'
    for x, y in (place(*point) for point in curve.points if curve.dots):
        yield f'<circle class="{curve.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if curve.label:
        x, y = place(*curve.points[-1])
        text = escape(curve.label)
        yield f'<text class="{curve.kind}" x="{x - 4:.1f}" y="{y - 6:.1f}" text-anchor="end">{text}</text>'

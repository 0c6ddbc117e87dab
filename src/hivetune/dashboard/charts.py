"""Charts as SVG, drawn here: the same with and without JavaScript, readable by whoever can't tell colours apart.

Colours are classes of static/dashboard.css; lines differ in dashes too. Every text is escaped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720.0, 220.0, 58.0, 10.0, 10.0, 24.0
MOST_TICKS = 5
_Kind = Literal["raw", "smooth", "second", "plan"]
_Number = Callable[[float], str]


@dataclass(frozen=True)
class DrawnCurve:
    """`points`: (x, y) by x. `band`: (x, least, greatest), drawn below it. `dots`: the points are marked too. A curve
    of the kind `plan` with one point is a level line across the chart."""

    name: str
    kind: _Kind
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """`said`: what it shows, in a sentence, for whoever does not see it. `number`: how its values are written."""

    title: str
    curves: Sequence[DrawnCurve]
    said: str
    number: _Number = field(default=lambda value: f"{value:.4g}")
    from_zero: bool = False
    x_name: str = "step"


def draw_chart(chart: Chart) -> str:
    """The SVG; nothing where there are not two points to draw."""
    curves = [curve for curve in chart.curves if curve.points]
    drawn = [point for curve in curves if curve.kind != "plan" for point in curve.points]
    if len(drawn) < 2:
        return ""
    levels = [y for curve in curves for _, y in curve.points]
    levels += [value for curve in curves for _, *both in curve.band for value in both]
    low, high = min(levels), max(levels)
    low = min(0.0, low) if chart.from_zero else low
    room = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
    low, high = (low if chart.from_zero else low - room), high + room
    first, last = min(x for x, _ in drawn), max(x for x, _ in drawn)

    def place(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - first) / ((last - first) or 1.0)
        return f"{across:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low):.1f}"

    parts = [
        *_grid(chart, (first, last), (low, high)),
        *(part for c in curves for part in _curve(c, place, first, last)),
    ]
    ends = f'data-x="{first:g},{last:g}" data-y="{low!r},{high!r}" data-x-name="{escape(chart.x_name)}"'
    box = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    label = escape(f"{chart.title}: {chart.said}")
    return f'<svg class="chart" {box} role="img" aria-label="{label}" {ends}>{"".join(parts)}</svg>'


def _grid(chart: Chart, across: tuple[float, float], up: tuple[float, float]) -> list[str]:
    parts = []
    for value in round_ticks(*up):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - up[0]) / (up[1] - up[0])
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="up" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(chart.number(value))}</text>')
    for value in round_ticks(*across):
        x = LEFT + (WIDTH - LEFT - RIGHT) * (value - across[0]) / ((across[1] - across[0]) or 1.0)
        anchor = "end" if x > WIDTH - 40 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{_plain(value)}</text>')
    parts.append(f'<text x="0" y="{HEIGHT - 6}">{escape(chart.x_name)}</text>')
    return parts


def round_ticks(low: float, high: float) -> list[float]:
    """At most MOST_TICKS + 1 round numbers from `low` to `high`: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _curve(curve: DrawnCurve, place: Callable[[float, float], str], first: float, last: float) -> list[str]:
    parts = []
    if curve.band:
        there = [place(x, high) for x, _, high in curve.band]
        back = [place(x, low) for x, low, _ in reversed(curve.band)]
        parts.append(f'<polygon class="{curve.kind}" points="{" ".join([*there, *back])}"/>')
    points = curve.points
    if curve.kind == "plan" and len(points) == 1:
        points = [(first, points[0][1]), (last, points[0][1])]
    line = " ".join(place(x, y) for x, y in points)
    parts.append(f'<polyline class="{curve.kind}" data-name="{escape(curve.name)}" points="{line}"/>')
    if curve.dots:
        for x, y in points:
            across, _, up = place(x, y).partition(",")
            parts.append(f'<circle class="{curve.kind}" cx="{across}" cy="{up}" r="3"/>')
    return parts


def draw_intervals(rows: Sequence[tuple[str, float, float, float]], said: str) -> str:
    """What is drawn, then one line a row: (label, value, low, high) around zero, each on the same scale."""
    if not rows:
        return ""
    widest = max(max(abs(value), abs(low), abs(high)) for _, value, low, high in rows) or 1.0
    height, middle, half = 26 * len(rows) + 50, WIDTH * 0.6, WIDTH * 0.38
    parts = [f'<text x="0" y="16">{escape(said)}</text>']
    parts.append(f'<line class="axis" x1="{middle}" x2="{middle}" y1="26" y2="{height - 20}"/>')
    for number, (label, value, low, high) in enumerate(rows):
        y = 40 + 26 * number
        ends = [f"{middle + half * end / widest:.1f}" for end in (low, high, value)]
        parts.append(f'<text x="0" y="{y + 4}">{escape(label)}</text>')
        parts.append(f'<line class="interval" x1="{ends[0]}" x2="{ends[1]}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="interval" cx="{ends[2]}" cy="{y}" r="4.5"/>')
    for at, text, anchor in ((-1, f"-{widest:.3g}", "middle"), (0, "0", "middle"), (1, f"+{widest:.3g}", "end")):
        parts.append(f'<text x="{middle + half * at:.1f}" y="{height - 4}" text-anchor="{anchor}">{text}</text>')
    box = f'viewBox="0 0 {WIDTH:.0f} {height}"'
    return f'<svg class="intervals" {box} role="img" aria-label="{escape(said)}">{"".join(parts)}</svg>'


def _plain(value: float) -> str:
    return f"{round(value):,}" if abs(value) >= 10 or math.isclose(value, round(value)) else f"{value:.1f}"

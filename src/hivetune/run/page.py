"""What pages are made of: a frame and Jinja templates that escape every text, and charts as SVG.

A page needs nothing else: no script, no font, no network. Rows and answers are other people's. A chart is readable
without seeing colours, since lines differ in dashes too. Colours are classes of the page's style sheet.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Literal

import jinja2

_FRAME = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<style>{{ style | safe }}</style></head><body><main>\n"
    "<h1>{{ heading }}</h1>{{ body | safe }}</main></body></html>\n"
)


def whole_page(title: str, body: str, style: Path, heading: str = "") -> str:
    """Return the page around `body`, HTML that is escaped already. `heading`: the title by default."""
    frame = jinja2.Environment(autoescape=True).from_string(_FRAME)
    return frame.render(title=title, heading=heading or title, body=body, style=style.read_text(encoding="utf-8"))


@cache
def _template(path: Path) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(path.parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["cut"] = lambda text, longest: text if len(text) <= longest else text[:longest] + " ..."
    return environment.get_template(path.name)


def render(path: Path, **values: Any) -> str:
    """Return the text of a template. Its filter `count` separates thousands, `cut` shortens a text to so many
    characters. Raises jinja2.UndefinedError for a value that it needs and is not given."""
    return _template(path).render(**values)


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720.0, 220.0, 58.0, 10.0, 10.0, 24.0
MAX_TICKS = 5  # their numbers do not touch at this size
ROOM_SHARE = 0.04  # above and below the curves, so that no line lies on the frame


@dataclass(frozen=True)
class DrawnCurve:
    """A curve. `points`: (x, y) by x. `band`: (x, minimum, maximum), drawn below it. `dots`: the points are marked too.
    `label`: written at its last point."""

    name: str
    kind: Literal["raw", "smooth", "second"]
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart. `summary`: what it shows, in a sentence, for people who do not see it. `number`: formats its values."""

    title: str
    curves: Sequence[DrawnCurve]
    summary: str
    number: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")
    from_zero: bool = False


def draw_chart(chart: Chart) -> str:
    """Return the SVG for a page, or "" where there are not two points to draw.

    By its `data-` attributes static/dashboard.js reads values below the pointer.
    """
    drawn = [point for curve in chart.curves for point in curve.points]
    if len(drawn) < 2:  # one point has no course
        return ""
    levels = [y for _, y in drawn] + [y for curve in chart.curves for _, *bounds in curve.band for y in bounds]
    low, high = min(levels), max(levels)
    low = min(0.0, low) if chart.from_zero else low  # speed and memory are shares of a whole
    room = (high - low) * ROOM_SHARE or abs(high) * ROOM_SHARE or 1.0
    low, high = (low if chart.from_zero else low - room), high + room
    first, last = min(x for x, _ in drawn), max(x for x, _ in drawn)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - first) / ((last - first) or 1.0)
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    parts = []
    for value in round_ticks(low, high):
        y = to_pixels(first, value)[1]
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="up" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(chart.number(value))}</text>')
    for value in round_ticks(first, last):
        x = to_pixels(value, low)[0]
        anchor = "end" if x > WIDTH - 40 else "middle"  # the last number would leave the picture
        text = f"{round(value):,}" if abs(value) >= 10 or math.isclose(value, round(value)) else f"{value:.1f}"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<text x="0" y="{HEIGHT - 6}">step</text>')
    parts += [part for curve in chart.curves if curve.points for part in _draw_curve(curve, to_pixels)]
    label = escape(f"{chart.title}: {chart.summary}")
    box = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    ends = f'data-x="{first:g},{last:g}" data-y="{low!r},{high!r}" data-x-name="step"'
    return f'<svg class="chart" {box} role="img" aria-label="{label}" {ends}>{"".join(parts)}</svg>'


def round_ticks(low: float, high: float) -> list[float]:
    """Return at most MAX_TICKS + 1 round numbers from `low` to `high`: 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    # 1e-9: a rounding error is no reason for a wider step.
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _draw_curve(curve: DrawnCurve, to_pixels: Callable[[float, float], tuple[float, float]]) -> list[str]:
    def route(points: Sequence[tuple[float, float]]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*to_pixels(x, y)) for x, y in points)

    parts = []
    if curve.band:
        upper = route([(x, high) for x, _, high in curve.band])
        back = route([(x, low) for x, low, _ in reversed(curve.band)])
        parts.append(f'<polygon class="{curve.kind}" points="{upper} {back}"/>')
    name = escape(curve.name)
    parts.append(f'<polyline class="{curve.kind}" data-name="{name}" points="{route(curve.points)}"/>')
    if curve.dots:
        for x, y in (to_pixels(*point) for point in curve.points):
            parts.append(f'<circle class="{curve.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    if curve.label:
        x, y = to_pixels(*curve.points[-1])
        text = escape(curve.label)
        parts.append(f'<text class="{curve.kind}" x="{x - 4:.1f}" y="{y - 6:.1f}" text-anchor="end">{text}</text>')
    return parts


def draw_intervals(rows: Sequence[tuple[str, float, float, float]], summary: str) -> str:
    """Return the SVG of one line a row, (label, value, low, high) around zero, all on the same scale."""
    if not rows:
        return ""
    widest = max(abs(end) for _, *ends in rows for end in ends) or 1.0
    height, middle, half = 26 * len(rows) + 50, WIDTH * 0.6, WIDTH * 0.38
    parts = [f'<text x="0" y="16">{escape(summary)}</text>']
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
    return f'<svg class="intervals" {box} role="img" aria-label="{escape(summary)}">{"".join(parts)}</svg>'

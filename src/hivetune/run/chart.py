"""A loss curve as a small SVG file, readable in any browser: no library, no script."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from hivetune.base.disk import write_atomic
from hivetune.run.folder import LOSS_CURVE
from hivetune.run.status import loss_curve

WIDTH, HEIGHT, MARGIN = 720, 320, 48
COLORS = {"step": "#9db4c8", "validation": "#c2410c"}
_NAMES = {"step": "training step", "validation": "validation"}


def write_loss_chart(run: Path) -> None:
    """`loss.svg` of a run that has made a step."""
    points = loss_curve(run)
    if points:
        write_atomic(run / LOSS_CURVE, loss_chart(points, title=f"{run.name}: nats per token").encode())


def loss_chart(points: list[tuple[int, float, str]], *, title: str) -> str:
    """The SVG text: steps as a line, validations as dots. `points`: (step, nats per token, kind), at least one."""
    frame = _Frame([(step, loss) for step, loss, _ in points], title)
    frame.line([(step, loss) for step, loss, kind in points if kind == "step"], COLORS["step"], 1.5)
    dots = [(step, loss) for step, loss, kind in points if kind == "validation"]
    frame.line(dots, COLORS["validation"], 2)
    frame.dots(dots, COLORS["validation"])
    for number, (kind, color) in enumerate(COLORS.items()):
        x = WIDTH - MARGIN - 220 + 120 * number
        frame.parts.append(f'<rect x="{x}" y="15" width="10" height="10" fill="{color}"/>')
        frame.parts.append(f'<text x="{x + 15}" y="24" fill="#374151">{_NAMES[kind]}</text>')
    return frame.text()


def curves_chart(curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str, best: str) -> str:
    """The SVG text of several curves of (step, nats per token), each with its label at its last point."""
    frame = _Frame([point for points in curves.values() for point in points], title)
    for label, points in curves.items():
        color = COLORS["validation"] if label == best else COLORS["step"]
        frame.line(points, color, 2.5 if label == best else 1.5)
        frame.dots(points, color)
        if points:
            x, y = frame.place(*points[-1])
            name = html.escape(label)
            frame.parts.append(f'<text x="{x - 4:.1f}" y="{y - 6:.1f}" text-anchor="end" fill="{color}">{name}</text>')
    return frame.text()


class _Frame:
    """Axes around points of (step, nats per token), at least one, and what is drawn between them."""

    def __init__(self, points: Sequence[tuple[int, float]], title: str):
        self._last_step = max(step for step, _ in points)
        low, high = min(loss for _, loss in points), max(loss for _, loss in points)
        room = (high - low) * 0.05 or 0.1
        self._low, self._high = low - room, high + room
        box = f"0 0 {WIDTH} {HEIGHT}"
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{MARGIN}" y="24" font-size="15" fill="#111827">{html.escape(title)}</text>',
        ]
        for tick in range(5):
            self._tick(tick)

    def place(self, step: int, loss: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / max(1, self._last_step)
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - self._low) / (self._high - self._low)

    def line(self, points: Sequence[tuple[int, float]], color: str, width: float) -> None:
        route = " ".join("{:.1f},{:.1f}".format(*self.place(step, loss)) for step, loss in points)
        self.parts.append(f'<polyline points="{route}" fill="none" stroke="{color}" stroke-width="{width}"/>')

    def dots(self, points: Sequence[tuple[int, float]], color: str) -> None:
        for x, y in (self.place(step, loss) for step, loss in points):
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')

    def text(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])

    def _tick(self, tick: int) -> None:
        loss = self._low + (self._high - self._low) * tick / 4
        _, y = self.place(0, loss)
        self.parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        self.parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#6b7280">{loss:.2f}</text>')
        step = round(self._last_step * tick / 4)
        x, _ = self.place(step, self._low)
        below = f'y="{HEIGHT - MARGIN + 18}" text-anchor="middle" fill="#6b7280"'
        self.parts.append(f'<text x="{x:.1f}" {below}>{step}</text>')

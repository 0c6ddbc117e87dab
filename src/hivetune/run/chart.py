"""A loss curve as a small SVG file, readable in any browser: no library, no script."""

import html
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
    last_step = max(step for step, _, _ in points)
    low, high = min(loss for _, loss, _ in points), max(loss for _, loss, _ in points)
    room = (high - low) * 0.05 or 0.1
    low, high = low - room, high + room

    def place(step: int, loss: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / max(1, last_step)
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - low) / (high - low)

    box = f"0 0 {WIDTH} {HEIGHT}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="24" font-size="15" fill="#111827">{html.escape(title)}</text>',
    ]
    for tick in range(5):
        loss = low + (high - low) * tick / 4
        _, y = place(0, loss)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#6b7280">{loss:.2f}</text>')
        step = round(last_step * tick / 4)
        x, _ = place(step, low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle" fill="#6b7280">{step}</text>')
    line = " ".join("{:.1f},{:.1f}".format(*place(step, loss)) for step, loss, kind in points if kind == "step")
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLORS["step"]}" stroke-width="1.5"/>')
    dots = [place(step, loss) for step, loss, kind in points if kind == "validation"]
    route = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    parts.append(f'<polyline points="{route}" fill="none" stroke="{COLORS["validation"]}" stroke-width="2"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLORS["validation"]}"/>' for x, y in dots]
    for number, (kind, color) in enumerate(COLORS.items()):
        x = WIDTH - MARGIN - 220 + 120 * number
        parts.append(f'<rect x="{x}" y="15" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 15}" y="24" fill="#374151">{_NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>", ""])

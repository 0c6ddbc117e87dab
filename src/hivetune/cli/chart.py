"""A loss curve as a small SVG file, readable in any browser, and as lines of text: no library, no script."""

import html
from pathlib import Path

from hivetune.base.disk import write_atomic

WIDTH, HEIGHT, MARGIN = 720, 320, 48
COLORS = {"step": "#9db4c8", "validation": "#c2410c"}
_NAMES = {"step": "training step", "validation": "validation"}


def write_loss_chart(path: Path, points: list[tuple[int, float, str]], *, title: str) -> Path:
    """Training steps as a line and validations as dots. `points`: (step, nats per token, kind)."""
    write_atomic(path, loss_chart(points, title=title).encode())
    return path


def loss_chart(points: list[tuple[int, float, str]], *, title: str) -> str:
    """The SVG text. Raises ValueError without points."""
    if not points:
        raise ValueError("a loss curve needs at least one point")
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


TEXT_WIDTH, TEXT_HEIGHT = 60, 10
_MARKS = {"step": "·", "validation": "●"}


def text_chart(points: list[tuple[int, float, str]]) -> list[str]:
    """The curve as TEXT_HEIGHT lines of at most 72 columns, the mean of each column's steps; none without points."""
    if not points:
        return []
    last_step = max(step for step, _, _ in points)
    columns: dict[tuple[str, int], list[float]] = {}
    for step, loss, kind in points:
        columns.setdefault((kind, round((TEXT_WIDTH - 1) * step / max(1, last_step))), []).append(loss)
    means = {place: sum(losses) / len(losses) for place, losses in columns.items()}
    low, high = min(means.values()), max(means.values())
    grid = [[" "] * TEXT_WIDTH for _ in range(TEXT_HEIGHT)]
    for kind, column in sorted(means):  # validations last: they are few
        share = (high - means[kind, column]) / ((high - low) or 1)
        grid[round(share * (TEXT_HEIGHT - 1))][column] = _MARKS[kind]
    label = {0: f"{high:.3f}", TEXT_HEIGHT - 1: f"{low:.3f}"}
    lines = [f"{label.get(row, ''):>9} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    axis = f"{'':9} 0{'step ' + str(last_step):>{TEXT_WIDTH}}"
    return [*lines, axis, f"{'':10} {_MARKS['step']} training  {_MARKS['validation']} validation, nats per token"]

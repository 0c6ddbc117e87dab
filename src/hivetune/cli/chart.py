"""A loss curve as lines of text, for a terminal."""

TEXT_WIDTH, TEXT_HEIGHT = 48, 10
_MARKS = {"step": "·", "validation": "●"}


def text_chart(points: list[tuple[int, float, str]]) -> list[str]:
    """The curve as TEXT_HEIGHT lines of at most 60 columns, the mean of each column's steps; none without points."""
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

"""An evaluation or a comparison as one HTML page; comparison_body.html is its template."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_atomic
from hivetune.judge.verdict import RATIOS, SHARES_OF_ANSWERS, by_part, level_text, metric_name, passed_text, titled
from hivetune.models.prepared import spoken_name
from hivetune.models.sides import BASELINE, SIDES
from hivetune.run.page import Chart, DrawnCurve, draw_chart, render, whole_page

# Files: written aside, then renamed.

EVALUATION_PAGE = "eval.html"


def write_evaluation_page(run: Path, evaluation: Mapping[str, Any]) -> Path:
    """Write `RUN/eval.html` from an eval.json with its verdict."""
    base, tuned = evaluation["base"], evaluation["tuned"]
    model = spoken_name(evaluation["model"])
    tuned = {**tuned, "label": f"{model} tuned in {run.name}"}
    if base["label"] == BASELINE:
        base = {**base, "label": f"{model} untuned"}
    return _write(run / EVALUATION_PAGE, {**evaluation, "base": base, "tuned": tuned})


def write_comparison_page(folder: Path, document: Mapping[str, Any], run: Path | None) -> Path:
    """Write `RUN/compare-HASH.html` where the rows are a run's, else `compare.html` in the comparison's own folder."""
    path = folder / "compare.html" if run is None else run / f"compare-{folder.name[:8]}.html"
    return _write(path, document)


def _write(path: Path, document: Mapping[str, Any]) -> Path:
    write_atomic(path, comparison_page(document).encode("utf-8", "replace"))
    return path


SESSIONS_SHOWN = 10
MAX_ANSWERS = 300  # of 2 kB each: a page of about 1 MB
MAX_LOST = 50
MAX_BARS = 400  # more bars than pixels say nothing
ORIGINS = {"win": "past wins", "own": "your own"}
COSTS = {
    "latency_p50_s": "seconds per answer, p50",
    "latency_p95_s": "seconds per answer, p95",
    "first_token_p50_s": "seconds to the first token, p50",
    "first_token_p95_s": "seconds to the first token, p95",
    "cold_start_s": "cold start, seconds",
    "peak_memory_bytes": "peak memory",
}
DEFAULT_LEVEL = 0.95
_STYLE, _BODY = (Path(__file__).with_name(name) for name in ("page.css", "comparison_body.html"))
_INTERVAL_WIDTH, _BAR_WIDTH = 260, 160
_PLOT_WIDTH, _PLOT_HEIGHT, _PLOT_LEFT = 900, 180, 70


def comparison_page(document: Mapping[str, Any]) -> str:
    """Return the whole page of an eval.json, or of a compare.json, which has metrics and no verdict."""
    base, tuned = _labels(document)
    title = f"{tuned} against {base}"
    verdict = document.get("verdict")
    return whole_page(title, comparison_body(document), _STYLE, f"{verdict}: {title}" if verdict else title)


def comparison_body(document: Mapping[str, Any]) -> str:
    """Return the page below its title, for pages with a frame and page.css of their own."""
    frozen = document["frozen"]
    seconds = [[answer[side].get("seconds") for side in SIDES] for answer in document["answers"]]
    num_answers = len(document["answers"])
    more = f" The first {MAX_ANSWERS} of {num_answers} are shown; the file beside this page has all."
    return render(
        _BODY,
        d={"frozen": frozen, "problems": document["problems"]},
        judged={"reasons": document.get("reasons"), "advice": document.get("advice")},
        labels=_labels(document),
        metrics=[_metric(m) for m in document["metrics"] if m["base"] is not None or m["tuned"] is not None],
        metrics_note="Gain: positive where B is better; bars show it with its interval around zero, each metric on its"
        " own scale."
        + "".join(f" {titled(name)} is not compared: {why}." for name, why in document["not_compared"].items()),
        curve=_curve(document.get("curve") or {}),
        frozen=list(_frozen(frozen)),
        lost=[row for row in frozen if _is_lost(row)][:MAX_LOST],
        times=_bars([tuned - base for base, tuned in seconds if base is not None and tuned is not None]),
        losses=_bars(
            [
                (row["tuned"] - row["base"]) / row["tokens"]
                for row in document["rows"]
                if row["tokens"] and all(isinstance(row[side], int | float) for side in SIDES)
            ]
        ),
        agents=_parts(document, "agent"),
        categories=_parts(document, "category"),
        sessions=_parts(document, "group"),
        sessions_note=f"The {SESSIONS_SHOWN} that gained least.",
        costs=[
            (name, *(value_text(key, document[side].get(key)) for side in SIDES))
            for key, name in COSTS.items()
            if any(document[side].get(key) is not None for side in SIDES)
        ],
        answers=[
            ({0: "lost", 1: "gained"}.get(_rank(answer), ""), answer)
            for answer in sorted(document["answers"], key=_rank)[:MAX_ANSWERS]
        ],
        answers_note="Those that only A answers rightly come first, then those that only B does."
        + (more if num_answers > MAX_ANSWERS else ""),
        interval_width=_INTERVAL_WIDTH,
        bar_width=_BAR_WIDTH,
    )


def _labels(document: Mapping[str, Any]) -> list[str]:
    return [str(document[side].get("label") or side) for side in SIDES]


def _metric(metric: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of a metric's line, and its gain with the interval as a bar around zero."""
    name, interval = metric["name"], metric["interval"]
    shown = (
        ""
        if interval is None
        else " to ".join(value_text(name, end, gain=metric["gain"] is not None) for end in interval)
    )
    return {
        "base": value_text(name, metric["base"]),
        "tuned": value_text(name, metric["tuned"]),
        "gain": value_text(name, metric["gain"], gain=True),
        "name": metric_name(name),
        "interval": f"{shown} ({level_text(metric['level'])})" if shown and metric["level"] != DEFAULT_LEVEL else shown,
        "n": metric["n"],
        "passed": "" if metric["passed"] is None else passed_text(metric),
        "plot": None if interval is None or metric["gain"] is None else _interval_plot(metric),
    }


def _interval_plot(metric: Mapping[str, Any]) -> dict[str, str]:
    gain, (low, high) = metric["gain"], metric["interval"]
    widest = max(abs(low), abs(high), abs(gain)) or 1.0
    middle = _INTERVAL_WIDTH / 2
    places = {"low": low, "high": high, "middle": gain}
    return {
        **{name: f"{middle + (middle - 8) * value / widest:.1f}" for name, value in places.items()},
        "kind": "unclear" if low <= 0 <= high else "better" if low > 0 else "worse",
        "label": f"{metric['name']}: gain {gain:.4g}, {level_text(metric['level'])} {low:.4g} to {high:.4g}",
    }


def _bars(values: Sequence[float]) -> dict[str, Any] | None:
    """Return one bar a row, from the best to the worst, around zero; less is better."""
    differences = sorted(values)
    if len(differences) < 2:
        return None
    last = min(len(differences), MAX_BARS) - 1
    ordered = [differences[bar * (len(differences) - 1) // last] for bar in range(last + 1)]
    largest = max(abs(ordered[0]), abs(ordered[-1])) or 1.0
    step = (_PLOT_WIDTH - _PLOT_LEFT) / len(ordered)
    bars = []
    for number, value in enumerate(ordered):
        tall = abs(value) / largest * (_PLOT_HEIGHT / 2 - 8)
        top = _PLOT_HEIGHT / 2 - (tall if value > 0 else 0)
        kind = "better" if value < 0 else "worse" if value > 0 else "unclear"
        sizes = (_PLOT_LEFT + number * step, top, max(0.5, step - 1), max(tall, 0.5))
        bars.append((kind, *(f"{size:.1f}" for size in sizes)))
    better = sum(value < 0 for value in differences)
    return {
        "bars": bars,
        "largest": f"{largest:.3g}",
        "summary": f"{better} of {len(differences)} rows are better with B",
        "width": _PLOT_WIDTH,
        "height": _PLOT_HEIGHT,
        "left": _PLOT_LEFT,
    }


def _parts(document: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    """Return loss and success of each agent, category or session; none where the rows name no part."""
    lines = by_part(document, part)
    if len(lines) < 2 and (not lines or lines[0][part] is None):
        return []
    if part == "group":
        lines = sorted(lines, key=lambda line: (line["base_loss"] or 0) - (line["tuned_loss"] or 0))[:SESSIONS_SHOWN]
    most = max((line[f"{side}_loss"] or 0 for line in lines for side in SIDES), default=0)
    return [_part(line, part, most) for line in lines]


def _part(line: Mapping[str, Any], part: str, most: float) -> dict[str, Any]:
    losses = [line[f"{side}_loss"] for side in SIDES]
    drawn = most > 0 and any(loss is not None for loss in losses)
    return {
        "name": line[part] or "-",
        "rows": line["rows"],
        "answers": line["answers"],
        "losses": [_number(loss) for loss in losses],
        "widths": [f"{_BAR_WIDTH * (loss or 0) / most:.1f}" for loss in losses] if drawn else [],
        "shares": ["-" if (s := line[f"{side}_success"]) is None else f"{s:.0%}" for side in SIDES],
    }


def _rank(answer: Mapping[str, Any]) -> int:
    ranks = {(True, False): 0, (False, True): 1, (False, False): 2}
    return ranks.get((answer["base"]["success"], answer["tuned"]["success"]), 3)


def value_text(name: str, value: float | None, *, gain: bool = False) -> str:
    """Return a metric in its unit, for people: shares as percent. `gain`: a gain has a sign, and that of a cost is the
    share of the base's that is saved."""
    if value is None:
        return "-"
    sign = "+" if gain and value > 0 else ""
    if name in SHARES_OF_ANSWERS or (gain and name in RATIOS):
        return f"{sign}{100 * value:.1f} %"
    if name in ("peak_memory_bytes", "max_gb"):
        return f"{value / (1e9 if name == 'peak_memory_bytes' else 1):.2f} GB"
    return sign + _number(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _curve(curve: Mapping[str, Any]) -> dict[str, str] | None:
    """Return training loss and validations as a chart, with a sentence that says the same."""
    steps, validations = curve.get("steps") or [], curve.get("validations") or []
    if len(steps) < 2:
        return None
    best = f", validation lowest at step {min(validations, key=lambda each: each[1])[0]}" if validations else ""
    summary = f"training loss from {steps[0][1]:.3g} to {steps[-1][1]:.3g}{best}"
    curves = [DrawnCurve("training", "raw", steps), DrawnCurve("validation", "second", validations, dots=True)]
    return {"chart": draw_chart(Chart("Loss, nats per token", curves, summary)), "summary": summary}


def _frozen(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (kind, asked, right A, right B)."""
    for origin, name in ORIGINS.items():
        asked = [row for row in rows if row["origin"] == origin]
        if asked:
            base, tuned = (sum(row[side]["success"] is True for row in asked) for side in SIDES)
            yield name, len(asked), base, tuned


def _is_lost(row: Mapping[str, Any]) -> bool:
    return row["tuned"]["success"] is False and bool(row["origin"] == "win" or row["base"]["success"])

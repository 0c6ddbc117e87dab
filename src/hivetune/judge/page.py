"""An evaluation as one HTML page; comparison_body.html is its template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_atomic
from hivetune.base.typed import from_plain
from hivetune.judge.verdict import (
    DEFAULT_LEVEL,
    by_agent,
    interval_text,
    level_text,
    metric_name,
    passed_text,
    required_text,
    titled,
    value_text,
)
from hivetune.models.prepared import spoken_name
from hivetune.models.sides import BASELINE, SIDES
from hivetune.records import Metric
from hivetune.run.page import render, whole_page

EVALUATION_PAGE = "eval.html"
MAX_ANSWERS = 300  # of 2 kB each: a page of about 1 MB
MAX_LOST = 50
ORIGINS = {"win": "past wins", "own": "your own"}
_STYLE, _BODY = (Path(__file__).with_name(name) for name in ("page.css", "comparison_body.html"))
_INTERVAL_WIDTH = 260


def write_evaluation_page(run: Path, evaluation: Mapping[str, Any]) -> None:
    """Write `RUN/eval.html` from an eval.json with its verdict."""
    base, model = evaluation["base"], spoken_name(evaluation["model"])
    if base["label"] == BASELINE:
        base = {**base, "label": f"{model} untuned"}
    tuned = {**evaluation["tuned"], "label": f"{model} tuned in {run.name}"}
    page = evaluation_page({**evaluation, "base": base, "tuned": tuned})
    write_atomic(run / EVALUATION_PAGE, page.encode("utf-8", "replace"))


def evaluation_page(document: Mapping[str, Any]) -> str:
    """Return the whole page of an eval.json."""
    base, tuned = _labels(document)
    title = f"{tuned} against {base}"
    return whole_page(title, comparison_body(document), _STYLE, f"{document['verdict']}: {title}")


def comparison_body(document: Mapping[str, Any]) -> str:
    """Return the page below its title, for pages with a frame and page.css of their own."""
    frozen, num_answers = document["frozen"], len(document["answers"])
    not_compared = (f" {titled(name)} is not compared: {why}." for name, why in document["not_compared"].items())
    more = f" The first {MAX_ANSWERS} of {num_answers} are shown; the file beside this page has all."
    asked = {name: [row for row in frozen if row["origin"] == origin] for origin, name in ORIGINS.items()}
    return render(
        _BODY,
        labels=_labels(document),
        reasons=document["reasons"],
        advice=document["advice"],
        problems=document["problems"],
        metrics=[_metric(from_plain(Metric, m)) for m in document["metrics"] if m["tuned"] is not None],
        metrics_note="Gain: positive where B is better; bars show it with its interval around zero, each metric on its"
        " own scale." + "".join(not_compared),
        frozen=[(name, len(rows), *(_right(rows, side) for side in SIDES)) for name, rows in asked.items() if rows],
        lost=[row for row in frozen if _is_lost(row)][:MAX_LOST],
        agents=_agents(document),
        answers=[
            ({0: "lost", 1: "gained"}.get(_rank(answer), ""), answer)
            for answer in sorted(document["answers"], key=_rank)[:MAX_ANSWERS]
        ],
        answers_note="Those that only A answers rightly come first, then those that only B does."
        + (more if num_answers > MAX_ANSWERS else ""),
        interval_width=_INTERVAL_WIDTH,
    )


def _labels(document: Mapping[str, Any]) -> list[str]:
    return [str(document[side].get("label") or side) for side in SIDES]


def metric_cells(metric: Metric) -> tuple[Any, ...]:
    """Return the texts of a metric's line: name, both sides, gain, interval, n, required, passed."""
    name, interval = metric.name, interval_text(metric)
    if interval and metric.level != DEFAULT_LEVEL:
        interval += f" ({level_text(metric.level)})"
    values = (value_text(name, metric.base), value_text(name, metric.tuned), value_text(name, metric.gain, gain=True))
    return (metric_name(name), *values, interval, metric.n, required_text(metric), passed_text(metric))


def _metric(metric: Metric) -> dict[str, Any]:
    """Return the texts of a metric's line, and its gain with the interval as a bar around zero."""
    names = ("name", "base", "tuned", "gain", "interval", "n", "required", "passed")
    cells = dict(zip(names, metric_cells(metric), strict=True))
    if metric.interval is None or metric.gain is None:
        return {**cells, "plot": None}
    low, high = metric.interval
    widest, middle = max(abs(low), abs(high)) or 1.0, _INTERVAL_WIDTH / 2
    ends = {"low": low, "high": high, "middle": metric.gain}
    plot = {name: f"{middle + (middle - 8) * value / widest:.1f}" for name, value in ends.items()}
    plot["kind"] = "unclear" if low <= 0 <= high else "better" if low > 0 else "worse"
    plot["label"] = f"{metric.name}: gain {cells['gain']}, {level_text(metric.level)} {interval_text(metric)}"
    return {**cells, "plot": plot}


def _agents(document: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return loss and success of each agent; none where the rows name no agent."""
    lines = by_agent(document)
    if not any(line["agent"] for line in lines):
        return []
    losses = [[value_text("loss", line[f"{side}_loss"]) for side in SIDES] for line in lines]
    shares = [[value_text("success", line[f"{side}_success"]) for side in SIDES] for line in lines]
    cells = zip(lines, losses, shares, strict=True)
    return [(line["agent"] or "-", line["rows"], *loss, line["answers"], *share) for line, loss, share in cells]


def _rank(answer: Mapping[str, Any]) -> int:
    ranks = {(True, False): 0, (False, True): 1, (False, False): 2}
    return ranks.get((answer["base"]["success"], answer["tuned"]["success"]), 3)


def _right(rows: list[Mapping[str, Any]], side: str) -> int:
    return sum(row[side]["success"] is True for row in rows)


def _is_lost(row: Mapping[str, Any]) -> bool:
    return row["tuned"]["success"] is False and bool(row["origin"] == "win" or row["base"]["success"])

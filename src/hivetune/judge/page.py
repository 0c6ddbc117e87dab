"""An evaluation as one HTML page; comparison_body.html is its template."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from hivetune.base.disk import write_atomic
from hivetune.base.typed import from_plain
from hivetune.judge.verdict import (
    DEFAULT_LEVEL,
    interval_text,
    level_text,
    metric_name,
    passed_text,
    required_text,
    titled,
    value_text,
)
from hivetune.models.prepared import display_name
from hivetune.models.sides import BASELINE, SIDES
from hivetune.records import Metric

EVALUATION_PAGE = "eval.html"
MAX_ANSWERS = 300  # of 2 kB each: a page of about 1 MB
MAX_LOST = 50
GAIN = "A gain is positive where {} is better (of shares in points, of costs in % of the other's)."
REQUIRED = "A requirement must be met by the whole interval; otherwise it is open."
_FOLDER = Path(__file__).parent
# A page in one file needs nothing else: no script, no font, no network.
_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{{ style | safe }}</style></head><body><main>
<h1>{{ verdict }}: {{ title }}</h1>{{ body | safe }}</main></body></html>
"""
_RANKS = {(True, False): 0, (False, True): 1, (False, False): 2}  # by the success of both sides


def write_evaluation_page(run: Path, evaluation: Mapping[str, Any]) -> None:
    """Write `RUN/eval.html` from an eval.json with its verdict."""
    base, model = evaluation["base"], display_name(evaluation["model"])
    if base["label"] == BASELINE:
        base = {**base, "label": f"{model} untuned"}
    tuned = {**evaluation["tuned"], "label": f"{model} tuned in {run.name}"}
    page = evaluation_page({**evaluation, "base": base, "tuned": tuned})
    write_atomic(run / EVALUATION_PAGE, page.encode("utf-8", "replace"))


def evaluation_page(document: Mapping[str, Any]) -> str:
    """Return the HTML page of an eval.json document."""
    title = f"{document['tuned']['label']} against {document['base']['label']}"
    body, style = comparison_body(document), (_FOLDER / "page.css").read_text(encoding="utf-8")
    return _templates().from_string(_FRAME).render(title=title, verdict=document["verdict"], body=body, style=style)


@cache
def _templates() -> jinja2.Environment:
    # Rows and answers are other people's: every text is escaped.
    loader, strict = jinja2.FileSystemLoader(_FOLDER), jinja2.StrictUndefined
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=strict)
    made.filters["cut"] = lambda text, longest: text if len(text) <= longest else text[:longest] + " ..."
    return made


def comparison_body(document: Mapping[str, Any]) -> str:
    """Return the content of the page without title and frame, for a page that has its own frame and page.css."""
    num_answers = len(document["answers"])
    not_compared = (f" {titled(name)} is not compared: {why}." for name, why in document["not_compared"].items())
    more = f" The first {MAX_ANSWERS} of {num_answers} are shown; the file beside this page has all."
    # Of the user's own questions, only what the base answers rightly can be lost.
    kept = (row for row in document["frozen"] if row["origin"] == "win" or row["base"]["success"])
    lost = [("lost, frozen question", row) for row in kept if row["tuned"]["success"] is False][:MAX_LOST]
    answers = sorted(document["answers"], key=_rank)[:MAX_ANSWERS]
    agents = agent_cells(document)
    return (
        _templates()
        .get_template("comparison_body.html")
        .render(
            labels=[document[side]["label"] for side in SIDES],
            reasons=document["reasons"],
            problems=document["problems"],
            metrics=[metric_cells(from_plain(Metric, m)) for m in document["metrics"] if m["tuned"] is not None],
            metrics_note=f"{GAIN.format('B')} {REQUIRED}{''.join(not_compared)}",
            agents=[] if {agent[0] for agent in agents} == {"-"} else agents,
            answers=[*lost, *(({0: "lost", 1: "gained"}.get(_rank(answer), ""), answer) for answer in answers)],
            answers_note="Those that only A answers rightly come first, then those that only B does."
            + (more if num_answers > MAX_ANSWERS else ""),
        )
    )


def metric_cells(metric: Metric) -> tuple[Any, ...]:
    """Return the cells of a metric's row: name, values of both sides, gain, interval, n, required, passed."""
    name, interval = metric.name, interval_text(metric)
    if interval and metric.level != DEFAULT_LEVEL:
        interval += f" ({level_text(metric.level)})"
    values = (value_text(name, metric.base), value_text(name, metric.tuned), value_text(name, metric.gain, gain=True))
    return (metric_name(name), *values, interval, metric.n, required_text(metric), passed_text(metric))


def agent_cells(document: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the cells of each agent's line: name, rows, loss of both sides, checked answers, success of both sides."""
    lines = []
    for name in sorted({row["agent"] or "-" for key in ("rows", "answers") for row in document[key]}):
        rows, answers = ([row for row in document[key] if (row["agent"] or "-") == name] for key in ("rows", "answers"))
        checked = [answer for answer in answers if None not in [answer[side]["success"] for side in SIDES]]
        tokens = sum(row["tokens"] or 0 for row in rows)
        losses, shares = [], []
        for side in SIDES:
            usable = tokens > 0 and all(isinstance(row[side], float) for row in rows)
            loss = math.fsum(row[side] for row in rows) / tokens if usable else None
            losses.append(value_text("loss", loss))
            right = sum(answer[side]["success"] for answer in checked)
            shares.append(value_text("success", right / len(checked) if checked else None))
        lines.append((name, len(rows), *losses, len(checked), *shares))
    return lines


def _rank(answer: Mapping[str, Any]) -> int:
    return _RANKS.get((answer["base"]["success"], answer["tuned"]["success"]), 3)

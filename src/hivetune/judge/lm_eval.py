"""What lm-evaluation-harness measured of one or two models on its tasks, as one document. Pure.

The harness writes `results_*.json` with the figures of each task and `samples_TASK_*.jsonl` with those of each row.
Two models answered the same rows, so their difference has a paired interval wherever a figure is the mean of its rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hivetune.judge.evaluate import SIDES
from hivetune.judge.statistics import Estimate, holm, jackknife, p_value, paired_proportions

_CLOSE = 1e-6  # a mean that was added up in another order


@dataclass(frozen=True)
class TaskFigure:
    """One figure of one task. `rows`: row -> its value, empty where the figure is more than a mean of them."""

    task: str
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool
    rows: Mapping[int, float]


def read_figures_of(results: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[TaskFigure]:
    """`results`: the document of the harness; `samples`: the rows of each task. Raises KeyError, TypeError, ValueError
    for documents of another form."""
    found = []
    for task, figures in results["results"].items():
        better = results.get("higher_is_better", {}).get(task, {})
        for key, value in figures.items():
            name, comma, chosen = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{name}_stderr,{chosen}")
            found.append(
                TaskFigure(
                    task=task,
                    metric=name if chosen == "none" else f"{name} ({chosen})",
                    value=float(value),
                    stderr=float(error) if isinstance(error, int | float) else None,
                    higher_is_better=better.get(name) is not False,
                    rows=_means_to(value, _rows_of(samples.get(task, ()), name, chosen)),
                )
            )
    return found


def _rows_of(samples: Iterable[Mapping[str, Any]], metric: str, chosen: str) -> dict[int, float]:
    return {
        int(sample["doc_id"]): float(sample[metric])
        for sample in samples
        if sample.get("filter", chosen) == chosen and isinstance(sample.get(metric), int | float)
    }


def _means_to(value: float, rows: dict[int, float]) -> dict[int, float]:
    if not rows or not math.isclose(math.fsum(rows.values()) / len(rows), value, rel_tol=_CLOSE, abs_tol=_CLOSE):
        return {}
    return rows


def lm_eval_document(sides: Sequence[tuple[str, Sequence[TaskFigure]]], about: Mapping[str, Any]) -> dict[str, Any]:
    """One or two models, each with its label: with two, differences are second - first."""
    if len(sides) == 1:
        label, figures = sides[0]
        rows = [{**_named(figure), "n": len(figure.rows) or None, "base": _side(figure)} for figure in figures]
        return {"schema": 1, **about, "base": {"label": label}, "tuned": None, "figures": rows}
    others = {(figure.task, figure.metric): figure for figure in sides[1][1]}
    pairs = [(one, others[one.task, one.metric]) for one in sides[0][1] if (one.task, one.metric) in others]
    estimates = [_difference(one, other) for one, other in pairs]
    known = [number for number, estimate in enumerate(estimates) if estimate is not None and estimate.ci95 is not None]
    adjusted = dict(
        zip(known, holm([p_value(e) for e in estimates if e is not None and e.ci95 is not None]), strict=True)
    )
    rows = [
        {
            **_named(one),
            "n": None if estimate is None else len(one.rows),
            "base": _side(one),
            "tuned": _side(other),
            "difference": other.value - one.value,
            "ci95": None if estimate is None or estimate.ci95 is None else list(estimate.ci95),
            "p_holm": adjusted.get(number),
        }
        for number, ((one, other), estimate) in enumerate(zip(pairs, estimates, strict=True))
    ]
    labels = {name: {"label": label} for name, (label, _) in zip(SIDES, sides, strict=True)}
    return {"schema": 1, **about, **labels, "figures": rows}


def _named(figure: TaskFigure) -> dict[str, Any]:
    return {"task": figure.task, "metric": figure.metric, "higher_is_better": figure.higher_is_better}


def _side(figure: TaskFigure) -> dict[str, float | None]:
    return {"value": figure.value, "stderr": figure.stderr}


def _difference(one: TaskFigure, other: TaskFigure) -> Estimate | None:
    """Of the means, on the rows of both; None where the harness did not average the same rows."""
    if not one.rows or one.rows.keys() != other.rows.keys():
        return None
    before, after = ([figure.rows[row] for row in sorted(one.rows)] for figure in (one, other))
    if {*before, *after} <= {0.0, 1.0}:
        return paired_proportions([bool(value) for value in before], [bool(value) for value in after])
    count = [1.0] * len(before)
    estimate = jackknife((before, after, count), lambda sums: (sums[1] - sums[0]) / sums[2])
    return replace(estimate, ci95=estimate.ci95 if math.isfinite(estimate.unit_sd) else None)

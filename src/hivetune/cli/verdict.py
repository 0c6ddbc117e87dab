"""A verdict and its metrics as people see them, and what to do next."""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.cli.output import show, table
from hivetune.judge.advice import more_evidence
from hivetune.judge.evaluate import verdict_document
from hivetune.judge.page import DEFAULT_LEVEL, value_text
from hivetune.judge.verdict import RATIOS, level_text, metric_name, passed_text
from hivetune.records import Verdict

VERDICT_STYLES = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "not-enough-evidence": "bold yellow",
    "abort": "bold red",
}
NEXT = {
    "iterate": "train with more or better rows, or other settings; see docs/evaluate.md",
    "abort": "look at the rows, and at the answers in eval.json, before you train longer",
    "not-enough-evidence": "hold out more rows (data.test), or answer more of them (eval.prompts)",
}
UNCHECKED = "give held-out rows a checker (in the row, or eval.checker), then evaluate again"
TIMES = ("latency_s", "max_seconds")
QUIET = "evaluate again when the machine is quiet: hivetune eval RUN"


def next_step_text(verdict: Verdict) -> str:
    """Return what to do after a verdict."""
    return next_step(verdict.verdict, verdict_document(verdict)["metrics"])


def next_step(verdict: str, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return what to do after a verdict: what the open metrics lack, where they lack evidence.

    More rows do not help if success is required and no row is checked, or if other programs disturbed the times.
    """
    if verdict != "not-enough-evidence":
        return NEXT[verdict]
    if any(metric["name"] == "success" and metric["required"] and not metric["n"] for metric in metrics):
        return UNCHECKED
    steps = []
    for metric in metrics:
        if metric["passed"] is False and metric.get("needed") is not None:
            steps.append(more_evidence(metric["name"]))
        elif metric["passed"] is False and metric["name"] in TIMES and metric["n"]:
            steps.append(QUIET)
    return "; ".join(dict.fromkeys(steps)) or NEXT[verdict]


def show_verdict(verdict: Verdict) -> None:
    """Show the metrics, the verdict, its reasons and what to change."""
    show_metrics(verdict_document(verdict)["metrics"], ("base", "tuned"))
    show(f"verdict: {verdict.verdict}", style=VERDICT_STYLES[verdict.verdict])
    for reason in verdict.reasons:
        show(f"  {reason}")
    if verdict.advice:
        show("what to change:")
    for advice in verdict.advice:
        show(f"  {advice.said}")
        for row in advice.rows[:3]:
            show(f"    {row}")


def show_metrics(metrics: Sequence[Mapping[str, Any]], sides: tuple[str, str]) -> None:
    """Show the metrics of an evaluation as a table: each once, gains positive where the second side is better."""
    columns = ("metric", *sides, "gain", "interval (95 %)", "n", "required", "passed")
    table("", columns, [_line(metric) for metric in metrics])


def _line(metric: Mapping[str, Any]) -> tuple[object, ...]:
    name, is_gain = metric["name"], metric["gain"] is not None
    interval = "-"
    if metric["interval"] is not None:
        interval = " to ".join(value_text(name, end, gain=is_gain) for end in metric["interval"])
        if metric["level"] != DEFAULT_LEVEL:
            interval += f" ({level_text(metric['level'])})"
    return (
        metric_name(name),
        value_text(name, metric["base"]),
        value_text(name, metric["tuned"]),
        value_text(name, metric["gain"], gain=True),
        interval,
        metric["n"],
        _threshold(metric),
        passed_text(metric).replace("no", "NO"),
    )


_THRESHOLDS = {
    "loss": "gain > {:g}",
    "success": "gain > {:.1%}",
    "min_success": "at least {:.1%}",
    "max_seconds": "at most {:g} s",
    "max_gb": "at most {:g} GB",
    "kept": "at least {:.0%}",
    **dict.fromkeys(RATIOS, "at most {:g} x"),
}


def _threshold(metric: Mapping[str, Any]) -> str:
    name, threshold = metric["name"], metric["threshold"]
    return "-" if threshold is None else _THRESHOLDS[name].format(threshold)

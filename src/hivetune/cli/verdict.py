"""A verdict and its metrics as people see them, and what to do next."""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.cli.output import show, size, table
from hivetune.judge.advice import more_evidence
from hivetune.judge.findings import SHARES_OF_ANSWERS, metric_name, passed_text
from hivetune.judge.gate import verdict_document
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
        elif metric["passed"] is False and metric["name"] == "latency_s" and metric["n"]:
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
    """Show the metrics of gate.json as a table."""
    columns = ("metric", *sides, "difference", "95 % interval", "n", "threshold", "passed")
    table("", columns, [_line(metric) for metric in metrics], numeric=columns[1:7])


def _line(metric: Mapping[str, Any]) -> tuple[object, ...]:
    name, interval = metric["name"], metric["ci95"]
    return (
        metric_name(name),
        metric_value(name, metric["base"]),
        metric_value(name, metric["tuned"]),
        metric_value(name, metric["difference"], sign=True),
        "-" if interval is None else " to ".join(metric_value(name, end, sign=True) for end in interval),
        metric["n"],
        _threshold(metric),
        passed_text(metric).replace("no", "NO"),
    )


_THRESHOLDS = {
    "latency_s": "at most {:g} x",
    "peak_memory_bytes": "at most {:g} x",
    "kept": "at least {:.0%}",
    "kept_general": "at least {:.0%}",
    "length": "within {:g} x",
    "loops": "at most {:+g} %",
    "refusals": "at most {:+g} %",
}


def _threshold(metric: Mapping[str, Any]) -> str:
    name, threshold = metric["name"], metric["threshold"]
    if threshold is None:
        return "-"
    if name in ("loops", "refusals"):
        threshold *= 100
    if name.startswith(("least_", "most_")):
        return f"at {name.partition('_')[0]} {threshold:g}"
    return _THRESHOLDS.get(name, "gain > {:g}").format(threshold)


def metric_value(name: str, value: float | None, *, sign: bool = False) -> str:
    """Return a metric in its unit, for people."""
    if value is None:
        return "-"
    prefix = "+" if sign and value > 0 else ""
    if name == "peak_memory_bytes":
        return prefix + size(value)
    if name in SHARES_OF_ANSWERS:
        return f"{prefix}{100 * value:.1f} %"
    return f"{prefix}{value:.3f}" if abs(value) < 100 else f"{prefix}{value:,.0f}"

"""Runs, one run, and its evaluation: losses and speed beside the plan, faults and repairs, settings, logs."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hivetune.base.documents import read_document
from hivetune.base.paths import quoted
from hivetune.base.private import open_plain
from hivetune.base.units import size
from hivetune.config import known_settings
from hivetune.dashboard.page import Page, PageRequest, of_this_version
from hivetune.dashboard.watched import Series, WatchedRun, Watcher, short_path
from hivetune.errors import NotThere, UsageError
from hivetune.judge.page import comparison_body
from hivetune.run.figures import flat_settings
from hivetune.run.folder import EVALUATION, SUPERVISOR_LOG, WORKER_LOG, read_record, read_resolved
from hivetune.run.page import Chart, DrawnCurve, draw_chart
from hivetune.run.status import RunStatus

LOG_LINES, LOG_BYTES = 40, 16 << 10
RUNS_OVER_EACH_OTHER = 6  # more lines than that are not told apart


def runs_page(watcher: Watcher, request: PageRequest) -> Page:
    found = watcher.runs()
    values = {"runs": [(identity, status) for identity, _, status in found], "chart": Markup(_losses(found))}
    return Page("runs.html", "Runs", values, live=True)


def _losses(found: Sequence[tuple[str, WatchedRun, RunStatus]]) -> str:
    """Return the smoothed losses of the newest runs over each other, the newest as the strongest line."""
    drawn = [(run.path.name, run.read.curves["loss"]) for _, run, _ in found if run.read.curves["loss"].count > 2]
    curves = []
    for number, (name, series) in enumerate(drawn[:RUNS_OVER_EACH_OTHER]):
        points = [(bucket.step, bucket.smoothed) for bucket in series.buckets]
        curves.append(DrawnCurve(name, "raw" if number else "smooth", points, label=name))
    said = "; ".join(f"{name} {series.last:.4g}" for name, series in drawn[:RUNS_OVER_EACH_OTHER])
    return draw_chart(Chart("Smoothed loss, nats per token", curves, said)) if len(curves) > 1 else ""


def run_page(watcher: Watcher, request: PageRequest) -> Page:
    run = named_run(watcher, request)
    status = run.status()
    settings, problem = _settings(run.path)
    result: Mapping[str, Any] = {}  # the last document of `train --json`
    with contextlib.suppress(UsageError):  # its status says so already
        result = read_record(run.path).get("result", {})
    values = {
        "identity": request.named["run"],
        "run": run,
        "status": status,
        "charts": [(title, Markup(chart)) for title, chart in _charts(run) if chart],
        "place": run.place.offset,
        "points": run.read.curves["loss"].count,
        "events": list(reversed(run.read.events)),
        "settings": settings,
        "result": result,
        "logs": list(_logs(run.path)),
        "has_evaluation": (run.path / EVALUATION).exists(),
        "problem": problem or status.problem,
    }
    return Page("run.html", short_path(run.path), values, live=True)


def evaluation_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the run's own page of its evaluation, in the dashboard's frame."""
    run = named_run(watcher, request)
    if not (run.path / EVALUATION).exists():
        raise NotThere(f"{run.path.name} is not evaluated yet", hint=f"run hivetune eval {quoted(run.path.name)}")
    evaluation = read_document(run.path / EVALUATION)
    with of_this_version(run.path / EVALUATION):
        document = {**evaluation, "tuned": {"label": short_path(run.path), **evaluation["tuned"]}}
        body = Markup(comparison_body(document))
    values = {"identity": request.named["run"], "verdict": evaluation["verdict"], "body": body}
    return Page("evaluation.html", f"Evaluation of {short_path(run.path)}", values)


def _charts(run: WatchedRun) -> Iterator[tuple[str, str]]:
    """Yield title and SVG of each chart."""
    curves = run.read.curves
    loss, validation = curves["loss"], curves["validation"]
    summary = "no step yet"
    if loss.last is not None:
        summary = f"{loss.count:,} steps, the newest {loss.last:.4g}, smoothed {loss.buckets[-1].smoothed:.4g}"
        summary += f"; validation {validation.last:.4g}" if validation.last is not None else ""
    means = [(bucket.step, bucket.mean) for bucket in validation.buckets]
    drawn = [*_drawn(loss, smoothed=True), DrawnCurve("validation", "second", means, dots=len(means) <= 100)]
    title = "Loss, nats per token"
    yield title, draw_chart(Chart(title, drawn, summary))
    peak_bytes = run.planned_peak_bytes if run.read.tally.step else None
    for title, name, planned, smoothed in (
        ("Gradient norm before clipping", "grad_norm", None, True),
        ("Learning rate", "lr", None, False),
        ("Tokens per second", "tokens_per_second", None, True),
        ("Memory", "memory", peak_bytes, False),
    ):
        series, written = curves[name], size if name == "memory" else "{:.4g}".format
        if series.last is None:
            continue
        drawn, summary = _drawn(series, smoothed=smoothed), f"the newest {written(series.last)}"
        if planned is not None:
            drawn.append(DrawnCurve("plan", "plan", [(0.0, planned)]))
            summary += f"; the plan expects {written(planned)}"
        from_zero = name in ("tokens_per_second", "memory")
        yield title, draw_chart(Chart(title, drawn, summary, written, from_zero=from_zero))


def _drawn(series: Series, *, smoothed: bool) -> list[DrawnCurve]:
    """Return the means of a series, with minimum and maximum where a bucket holds several points; and its smoothed
    curve where it has more than two."""
    buckets = series.buckets
    joined = bool(buckets) and buckets[0].count > 1
    band = [(bucket.step, bucket.low, bucket.high) for bucket in buckets] if joined else []
    drawn = [DrawnCurve("raw", "raw", [(bucket.step, bucket.mean) for bucket in buckets], band)]
    if smoothed and series.count > 2:
        drawn.append(DrawnCurve("smoothed", "smooth", [(bucket.step, bucket.smoothed) for bucket in buckets]))
    return drawn


def _settings(run: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the run's settings and choices, or why they can't be read. `changed`: one is not the default, or has
    none."""
    try:
        config, choices = read_resolved(run)
    except UsageError as error:
        return [], error.message
    defaults = {setting.key: json.loads(setting.default) for setting in known_settings() if setting.default}
    settings = flat_settings(config.model_dump(mode="json", exclude={"cycle": {"notify"}}))  # addresses are secrets
    chosen = {f"choices.{key}": value for key, value in choices.made().items()}
    return [
        {
            "key": key,
            "value": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
            "changed": key in settings and defaults.get(key, "") != value,
        }
        for key, value in {**settings, **chosen}.items()
    ], ""


def _logs(run: Path) -> Iterator[tuple[str, str]]:
    """Yield the last lines that the run's processes printed."""
    for name in (SUPERVISOR_LOG, WORKER_LOG):
        try:
            with open(open_plain(run / name), "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
        except FileNotFoundError:
            continue
        if lines:
            yield name, "\n".join(lines)


def named_run(watcher: Watcher, request: PageRequest) -> WatchedRun:
    """Return the run that an address names. Raises NotThere."""
    run = watcher.run(request.named["run"])
    if run is None or not os.path.lexists(run.path):
        raise NotThere("no run has this id", hint="it may have been deleted; list them: hivetune runs")
    return run

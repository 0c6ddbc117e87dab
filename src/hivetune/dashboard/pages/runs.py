"""Runs, one run, and its evaluation: losses and speed beside the plan, faults and repairs, settings, logs."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hivetune.base.paths import quoted
from hivetune.base.private import open_plain
from hivetune.base.sealed import read_sealed
from hivetune.base.units import size
from hivetune.config import stored_settings
from hivetune.dashboard.page import Page, PageRequest, of_this_version
from hivetune.dashboard.series import Series
from hivetune.dashboard.watched import WatchedRun, Watcher, short_path
from hivetune.errors import NotThere, UsageError
from hivetune.judge.page import comparison_body
from hivetune.run.chart import Chart, DrawnCurve, draw_chart
from hivetune.run.choices import read_resolved
from hivetune.run.folder import EVALUATION, SUPERVISOR_LOG, VERDICT, WORKER_LOG, read_record

LOG_LINES, LOG_BYTES = 40, 16 << 10


def runs_page(watcher: Watcher, request: PageRequest) -> Page:
    values = {"runs": [(identity, status) for identity, _, status in watcher.runs()], "problem": ""}
    return Page("runs.html", "Runs", values, live=True)


def run_page(watcher: Watcher, request: PageRequest) -> Page:
    run = _found(watcher, request)
    status = run.status()
    settings, problem = _settings(run.path)
    values = {
        "identity": request.named["run"],
        "run": run,
        "status": status,
        "charts": [(title, Markup(chart)) for title, chart in _charts(run) if chart],
        "place": f"{run.place.inode}-{run.place.offset}",
        "points": run.read.curves["loss"].count,
        "events": list(reversed(run.read.events)),
        "settings": settings,
        "result": _result(run.path),
        "logs": list(_logs(run.path)),
        "has_evaluation": (run.path / EVALUATION).exists(),
        "problem": problem or status.problem,
    }
    return Page("run.html", short_path(run.path), values, live=True)


def evaluation_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the run's own page of its evaluation, in the dashboard's frame."""
    run = _found(watcher, request)
    if not (run.path / EVALUATION).exists():
        raise NotThere(f"{run.path.name} is not evaluated yet", hint=f"hivetune eval {quoted(run.path.name)}")
    evaluation = read_sealed(run.path / EVALUATION)
    judged = read_sealed(run.path / VERDICT) if (run.path / VERDICT).exists() else {"metrics": []}
    with of_this_version(run.path / EVALUATION):
        document = {**evaluation, "tuned": {"label": short_path(run.path), **evaluation["tuned"]}}
        body = Markup(comparison_body(document, judged))
    verdict = judged.get("verdict") or "not judged yet"
    values = {"identity": request.named["run"], "verdict": verdict, "body": body}
    return Page("evaluation.html", f"Evaluation of {short_path(run.path)}", values)


def _found(watcher: Watcher, request: PageRequest) -> WatchedRun:
    run = watcher.run(request.named["run"])
    if run is None or not os.path.lexists(run.path):
        raise NotThere("no run has this id", hint="it may have been deleted; list them: hivetune runs")
    return run


def _charts(run: WatchedRun) -> Iterator[tuple[str, str]]:
    """Yield title and SVG of each chart."""
    curves = run.read.curves
    loss, validation = curves["loss"], curves["validation"]
    summary = "no step yet"
    if loss.last is not None:
        summary = f"{loss.count:,} steps, the newest {loss.last:.4g}, smoothed {loss.buckets[-1].smoothed:.4g}"
        summary += f"; validation {validation.last:.4g}" if validation.last is not None else ""
    drawn = [DrawnCurve("raw", "raw", _means(loss), _band(loss)), DrawnCurve("smoothed", "smooth", _smoothed(loss))]
    drawn.append(DrawnCurve("validation", "second", _means(validation), dots=len(validation.buckets) <= 100))
    title = "Loss, nats per token"
    yield title, draw_chart(Chart(title, drawn, summary))
    yield _one("Gradient norm before clipping", curves["grad_norm"])
    yield _one("Learning rate", curves["lr"], smoothed=False)
    planned = run.planned if run.read.tally.step else None
    speed, memory = curves["tokens_per_second"], curves["memory"]
    yield _one("Tokens per second", speed, None if planned is None else planned.tokens_per_second, from_zero=True)
    peak_bytes = None if planned is None else planned.peak_bytes
    yield _one("Memory", memory, peak_bytes, in_bytes=True, from_zero=True, smoothed=False)


def _one(
    title: str,
    series: Series,
    planned: float | None = None,
    *,
    in_bytes: bool = False,
    from_zero: bool = False,
    smoothed: bool = True,
) -> tuple[str, str]:
    def written(value: float) -> str:
        return size(value) if in_bytes else f"{value:.4g}"

    if series.last is None:
        return title, ""
    curves = [DrawnCurve("raw", "raw", _means(series), _band(series))]
    if smoothed and series.count > 2:
        curves.append(DrawnCurve("smoothed", "smooth", _smoothed(series)))
    summary = f"the newest {written(series.last)}"
    if planned is not None:
        curves.append(DrawnCurve("plan", "plan", [(0.0, planned)]))
        summary += f"; the plan expects {written(planned)}"
    return title, draw_chart(Chart(title, curves, summary, written, from_zero=from_zero))


def _means(series: Series) -> list[tuple[float, float]]:
    return [(bucket.step, bucket.mean) for bucket in series.buckets]


def _smoothed(series: Series) -> list[tuple[float, float]]:
    return [(bucket.step, bucket.smoothed) for bucket in series.buckets]


def _band(series: Series) -> list[tuple[float, float, float]]:
    """Return minimum and maximum of each bucket where buckets hold several points."""
    if not series.buckets or series.buckets[0].count == 1:
        return []
    return [(bucket.step, bucket.low, bucket.high) for bucket in series.buckets]


@dataclass(frozen=True)
class ShownSetting:
    """A setting. `changed`: it is not the default, or there is no default."""

    key: str
    value: str
    changed: bool


def _settings(run: Path) -> tuple[list[ShownSetting], str]:
    """Return the run's settings and choices, or why they can't be read."""
    try:
        config, choices = read_resolved(run)
    except UsageError as error:
        return [], error.message
    defaults = {setting.key: json.loads(setting.default) for setting in stored_settings() if setting.default}
    tree = config.model_dump(mode="json", exclude={"cycle": {"notify"}})  # addresses are secrets
    own = [ShownSetting(key, _shown(value), defaults.get(key, "") != value) for key, value in _flat(tree)]
    made = [ShownSetting(f"choices.{key}", _shown(value), False) for key, value in choices.made().items()]
    return [*own, *made], ""


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _result(run: Path) -> Mapping[str, Any]:
    """Return the last document of `train --json`, {} before the run ends."""
    try:
        result: Mapping[str, Any] = read_record(run).get("result", {})
        return result
    except UsageError:  # its status says so already
        return {}


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

"""The pages that only show something: the overview, runs, releases and data."""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hivetune.base.database import open_database, open_existing_database
from hivetune.base.disk import MANIFEST, home, read_json, stored_path
from hivetune.base.documents import read_document
from hivetune.base.paths import quoted
from hivetune.base.units import size
from hivetune.dashboard.overview import overview
from hivetune.dashboard.page import MakePage, Page, PageRequest, fragment, link, moment, of_this_version
from hivetune.dashboard.plot import Curve, plot
from hivetune.dashboard.watched import WatchedRun, Watcher, short_path, smoothed
from hivetune.data.prepare.report import duplicate_kinds
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import REPORT
from hivetune.errors import HivetuneError, NotThere, UsageError
from hivetune.judge.page import comparison_body
from hivetune.machine.telemetry import sample
from hivetune.release.registry import (
    Release,
    explain_release,
    find,
    forgotten_rows,
    releases,
    rollback_target,
    snapshot_folder,
)
from hivetune.run.folder import EVALUATION, read_record
from hivetune.run.status import RunStatus

RUNS_OVER_EACH_OTHER = 6  # more lines than that are not told apart
MAX_SNAPSHOTS = 200
# Curve and title of each plot of a run.
PLOTS = {
    "loss": "Loss, nats per token",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "memory": "Memory",
}
Found = Sequence[tuple[str, WatchedRun, RunStatus]]


def now_page(watcher: Watcher, request: PageRequest) -> Page:
    runs = watcher.runs()
    values = {
        "found": overview([status for _, _, status in runs]),
        "running": [each for each in runs if each[2].state == "running"],
        "recent": _rows_of([each for each in runs if each[2].state != "running"][:5]),
        "device": sample(None, home() if home().exists() else Path.home()),
    }
    return Page("now.html", "Now", values, live=True)


def _rows_of(runs: Found) -> list[tuple[Any, ...]]:
    state, rows = Markup('<span class="state {0}">{0}</span>'), []
    for identity, _, each in runs:
        named = (link(f"/runs/{identity}", short_path(each.run)), state.format(each.state))
        figures = (f"{each.step}/{each.steps}", each.loss, each.validation_loss, each.restarts, each.quarantined)
        rows.append((*named, *figures, moment(each.created), each.problem))
    return rows


def _result(run: Path) -> Mapping[str, Any]:
    """Return the last document of `train --json`; empty if it is missing or damaged, which the run's status reports."""
    with contextlib.suppress(UsageError):
        return read_record(run).get("result") or {}
    return {}


def runs_page(watcher: Watcher, request: PageRequest) -> Page:
    found = watcher.runs()
    return Page("runs.html", "Runs", {"runs": _rows_of(found), "plot": _losses(found)}, live=True)


def _losses(found: Found) -> Markup:
    """Return a plot of the smoothed losses of the newest runs, with the newest as the strongest line."""
    # By its path: all runs of cycles are called `run`.
    losses = [(short_path(run.path), run.read.curves["loss"]) for _, run, _ in found]
    drawn = [(name, series) for name, series in losses if len(series) > 2][:RUNS_OVER_EACH_OTHER]
    # In names beside the lines, not in a legend of six colours that nobody tells apart.
    curves = [
        Curve(name, "raw" if number else "smooth", smoothed(series.buckets()), label=name)
        for number, (name, series) in enumerate(drawn)
    ]
    said = "; ".join(f"{name} {series.values[-1]:.4g}" for name, series in drawn)
    return plot("Smoothed loss, nats per token", said, curves) if len(curves) > 1 else Markup()


def run_page(watcher: Watcher, request: PageRequest) -> Page:
    run = named_run(watcher, request)
    status = run.status()
    values = {
        "identity": request.named["run"],
        "run": run,
        "status": status,
        "plots": [(title, drawn) for name, title in PLOTS.items() if (drawn := _plot(run, name, title))],
        "points": len(run.read.curves["loss"]),
        "rows": _result(run.path).get("rows", {}),
        "has_evaluation": (run.path / EVALUATION).exists(),
        "problem": status.problem,
    }
    return Page("run.html", short_path(run.path), values, live=True)


def _plot(run: WatchedRun, name: str, title: str) -> Markup:
    """Return a plot of a curve's means and its smoothed line, with minimum and maximum where a point stands for
    several.
    """
    series, validation = run.read.curves[name], run.read.curves["validation"].buckets()
    buckets = series.buckets()
    if not buckets:
        return Markup()
    band = [(bucket.step, bucket.low, bucket.high) for bucket in buckets] if len(series) > len(buckets) else []
    curves = [Curve("raw", "raw", [(bucket.step, bucket.mean) for bucket in buckets], band)]
    if len(series) > 2:
        curves.append(Curve("smoothed", "smooth", smoothed(buckets)))
    # Rates of 0.0001 are too long for the numbers of an axis.
    number = {"memory": size, "lr": "{:.2e}".format}.get(name, "{:.4g}".format)
    summary = f"{len(series):,} points, the newest {number(series.values[-1])}"
    if name == "loss" and validation:
        means = [(bucket.step, bucket.mean) for bucket in validation]
        curves.append(Curve("validation", "second", means, dots=len(means) <= 100))  # more dots touch
        summary += f"; validation {means[-1][1]:.4g}"
    return plot(title, summary, curves, number=number, from_zero=name in ("tokens_per_second", "memory"))


def named_run(watcher: Watcher, request: PageRequest) -> WatchedRun:
    """Return the run named in the address. Raises NotThere."""
    run = watcher.run(request.named["run"])
    if run is None:
        raise NotThere("no run has this id", hint="it may have been deleted; list them: hivetune runs")
    return run


def evaluation_page(watcher: Watcher, request: PageRequest) -> Page:
    """Return the page of the run's evaluation in the dashboard's frame."""
    run = named_run(watcher, request)
    if not (run.path / EVALUATION).exists():
        raise NotThere(f"{run.path.name} is not evaluated yet", hint=f"run hivetune eval {quoted(run.path.name)}")
    body = _compared(run.path / EVALUATION, short_path(run.path))
    return Page("message.html", f"Evaluation of {short_path(run.path)}", {"body": body})


def _compared(path: Path, label: str) -> Markup:
    evaluation = read_document(path)
    with of_this_version(path):
        verdict = Markup("<p>Verdict: <strong>{}</strong></p>").format(evaluation["verdict"])
        return verdict + Markup(comparison_body({**evaluation, "tuned": {"label": label, **evaluation["tuned"]}}))


def releases_page(watcher: Watcher, request: PageRequest) -> Page:
    with open_existing_database() as database:
        found = releases(database)
        rows = [_release_row(release, forgotten_rows(database, release.snapshot)) for release in reversed(found)]
    return Page("releases.html", "Releases", {"releases": rows}, live=True)


def _release_row(release: Release, forgotten: int) -> tuple[Any, ...]:
    notes = [f"rolled back: {release.withdrawn}"] if release.withdrawn else []
    notes += ["pruned"] * release.pruned + [f"{forgotten:,} forgotten rows"] * bool(forgotten)
    named = (link(f"/releases/{release.name}/{release.version}", release.label), ", ".join(release.aliases) or "-")
    return (*named, release.verdict or "not judged", release.model, moment(release.created), "; ".join(notes))


def release_page(watcher: Watcher, request: PageRequest) -> Page:
    """Return the page of one release."""
    release = named_release(request)
    problem, origin, answers = "", {}, Markup()
    with closing(open_database()) as database:
        # What is damaged is named by its error; the registry itself is shown all the same.
        try:
            origin = explain_release(database, release.label)
            if not release.pruned and (release.folder / EVALUATION).is_file():
                answers = _compared(release.folder / EVALUATION, release.label)
        except HivetuneError as error:
            problem = error.message
        values = {
            "release": release,
            "about": origin,
            "problem": problem,
            "moves": list(reversed(release.moves)),
            "forgotten": forgotten_rows(database, release.snapshot),
            "earlier": rollback_target(database, release.name),
            "run": Path(release.run),
            "snapshot_is_there": snapshot_folder(database, release.snapshot) is not None,
            "answers": answers,
        }
    return Page("release.html", release.label, values)


def named_release(request: PageRequest) -> Release:
    """Return the release named in the address. Raises NotThere."""
    try:
        with closing(open_database()) as database:
            return find(database, f"{request.named['name']}@{request.named['version']}")
    except UsageError as error:
        raise NotThere(error.message, hint=error.hint) from None


def data_page(watcher: Watcher, request: PageRequest) -> Page:
    """Return the page of stored rows by source, and of the snapshots made of them."""
    query = "SELECT hash, path, created FROM snapshots ORDER BY created DESC LIMIT ?"
    with open_existing_database() as database:
        values = {
            "interactions": database.execute("SELECT count(*) FROM interactions").fetchone()[0],
            "forgotten": database.execute("SELECT count(*) FROM forgotten").fetchone()[0],
            "intake": database.execute("SELECT * FROM intake ORDER BY source").fetchall(),
            "snapshots": [_snapshot_row(*row) for row in database.execute(query, (MAX_SNAPSHOTS,))],
        }
    return Page("data.html", "Data", values)


def _snapshot_row(digest: str, path: str, created: float) -> tuple[Any, ...]:
    # Its folder is gone, or another version wrote it.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        manifest = read_json(stored_path(path) / MANIFEST)
        counts = (int(manifest["num_rows"]), int(manifest["num_tokens"]))
        return (link(f"/data/{digest}/report", digest[:16]), *counts, moment(created))
    return f"{digest[:16]} (deleted)", None, None, moment(created)


def report_page(watcher: Watcher, request: PageRequest) -> Page:
    """Return the page of a snapshot's report in the dashboard's frame."""
    with closing(open_database()) as database:
        folder = snapshot_folder(database, request.named["snapshot"])
    if folder is None or not (folder / REPORT).is_file():
        raise NotThere("no snapshot has this id", hint="it may have been deleted; see the page Data")
    with of_this_version(folder / REPORT):
        document = read_document(folder / REPORT)
        values = {
            "d": document,
            "duplicates": duplicate_kinds(document),
            "meanings": {name: reason.meaning for name, reason in REASONS.items()},
        }
        title = f"{document['usable']:,} of {document['rows_in']:,} rows can be learned from"
        return Page("message.html", title, {"body": Markup(fragment("report.html", values))})


PAGES: Mapping[str, MakePage] = {
    "/": now_page,
    "/runs": runs_page,
    "/runs/{run}": run_page,
    "/runs/{run}/evaluation": evaluation_page,
    "/releases": releases_page,
    "/releases/{name}/{version:int}": release_page,
    "/data": data_page,
    "/data/{snapshot}/report": report_page,
}

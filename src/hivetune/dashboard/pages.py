"""What is looked at: what runs and what comes next, runs, cycles, releases with their rows, and the data."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hivetune.base.database import home_as_it_is, open_database, open_to_read
from hivetune.base.disk import MANIFEST, home, read_json, stored_path
from hivetune.base.documents import read_document
from hivetune.base.journal import read_tail
from hivetune.base.paths import quoted
from hivetune.base.private import open_plain
from hivetune.base.units import size
from hivetune.cycle.record import JOURNAL, CycleRow, cycles_of, gate_of, loop_folder
from hivetune.dashboard.overview import overview
from hivetune.dashboard.page import MakePage, Page, PageRequest, fragment, of_this_version
from hivetune.dashboard.watched import Series, WatchedRun, Watcher, run_id, short_path
from hivetune.data.prepare.report import duplicate_kinds
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import REPORT, ROWS_FILE, SPLITS, RowInfo, select_rows
from hivetune.errors import HivetuneError, NotThere, UsageError
from hivetune.judge.page import comparison_body
from hivetune.machine.telemetry import sample
from hivetune.release.registry import (
    Release,
    explain_release,
    find,
    forgotten_rows,
    moves_of,
    releases,
    returns_to,
    snapshot_folder,
)
from hivetune.run.figures import flat_settings
from hivetune.run.folder import EVALUATION, RECORD, SUPERVISOR_LOG, WORKER_LOG, read_record, read_resolved
from hivetune.run.page import Chart, DrawnCurve, draw_chart, draw_intervals
from hivetune.run.status import RunStatus

LOG_LINES, LOG_BYTES = 40, 16 << 10
RUNS_OVER_EACH_OTHER = 6  # more lines than that are not told apart
MAX_ENTRIES = 50  # of a loop's journal
MAX_SNAPSHOTS = 200
ROWS_A_PAGE, MAX_SHOWN_CHARS, MAX_DIGITS = 50, 2000, 9


def now_page(watcher: Watcher, request: PageRequest) -> Page:
    runs = watcher.runs()
    found = overview([status for _, _, status in runs])
    values = {
        "found": found,
        "running": [(identity, run, status) for identity, run, status in runs if status.state == "running"],
        "recent": [(identity, status) for identity, _, status in runs if status.state != "running"][:5],
        "device": sample(None, home() if home().exists() else Path.home()),
    }
    return Page("now.html", "Now", values, live=True)


def loop_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show a cycle's loop: each decision with its reason, what each station did, and the outcome of each cycle."""
    name = request.named["name"]
    loop = next((loop for loop in overview([]).loops if loop.name == name), None)
    if loop is None:
        raise NotThere(f"no cycle is called {name}", hint="start one: hivetune cycle CONFIG")
    with closing(open_database()) as database:
        cycles = [_described(cycle) for cycle in reversed(cycles_of(database, name))]
    told = [line for entry in read_tail(loop_folder(name) / JOURNAL) if (line := _told(entry))]
    return Page(
        "loop.html", f"Cycle {name}", {"loop": loop, "told": told[: -MAX_ENTRIES - 1 : -1], "cycles": cycles}, True
    )


def _told(entry: Mapping[str, Any]) -> tuple[float, str, str] | None:
    """Return when, what and why of a line of a loop's journal; None for the beginning of something."""
    match entry["event"]:
        case "decision":
            return entry["now"], entry["do"], entry["reason"]
        case "end":
            return entry["time"], f"{entry['station']} {entry['outcome']}", entry["words"]
        case "notice":
            return entry["time"], f"notice: {entry['kind']}", entry["problem"] or "sent"
        case "problem":
            return entry["time"], "problem", entry["words"]
    return None


def _described(cycle: CycleRow) -> dict[str, Any]:
    """Return a cycle with its gate's reasons, its rows, and the id of its run (empty without one)."""
    gate, rows = gate_of(cycle), {}
    recorded = (cycle.run / RECORD).exists()
    if recorded:
        with contextlib.suppress(UsageError):  # the page of the run says what is wrong with it
            rows = read_record(cycle.run).get("result", {}).get("rows", {})
    run = run_id(cycle.run) if recorded else ""
    return {
        "row": cycle,
        "verdict": gate.get("verdict", ""),
        "reasons": gate.get("reasons", ()),
        "rows": rows,
        "run": run,
    }


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
        "points": run.read.curves["loss"].count,
        "settings": settings,
        "rows": result.get("rows", {}),
        "logs": list(_logs(run.path)),
        "has_evaluation": (run.path / EVALUATION).exists(),
        "problem": problem or status.problem,
    }
    return Page("run.html", short_path(run.path), values, live=True)


def _charts(run: WatchedRun) -> Iterator[tuple[str, str]]:
    """Yield title and SVG of each chart."""
    for title, name in (
        ("Loss, nats per token", "loss"),
        ("Gradient norm before clipping", "grad_norm"),
        ("Learning rate", "lr"),
        ("Tokens per second", "tokens_per_second"),
        ("Memory", "memory"),
    ):
        series, validation = run.read.curves[name], run.read.curves["validation"]
        if series.last is None:
            continue
        written = size if name == "memory" else "{:.4g}".format
        drawn, summary = _drawn(series), f"{series.count:,} points, the newest {written(series.last)}"
        if name == "loss" and validation.last is not None:
            means = [(bucket.step, bucket.mean) for bucket in validation.buckets]
            drawn.append(DrawnCurve("validation", "second", means, dots=len(means) <= 100))
            summary += f"; validation {validation.last:.4g}"
        from_zero = name in ("tokens_per_second", "memory")
        yield title, draw_chart(Chart(title, drawn, summary, written, from_zero=from_zero))


def _drawn(series: Series) -> list[DrawnCurve]:
    """Return the means of a series, with minimum and maximum where a bucket holds several points; and its smoothed
    curve where it has more than two."""
    buckets = series.buckets
    band = [(bucket.step, bucket.low, bucket.high) for bucket in buckets] if buckets[0].count > 1 else []
    drawn = [DrawnCurve("raw", "raw", [(bucket.step, bucket.mean) for bucket in buckets], band)]
    if series.count > 2:
        drawn.append(DrawnCurve("smoothed", "smooth", [(bucket.step, bucket.smoothed) for bucket in buckets]))
    return drawn


def _settings(run: Path) -> tuple[dict[str, str], str]:
    """Return the run's settings and choices, or why they can't be read."""
    try:
        config, choices = read_resolved(run)
    except UsageError as error:
        return {}, error.message
    # The command of `cycle.notify` may hold an address that is a secret.
    found = flat_settings(config.model_dump(mode="json", exclude={"cycle": {"notify"}}))
    found |= {f"choices.{key}": value for key, value in choices.made().items()}
    return {key: str(each) if isinstance(each, str) else json.dumps(each) for key, each in found.items()}, ""


def _logs(run: Path) -> Iterator[tuple[str, str]]:
    """Yield the last lines that the run's processes printed."""
    for name in (SUPERVISOR_LOG, WORKER_LOG):
        with contextlib.suppress(FileNotFoundError), open(open_plain(run / name), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            yield name, "\n".join(file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:])


def named_run(watcher: Watcher, request: PageRequest) -> WatchedRun:
    """Return the run that an address names. Raises NotThere."""
    run = watcher.run(request.named["run"])
    if run is None or not os.path.lexists(run.path):
        raise NotThere("no run has this id", hint="it may have been deleted; list them: hivetune runs")
    return run


def evaluation_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the run's own page of its evaluation, in the dashboard's frame."""
    run = named_run(watcher, request)
    if not (run.path / EVALUATION).exists():
        raise NotThere(f"{run.path.name} is not evaluated yet", hint=f"run hivetune eval {quoted(run.path.name)}")
    body = _compared(run.path / EVALUATION, short_path(run.path))
    return Page("body.html", f"Evaluation of {short_path(run.path)}", {"body": body})


def _compared(path: Path, label: str) -> Markup:
    evaluation = read_document(path)
    with of_this_version(path):
        verdict = Markup("<p>Verdict: <strong>{}</strong></p>").format(evaluation["verdict"])
        return verdict + Markup(comparison_body({**evaluation, "tuned": {"label": label, **evaluation["tuned"]}}))


def releases_page(watcher: Watcher, request: PageRequest) -> Page:
    with home_as_it_is() as database:
        all_releases = releases(database)
        shown = [(release, forgotten_rows(database, release.snapshot)) for release in reversed(all_releases)]
        names = sorted({release.name for release in all_releases})
        charts = {name: list(_quality(database, name)) for name in names}
    return Page("releases.html", "Releases", {"releases": shown, "charts": charts}, live=True)


def _quality(database: sqlite3.Connection, name: str) -> Iterator[Markup]:
    """Yield a chart for each measure: the gain over the base with its interval, release by release."""
    shown: dict[str, list[tuple[str, float, float, float]]] = {"loss": [], "success": []}
    for release in releases(database, name):
        # Its files are gone, or another version wrote them.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            judgement = read_json(release.folder / MANIFEST).get("judgement") or {"metrics": []}
            for metric in judgement["metrics"]:
                if metric["name"] in shown and metric["interval"] is not None and metric["gain"] is not None:
                    low, high = metric["interval"]
                    label = " ".join((release.label, *release.aliases))
                    shown[metric["name"]].append((label, float(metric["gain"]), float(low), float(high)))
    for measure, rows in shown.items():
        if rows:
            yield Markup(draw_intervals(rows, f"{measure}: gain over the base with its interval; above zero is better"))


def release_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show a release. Damaged or pruned files are named; the registry's own facts are always shown."""
    release = named_release(request)
    problem, origin, answers = "", {}, Markup("")
    with closing(open_database()) as database:
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
            "moves": list(reversed(moves_of(database, release))),
            "forgotten": forgotten_rows(database, release.snapshot),
            "earlier": returns_to(database, release.name),
            "run": Path(release.run),
            "snapshot_is_there": snapshot_folder(database, release.snapshot) is not None,
            "answers": answers,
        }
    return Page("release.html", release.label, values)


def named_release(request: PageRequest) -> Release:
    """Return the release that an address names. Raises NotThere."""
    try:
        with closing(open_database()) as database:
            return find(database, f"{request.named['name']}@{request.named['version']}")
    except UsageError as error:
        raise NotThere(error.message, hint=error.hint) from None


def rows_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the rows that a release was trained on or judged by, a page at a time. Raises UsageError."""
    release, split = named_release(request), request.query.get("split", "train")
    text = request.query.get("page", "")
    number = max(1, int(text)) if text.isdecimal() and len(text) <= MAX_DIGITS else 1
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}", hint=f"choose one of: {', '.join(SPLITS)}")
    with closing(open_database()) as database:
        folder = snapshot_folder(database, release.snapshot)
    if folder is None or not (folder / ROWS_FILE).is_file():
        raise UsageError("the snapshot of this release was deleted; its rows can't be shown")
    with closing(open_to_read(folder / ROWS_FILE, finished=True)) as database:
        (total,) = database.execute("SELECT count(*) FROM rows WHERE split = ?", (split,)).fetchone()
        page = (split, ROWS_A_PAGE, ROWS_A_PAGE * (number - 1))
        rows = list(select_rows(database, "WHERE split = ? ORDER BY row LIMIT ? OFFSET ?", *page))
    pages = max(1, -(-total // ROWS_A_PAGE))
    values = {"release": release, "rows": [(row, list(_turns(row))) for row in rows], "split": split, "total": total}
    return Page("rows.html", f"Rows of {release.label}", {**values, "splits": SPLITS, "page": number, "pages": pages})


def _turns(row: RowInfo) -> Iterator[tuple[str, str]]:
    """Yield role and text of each turn, cut for display."""
    for message in row.messages:
        text = message.content + (json.dumps(message.tool_calls, ensure_ascii=False) if message.tool_calls else "")
        yield message.role, text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " ..."


def data_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show what came in from where, and the snapshots that were made of it."""
    with home_as_it_is() as database:
        values: dict[str, Any] = {
            "interactions": database.execute("SELECT count(*) FROM interactions").fetchone()[0],
            "forgotten": database.execute("SELECT count(*) FROM forgotten").fetchone()[0],
            "intake": database.execute("SELECT * FROM intake ORDER BY source").fetchall(),
            "snapshots": [],
        }
        query = "SELECT hash, path, created FROM snapshots ORDER BY created DESC LIMIT ?"
        snapshots = database.execute(query, (MAX_SNAPSHOTS,)).fetchall()
    for digest, path, created in snapshots:
        shown = {"digest": digest, "created": created, "rows": None, "tokens": 0}  # None: its folder is gone
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = read_json(stored_path(path) / MANIFEST)
            shown |= {"rows": int(manifest["num_rows"]), "tokens": int(manifest["num_tokens"])}
        values["snapshots"].append(shown)
    return Page("data.html", "Data", values)


def report_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the snapshot's report, in the dashboard's frame."""
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
        return Page("body.html", title, {"body": Markup(fragment("report.html", values))})


PAGES: Mapping[str, MakePage] = {
    "/": now_page,
    "/runs": runs_page,
    "/runs/{run}": run_page,
    "/runs/{run}/evaluation": evaluation_page,
    "/cycles/{name}": loop_page,
    "/releases": releases_page,
    "/releases/{name}/{version:int}": release_page,
    "/releases/{name}/{version:int}/rows": rows_page,
    "/data": data_page,
    "/data/{snapshot}/report": report_page,
}

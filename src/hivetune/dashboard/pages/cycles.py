"""Cycles: each decision with its reason, the outcome and the rows of each cycle, and quality from release to
release."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, read_json
from hivetune.base.journal import read_tail
from hivetune.cycle.ledger import JOURNAL, CycleRow, acts_of, cycles_of, loop_folder
from hivetune.cycle.observe import gate_of
from hivetune.dashboard.overview import overview
from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.pages.now import shown_loop
from hivetune.dashboard.watched import Watcher, run_id
from hivetune.errors import NotThere, UsageError
from hivetune.release.registry import Release, releases
from hivetune.run.chart import draw_intervals
from hivetune.run.folder import RECORD, read_record

MAX_DECISIONS, MAX_ACTS = 50, 50
_MEASURED = ("loss", "success")


@dataclass(frozen=True)
class ShownCycle:
    """A cycle with its gate's reasons and its rows. `run`: the id of its run, empty without one."""

    row: CycleRow
    verdict: str
    reasons: tuple[str, ...]
    rows: Mapping[str, Any]
    run: str


def cycles_page(watcher: Watcher, request: PageRequest) -> Page:
    loops = [shown_loop(loop) for loop in overview([]).loops]
    return Page("cycles.html", "Cycles", {"loops": loops, "problem": ""}, live=True)


def loop_page(watcher: Watcher, request: PageRequest) -> Page:
    name = request.named["name"]
    loop = next((loop for loop in overview([]).loops if loop.name == name), None)
    if loop is None:
        raise NotThere(f"no cycle is called {name}", hint="start one: hivetune cycle CONFIG")
    with closing(open_database()) as database:
        cycles, acts = cycles_of(database, name), acts_of(database, name)
        charts = list(quality_charts(database, name))
    decisions = [e for e in read_tail(loop_folder(name) / JOURNAL) if e["event"] in ("decision", "problem", "notice")]
    values = {
        "shown": shown_loop(loop),
        "decisions": [_decision(entry) for entry in reversed(decisions[-MAX_DECISIONS:])],
        "acts": list(reversed(acts[-MAX_ACTS:])),
        "cycles": [_shown(cycle) for cycle in reversed(cycles)],
        "charts": charts,
        "problem": "",
    }
    return Page("loop.html", f"Cycle {name}", values, live=True)


def quality_charts(database: sqlite3.Connection, name: str) -> Iterator[Markup]:
    """Yield a chart for each measure: the difference to the base with its 95 % interval, release by release."""
    known = list(_judged(releases(database, name)))
    for measure in _MEASURED:
        rows: list[tuple[str, float, float, float]] = []
        for release, metrics in known:
            metric = next((metric for metric in metrics if metric["name"] == measure), None)
            if metric is not None and metric.get("ci95") is not None and metric.get("difference") is not None:
                low, high = metric["ci95"]
                aliases = f" {', '.join(release.aliases)}" if release.aliases else ""
                rows.append((f"{release.label}{aliases}", float(metric["difference"]), float(low), float(high)))
        better = "below zero is better" if measure == "loss" else "above zero is better"
        if rows:
            yield Markup(draw_intervals(rows, f"{measure}: tuned minus base with its 95 % interval; {better}"))


def _judged(known: Iterable[Release]) -> Iterator[tuple[Release, list[Mapping[str, Any]]]]:
    """Yield releases whose files are there, with the metrics of their verdict."""
    for release in known:
        try:
            judgement = read_json(release.folder / MANIFEST).get("judgement")
        except (OSError, ValueError):
            continue
        if judgement:
            yield release, judgement["metrics"]


def _decision(entry: Mapping[str, Any]) -> tuple[float, str, str]:
    """Return when, what and why."""
    if entry["event"] == "decision":
        return float(entry["now"]), str(entry["kind"]).replace("_", " "), str(entry["reason"])
    if entry["event"] == "notice":
        sent = f"not sent: {entry['problem']}" if entry.get("problem") else "sent"
        return float(entry["time"]), "notice", f"{entry['kind']} by {entry['way']}: {sent}"
    return float(entry["time"]), "problem", str(entry["words"])


def _shown(cycle: CycleRow) -> ShownCycle:
    gate = gate_of(cycle)
    rows: Mapping[str, Any] = {}
    identity = ""
    if (cycle.run / RECORD).exists():
        identity = run_id(cycle.run)
        try:
            rows = read_record(cycle.run).get("result", {}).get("rows", {})
        except UsageError:  # the page of the run says what is wrong with it
            rows = {}
    return ShownCycle(cycle, str(gate.get("verdict", "")), tuple(gate.get("reasons", ())), rows, identity)

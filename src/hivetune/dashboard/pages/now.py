"""What runs now, how far it is, what comes next and why, and the state of the machine; and the cycles: each decision
with its reason, the outcome and the rows of each cycle, and quality from release to release."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, home, read_json
from hivetune.base.journal import read_tail
from hivetune.cycle.record import JOURNAL, CycleRow, cycles_of, gate_of, loop_folder
from hivetune.dashboard.overview import CycleLoop, overview
from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.watched import Watcher, run_id
from hivetune.errors import NotThere, UsageError
from hivetune.machine.telemetry import sample
from hivetune.release.registry import releases
from hivetune.run.folder import RECORD, read_record
from hivetune.run.page import draw_intervals


def now_page(watcher: Watcher, request: PageRequest) -> Page:
    runs = watcher.runs()
    home_state = overview([status for _, _, status in runs])
    measured = sample(None, home() if home().exists() else Path.home())
    values = {
        "found": home_state,
        "running": [(identity, run, status) for identity, run, status in runs if status.state == "running"],
        "recent": [(identity, status) for identity, _, status in runs if status.state != "running"][:5],
        "loops": [shown_loop(loop) for loop in home_state.loops],
        # Rounded, so that a page that hardly changed is not sent again.
        "device": {
            "available_bytes": round(measured["available_bytes"], -8),
            "disk_free_bytes": round(measured["disk_free_bytes"], -8),
            "load": round(measured["load"], 1),
            "cards": measured.get("cards", ()),
        },
        "now": time.time(),
    }
    return Page("now.html", "Now", values, live=True)


def shown_loop(loop: CycleLoop) -> dict[str, Any]:
    """Return a loop with its last decision: the action, its reason, and its earliest time (0: at once)."""
    decisions = [entry for entry in read_tail(loop_folder(loop.name) / JOURNAL) if entry["event"] == "decision"]
    last: Mapping[str, Any] = decisions[-1] if decisions else {}
    return {
        "loop": loop,
        "action": last.get("do", ""),
        "reason": last.get("reason", ""),
        "decided": last.get("now", 0.0),
        "not_before": last.get("again_at", 0.0) if last.get("do") == "wait" else 0.0,
    }


MAX_DECISIONS, MAX_STATIONS = 50, 50
_MEASURED = ("loss", "success")


def cycles_page(watcher: Watcher, request: PageRequest) -> Page:
    loops = [shown_loop(loop) for loop in overview([]).loops]
    return Page("cycles.html", "Cycles", {"loops": loops}, live=True)


def loop_page(watcher: Watcher, request: PageRequest) -> Page:
    name = request.named["name"]
    loop = next((loop for loop in overview([]).loops if loop.name == name), None)
    if loop is None:
        raise NotThere(f"no cycle is called {name}", hint="start one: hivetune cycle CONFIG")
    with closing(open_database()) as database:
        cycles = cycles_of(database, name)
        charts = list(quality_charts(database, name))
    entries = list(read_tail(loop_folder(name) / JOURNAL))
    decisions = [entry for entry in entries if entry["event"] in ("decision", "problem", "notice")]
    stations = [entry for entry in entries if entry["event"] == "end"]
    values = {
        "shown": shown_loop(loop),
        "decisions": [_decision(entry) for entry in reversed(decisions[-MAX_DECISIONS:])],
        "stations": list(reversed(stations[-MAX_STATIONS:])),
        "cycles": [_described(cycle) for cycle in reversed(cycles)],
        "charts": charts,
    }
    return Page("loop.html", f"Cycle {name}", values, live=True)


def quality_charts(database: sqlite3.Connection, name: str) -> Iterator[Markup]:
    """Yield a chart for each measure: the difference to the base with its 95 % interval, release by release."""
    shown: dict[str, list[tuple[str, float, float, float]]] = {measure: [] for measure in _MEASURED}
    for release in releases(database, name):
        # Its files are gone, or another version wrote them.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            judgement = read_json(release.folder / MANIFEST).get("judgement") or {"metrics": []}
            for metric in judgement["metrics"]:
                if metric["name"] in shown and metric["ci95"] is not None and metric["difference"] is not None:
                    difference, low, high = (float(value) for value in (metric["difference"], *metric["ci95"]))
                    aliases = f" {', '.join(release.aliases)}" if release.aliases else ""
                    shown[metric["name"]].append((f"{release.label}{aliases}", difference, low, high))
    for measure, rows in shown.items():
        better = "below zero is better" if measure == "loss" else "above zero is better"
        if rows:
            yield Markup(draw_intervals(rows, f"{measure}: tuned minus base with its 95 % interval; {better}"))


def _decision(entry: Mapping[str, Any]) -> tuple[float, str, str]:
    """Return when, what and why."""
    if entry["event"] == "decision":
        return float(entry["now"]), str(entry["do"]), str(entry["reason"])
    if entry["event"] == "notice":
        sent = f"not sent: {entry['problem']}" if entry.get("problem") else "sent"
        return float(entry["time"]), "notice", f"{entry['kind']}: {sent}"
    return float(entry["time"]), "problem", str(entry["words"])


def _described(cycle: CycleRow) -> dict[str, Any]:
    """Return a cycle with its gate's reasons, its rows, and the id of its run (empty without one)."""
    gate, rows = gate_of(cycle), {}
    recorded = (cycle.run / RECORD).exists()
    if recorded:
        with contextlib.suppress(UsageError):  # the page of the run says what is wrong with it
            rows = read_record(cycle.run).get("result", {}).get("rows", {})
    return {
        "row": cycle,
        "verdict": gate.get("verdict", ""),
        "reasons": gate.get("reasons", ()),
        "rows": rows,
        "run": run_id(cycle.run) if recorded else "",
    }

"""The command `top`: how busy processor, memory and cards are, and which run, cycle or gateway uses them."""

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import home, lock_holder
from hivetune.cli.output import MODE, clean, duration, emit, out, say, show, size, table
from hivetune.machine.telemetry import process_tree, sample
from hivetune.run.find import running_runs

_LOOK_S = 2.0
_FIRST_LOOK_S = 0.5  # processor time is measured between two looks


def top(
    every: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between two updates.")] = _LOOK_S,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit, also on a terminal.")] = False,
) -> None:
    """Show processor, memory, disk and cards, and which processes of Hivetune use them.

    A terminal is updated until Ctrl-C; a pipe gets the figures once.
    """
    before = _look()
    time.sleep(_FIRST_LOOK_S)
    if once or MODE.json or not out().is_terminal:
        document = _document(_look(), before)
        show(_machine_line(document))
        for index, card in enumerate(document["cards"]):
            show(card_line(index, card))
        table("", _COLUMNS, [_cells(each) for each in document["processes"]], numeric=_COLUMNS[2:])
        emit(document)
        return
    try:
        with Live(console=out(), auto_refresh=False) as live:
            while True:
                now = _look()
                live.update(_screen(_document(now, before)), refresh=True)
                before = now
                time.sleep(every)
    except KeyboardInterrupt:
        say()


def card_line(index: int, card: Mapping[str, Any]) -> str:
    """Return one card as a line; figures that its driver does not report are left out."""
    figures = [f"{size(card['used_bytes'])} of {size(card['memory_bytes'])}"] if "used_bytes" in card else []
    figures += [f"{card['busy_percent']} % busy"] if "busy_percent" in card else []
    figures += [f"{card['temperature_c']:.0f} °C"] if "temperature_c" in card else []
    figures += [f"{card['watts']:.0f} W"] if "watts" in card else []
    return f"card {index}: {', '.join(figures)}" + (" (throttled by heat or power)" if card.get("hot") else "")


_COLUMNS = ("what", "name", "process", "processor", "memory", "for")


def _look() -> dict[str, Any]:
    """Return a sample of the machine and of each process tree of Hivetune, by process id."""
    measured = sample(None, home() if home().exists() else Path.home())
    processes = {}
    for kind, name, pid in _who():
        if tree := process_tree(pid):
            processes[pid] = {"what": kind, "name": name, "pid": pid, **tree, "begun": _begun(pid)}
    return {**measured, "time": time.monotonic(), "percent": psutil.cpu_percent(None), "processes": processes}


def _who() -> list[tuple[str, str, int]]:
    holders = []
    if database_path().exists():
        with closing(open_database()) as database:
            holders += [("training", run.name, run) for run in running_runs(database)]
    holders += [("cycle", path.name, path) for path in sorted((home() / "cycles").glob("*")) if path.is_dir()]
    holders += [("serving", "gateway", home() / "gateway")]
    locks = [(kind, name, lock_holder(folder)) for kind, name, folder in holders]
    return [(kind, name, holder.pid) for kind, name, holder in locks if holder is not None]


def _begun(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return time.time()


def _document(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document; processor time is the difference between two looks."""
    seconds = max(now["time"] - before["time"], 1e-3)
    processes = []
    for pid, process in now["processes"].items():
        share = max(0.0, process["cpu_s"] - before["processes"].get(pid, process)["cpu_s"]) / seconds
        processes.append({**process, "cores": round(share, 2), "for_s": round(time.time() - process["begun"], 1)})
    memory = psutil.virtual_memory()
    return {
        "cores": psutil.cpu_count(),
        "cores_busy": round(now["percent"] / 100 * (psutil.cpu_count() or 1), 2),
        "memory_bytes": memory.total,
        "available_bytes": now["available_bytes"],
        "swap_used_bytes": now["swap_used_bytes"],
        "disk_free_bytes": now["disk_free_bytes"],
        "load": now["load"],
        "cards": now.get("cards", []),
        "processes": processes,
    }


def _machine_line(document: Mapping[str, Any]) -> str:
    used = document["memory_bytes"] - document["available_bytes"]
    return (
        f"{document['cores_busy']:.1f} of {document['cores']} cores busy, load {document['load']:.2f}; "
        f"{size(used)} of {size(document['memory_bytes'])} memory, {size(document['swap_used_bytes'])} swap; "
        f"{size(document['disk_free_bytes'])} of disk free"
    )


def _cells(process: Mapping[str, Any]) -> tuple[str, ...]:
    share, memory = f"{100 * process['cores']:.0f} %", size(process["resident_bytes"])
    return (process["what"], process["name"], str(process["pid"]), share, memory, duration(process["for_s"]))


def _screen(document: Mapping[str, Any]) -> Group:
    grid = Table(header_style="bold")
    for column in _COLUMNS:
        grid.add_column(column, justify="right" if column in _COLUMNS[2:] else "left", overflow="fold")
    for process in document["processes"]:
        grid.add_row(*(Text(clean(cell)) for cell in _cells(process)))
    lines = [_machine_line(document), *(card_line(index, card) for index, card in enumerate(document["cards"]))]
    below = grid if document["processes"] else Text("no process of Hivetune is running")
    return Group(*(Text(line) for line in lines), below)

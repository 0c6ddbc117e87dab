"""The commands on runs: `runs`, `show` (also followed, or its log), `stop` and `rm`."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.base.disk import size_of
from hivetune.base.journal import read_journal
from hivetune.base.paths import quoted
from hivetune.base.private import open_plain
from hivetune.base.typed import to_plain
from hivetune.cli.arguments import RunArgument
from hivetune.cli.output import MODE, Columns, Table, answer, clean, duration, emit, number, out, say, show, size
from hivetune.dashboard.watched import RunReading, WatchedRun
from hivetune.errors import UsageError
from hivetune.process.supervision import supervision
from hivetune.release.prune import delete, find_unused, remove_run
from hivetune.run.folder import EVENTS, SUPERVISOR_LOG, WORKER_LOG, read_resolved
from hivetune.run.status import (
    RunStatus,
    event_text,
    find_run,
    hold_run,
    known_runs,
    loss_curve,
    run_status,
    runs_below,
    shortest_name,
    stop_run,
)


def card_line(index: int, card: Mapping[str, Any]) -> str:
    """Return one card as a line; figures that its driver does not report are left out."""
    figures = [f"{size(card['used_bytes'])} of {size(card['memory_bytes'])}"] if "used_bytes" in card else []
    figures += [f"{card['busy_percent']} % busy"] if "busy_percent" in card else []
    figures += [f"{card['temperature_c']:.0f} °C"] if "temperature_c" in card else []
    figures += [f"{card['watts']:.0f} W"] if "watts" in card else []
    return f"card {index}: {', '.join(figures)}" + (" (throttled by heat or power)" if card.get("hot") else "")


TEXT_WIDTH, TEXT_HEIGHT = 48, 10
_MARKS = {"step": "·", "validation": "●"}


def text_chart(points: list[tuple[int, float, str]]) -> list[str]:
    """Return the loss curve as TEXT_HEIGHT lines of at most 60 columns; each column shows the mean of its steps."""
    if not points:
        return []
    last_step = max(step for step, _, _ in points)
    columns: dict[tuple[str, int], list[float]] = {}
    for step, loss, kind in points:
        columns.setdefault((kind, round((TEXT_WIDTH - 1) * step / max(1, last_step))), []).append(loss)
    means = {number: sum(losses) / len(losses) for number, losses in columns.items()}
    low, high = min(means.values()), max(means.values())
    grid = [[" "] * TEXT_WIDTH for _ in range(TEXT_HEIGHT)]
    for kind, column in sorted(means):  # validations last, since they are few and would be overdrawn
        share = (high - means[kind, column]) / ((high - low) or 1)
        grid[round(share * (TEXT_HEIGHT - 1))][column] = _MARKS[kind]
    label = {0: f"{high:.3f}", TEXT_HEIGHT - 1: f"{low:.3f}"}
    lines = [f"{label.get(row, ''):>9} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    axis = f"{'':9} 0{'step ' + str(last_step):>{TEXT_WIDTH}}"
    return [*lines, axis, f"{'':10} {_MARKS['step']} training  {_MARKS['validation']} validation, nats per token"]


def runs() -> None:
    """List all runs, newest first."""
    statuses = sorted(known_runs(), key=lambda status: status.created, reverse=True)
    if not statuses and not MODE.json:
        say("no runs yet; start one: hivetune train CONFIG")
    columns: Columns = {
        "run": lambda s: s.run.name,
        "state": "state",
        "steps": lambda s: f"{s.step}/{s.steps}",
        "loss": lambda s: number(s.loss),
        "validation": lambda s: number(s.validation_loss),
        "restarts": "restarts",
        "folder": "run",
    }
    problems = [
        f"{status.run.name}: {problem}"
        for status in statuses
        for problem in (status.problem, status.storage_problem)
        if problem
    ]
    answer({"runs": statuses}, *([Table(columns, statuses)] if statuses else []), *problems)


def show_run(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the run until it ends.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Print the end of its logs.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Lines of each log.")] = 50,
) -> None:
    """Show one run: state, losses, speed, and each fault with its remedy; or follow it, or print its log.

    Ctrl-C ends --follow, not the run. With --json each change that it sees is one line of JSON.
    """
    if follow and log:
        raise UsageError("--follow and --log exclude each other", hint="run them one after the other")
    folder = find_run(run)
    if log:
        _show_log(folder, lines)
    elif follow:
        _follow(folder)
    else:
        _show_state(folder)


def _show_state(folder: Path) -> None:
    status = run_status(folder)
    choices, computed = _choices(folder)
    events = list(read_journal(folder / EVENTS))
    lines = [status_line(status), computed, *text_chart(loss_curve(folder))]
    sample: dict[str, Any] | None = None
    for entry in events:
        if text := event_text(entry):
            lines.append(f"  {time.strftime('%d %b %H:%M:%S', time.localtime(entry['time']))}  {text}")
        if entry["event"] == "sample":
            sample = entry
        elif entry["event"] == "failure" and sample is not None:
            lines.append(f"{'':19}{_machine_then(sample, entry['time'])}")
    answer({**to_plain(status), "choices": choices, "events": events}, *lines)


def _choices(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the choices of the run, and a line for people. A damaged config is reported, not fatal."""
    try:
        config, choices = read_resolved(folder)
    except UsageError as error:
        return None, f"  cannot read its choices: {error.message}"
    if choices.dtype is None:
        return choices.made(), "  device and precision not chosen yet"
    setting = " (dtype: auto)" if config.dtype == "auto" else ""
    path = f", {choices.path} path" if choices.path else ""
    return choices.made(), f"  computed in {choices.dtype}{setting} on {choices.device}{path}"


def _show_log(folder: Path, lines: int) -> None:
    """Show the last lines of a run's worker (child.log) and of its supervisor (supervisor.log)."""
    logs = {}
    for path in (folder / SUPERVISOR_LOG, folder / WORKER_LOG):
        if path.exists():
            with open(open_plain(path), encoding="utf-8", errors="replace") as file:
                logs[path.name] = file.read().splitlines()[-lines:]
    if not any(logs.values()):
        say("the log is empty")
    shown = [text for name, tail in logs.items() if tail for text in (f"{folder / name}:", *(f"  {t}" for t in tail))]
    answer({"run": folder, "logs": logs}, *shown)


def stop(run: RunArgument) -> None:
    """Stop a run after it has saved a checkpoint, and wait until it has ended."""
    folder = find_run(run)
    limits = supervision()
    stopped = stop_run(folder, limits.save_timeout_s + limits.hang_floor_s)
    status = run_status(folder)
    say(status_line(status) if stopped else f"{folder} is not running")
    emit({**to_plain(status), "stopped": stopped})


def status_line(status: RunStatus) -> str:
    parts = (
        f"{status.run.name}: {status.state}",
        f"step {status.step} of {status.steps}",
        "" if status.loss is None else f"loss {number(status.loss)}",
        "" if status.validation_loss is None else f"validation {number(status.validation_loss)}",
        "" if status.left_s is None else f"{duration(status.left_s)} left",
        f"{status.restarts} restarts" if status.restarts else "",
        f"{status.quarantined} rows quarantined" if status.quarantined else "",
        f"{status.damaged_lines} damaged journal lines skipped" if status.damaged_lines else "",
        status.storage_problem,
        status.problem,
        f"continue it: hivetune train {shortest_name(status.run)}" if status.state == "interrupted" else "",
    )
    return ", ".join(part for part in parts if part)


def _machine_then(sample: Mapping[str, Any], failed_at: float) -> str:
    """Return the last measurements before a fault, which hint at its cause."""
    parts = [f"{max(0, failed_at - sample['time']):.0f} s before: {size(sample['available_bytes'])} of memory free"]
    if "resident_bytes" in sample:
        parts.append(f"the worker held {size(sample['resident_bytes'])}")
    parts.append(f"{size(sample['disk_free_bytes'])} of disk free")
    for index, card in enumerate(sample.get("cards", ())):
        parts.append(card_line(index, card))
    return "; ".join(parts)


_WATCH_S = 1.0
_SHOWN_EVENTS = 6


def _follow(folder: Path) -> None:
    """Follow a run until it ends. Ctrl-C ends only this; under --json each change is one line."""
    try:
        if out().is_terminal and not MODE.json:
            _draw(folder)
        else:
            _print_changes(folder)
    except KeyboardInterrupt:
        say("the run continues" if run_status(folder).state == "running" else "")


def _looks(folder: Path) -> Iterator[tuple[RunStatus, RunReading, list[str]]]:
    """Yield status, journals and new events of a run each second, until it has ended. Only new lines are read."""
    run = WatchedRun(folder)
    seen: int | None = None
    while True:
        status = run.status()
        new = 0 if seen is None else run.read.num_events - seen
        seen = run.read.num_events
        yield status, run.read, [text for _, text in list(run.read.events)[-new:]] if new > 0 else []
        if status.state != "running":
            return
        time.sleep(_WATCH_S)


def _draw(folder: Path) -> None:
    """Draw status, curve, card and newest events in place until the run ends."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    events: deque[str] = deque(maxlen=_SHOWN_EVENTS)
    with Live(console=out(), auto_refresh=False) as live:
        for status, journals, new in _looks(folder):
            events += new
            lines = [*_screen(status, journals), *events]
            live.update(Group(*(Text(clean(line), no_wrap=True, overflow="ellipsis") for line in lines if line)))
            live.refresh()


def _screen(status: RunStatus, journals: RunReading) -> list[str]:
    curves = (("step", journals.curves["loss"]), ("validation", journals.curves["validation"]))
    points = [(bucket.step, bucket.mean, kind) for kind, curve in curves for bucket in curve.buckets]
    speed = f"{number(status.tokens_per_second, 0)} tokens/s" if status.tokens_per_second is not None else ""
    machine = [card_line(index, card) for index, card in enumerate(journals.sample.get("cards", ()))]
    return [status_line(status), *text_chart(points), "; ".join(part for part in (speed, *machine) if part)]


def _print_changes(folder: Path) -> None:
    last: tuple[int, str] | None = None
    for status, _, new in _looks(folder):
        for text in new:
            show(text)
        if (status.step, status.state) != last:
            last = (status.step, status.state)
            show(status_line(status))
            emit(status)


def rm(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Names or folders of runs, or 'last'.")
    ] = None,
    unused: Annotated[
        bool, typer.Option("--unused", help="Delete what no run or release needs and what can be made again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete runs with their checkpoints and adapters; releases registered from them are kept.

    With --unused delete files that nothing needs instead. What would be deleted is listed first, and you are asked.
    """
    if bool(runs) == unused:
        raise UsageError("nothing to delete is named", hint="give runs, or --unused alone")
    if unused:
        _remove_unused(yes=yes)
        return
    folders = sorted({find_run(name) for name in runs or ()}, key=lambda run: -len(run.parts))  # the inner ones first
    for folder in folders:
        if inner := [str(run) for run in runs_below(folder) if run not in folders]:
            hint = f"delete them too: hivetune rm {' '.join(map(quoted, [folder, *inner]))}"
            raise UsageError(f"{folder} holds other runs: {', '.join(inner)}", hint=hint)
    for folder in folders:
        with hold_run(folder):  # one that is in use is refused before another is deleted
            show(f"{folder}: {size(size_of(folder))}")
    _ask(f"delete {'this run' if len(folders) == 1 else f'these {len(folders)} runs'}", yes=yes)
    with closing(open_database()) as database:
        freed = sum(remove_run(database, folder) for folder in folders)
    show(f"{size(freed)} freed")
    emit({"deleted": folders, "size_bytes": freed})


def _remove_unused(*, yes: bool) -> None:
    with closing(open_database()) as database:
        unused = find_unused(database)
        total = sum(entry.size_bytes for entry in unused)
        document = {"pruned": yes, "size_bytes": total, "unused": unused}
        if not unused:
            answer(document, "nothing to delete")
            return
        if not MODE.json:
            columns: Columns = {
                "what": "what",
                "where": "path",
                "size": lambda entry: size(entry.size_bytes),
                "why": "why",
            }
            answer({}, Table(columns, unused), f"{size(total)} can be freed")
            _ask("delete all of them", yes=yes)
        if yes or not MODE.json:
            for entry in unused:
                delete(database, entry)
            show(f"{size(total)} freed")
    emit(document)


def _ask(question: str, *, yes: bool) -> None:
    """Raise UsageError if there is no terminal to ask on, and end the command if the answer is no."""
    if yes:
        return
    if MODE.json or not sys.stdin.isatty():
        raise UsageError("nothing was deleted: no terminal to confirm on", hint="give --yes")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was deleted")
        raise typer.Exit

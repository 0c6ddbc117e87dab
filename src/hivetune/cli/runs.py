"""The commands on runs: `runs`, `show` (also followed, or its log), `stop` and `rm`."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from hivetune.base.database import open_database
from hivetune.base.disk import size_of
from hivetune.base.journal import read_journal
from hivetune.base.paths import quoted
from hivetune.base.private import open_plain
from hivetune.base.typed import to_plain
from hivetune.cli.arguments import RunArgument
from hivetune.cli.output import MODE, Note, Table, answer, clean, console, duration, emit, number, say, show, size
from hivetune.dashboard.watched import RunReading, WatchedRun
from hivetune.errors import UsageError
from hivetune.process.launch import supervision
from hivetune.release.prune import delete, find_unused, remove_run
from hivetune.run.folder import EVENTS, SUPERVISOR_LOG, WORKER_LOG, read_resolved
from hivetune.run.status import (
    RunStatus,
    event_text,
    find_run,
    hold_run,
    known_runs,
    loss_curve,
    run_folders,
    run_status,
    shortest_name,
    stop_run,
)

WATCH_S = 1.0
SHOWN_EVENTS = 6
CHART_WIDTH, CHART_HEIGHT = 48, 10
MARKS = {"step": "·", "validation": "●"}


def runs() -> None:
    """List all runs, newest first."""
    statuses = sorted(known_runs(), key=lambda status: status.created, reverse=True)
    problems = [(s.run.name, problem) for s in statuses for problem in (s.problem, s.storage_problem) if problem]
    cells = [
        (s.run.name, s.state, f"{s.step}/{s.steps}", s.loss, s.validation_loss, s.restarts, s.run) for s in statuses
    ]
    nothing = "" if MODE.json else Note("no runs yet; start one: hivetune train CONFIG")
    table = Table("run, state, steps, loss|3, validation|3, restarts, folder", cells)
    answer({"runs": statuses}, table if cells else nothing, *(f"{name}: {problem}" for name, problem in problems))


def show_run(
    run: RunArgument,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow the run until it ends.")] = False,
    log: Annotated[bool, Option("--log", help="Print the end of its logs.")] = False,
    lines: Annotated[int, Option("-n", "--lines", min=1, help="Lines of each log.")] = 50,
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
        try:
            _draw(folder) if console().is_terminal and not MODE.json else _print_changes(folder)
        except KeyboardInterrupt:
            say("the run continues" if run_status(folder).state == "running" else "")
    else:
        _show_state(folder)


def _show_state(folder: Path) -> None:
    """Show the state of a run. A damaged config is reported, not fatal."""
    status, choices = run_status(folder), None
    try:
        config, chosen = read_resolved(folder)
        choices = chosen.made()
        auto = " (dtype: auto)" if config.dtype == "auto" else ""
        computed = f"  computed in {chosen.dtype}{auto} on {chosen.device}"
        computed += f", {chosen.path} path" if chosen.path else ""
        computed = computed if chosen.dtype else "  device and precision not chosen yet"
    except UsageError as error:
        computed = f"  cannot read its choices: {error.message}"
    events, sample = list(read_journal(folder / EVENTS)), None
    lines = [status_line(status), computed, *text_chart(loss_curve(folder))]
    for entry in events:
        if text := event_text(entry):
            lines.append(f"  {time.strftime('%d %b %H:%M:%S', time.localtime(entry['time']))}  {text}")
        if entry["event"] == "failure" and sample is not None:
            lines.append(f"{'':19}{_machine_then(sample, entry['time'])}")
        sample = entry if entry["event"] == "sample" else sample
    answer({**to_plain(status), "choices": choices, "events": events}, *lines)


def status_line(status: RunStatus) -> str:
    """Return the state of a run as one line."""
    told = (
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
    return ", ".join(filter(None, told))


def _machine_then(sample: Mapping[str, Any], failed_at: float) -> str:
    """Return the last measurements before a fault, which hint at its cause."""
    told = [f"{max(0, failed_at - sample['time']):.0f} s before: {size(sample['available_bytes'])} of memory free"]
    told += [f"the worker held {size(sample['resident_bytes'])}"] if "resident_bytes" in sample else []
    return "; ".join([*told, f"{size(sample['disk_free_bytes'])} of disk free", *_cards(sample)])


def _cards(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield each card as a line; figures that its driver does not report are left out."""
    for index, card in enumerate(sample.get("cards", ())):
        figures = [f"{size(card['used_bytes'])} of {size(card['memory_bytes'])}"] if "used_bytes" in card else []
        named = (("busy_percent", "{:.0f} % busy"), ("temperature_c", "{:.0f} °C"), ("watts", "{:.0f} W"))
        figures += [text.format(card[key]) for key, text in named if key in card]
        yield f"card {index}: {', '.join(figures)}" + (" (throttled by heat or power)" if card.get("hot") else "")


def text_chart(points: list[tuple[int, float, str]]) -> list[str]:
    """Return the loss curve as CHART_HEIGHT lines of at most 60 columns; each column shows the mean of its steps."""
    if not points:
        return []
    last_step = max(step for step, _, _ in points)
    columns: dict[tuple[str, int], list[float]] = {}
    for step, loss, kind in points:
        columns.setdefault((kind, round((CHART_WIDTH - 1) * step / max(1, last_step))), []).append(loss)
    means = {place: sum(losses) / len(losses) for place, losses in columns.items()}
    low, high = min(means.values()), max(means.values())
    grid = [[" "] * CHART_WIDTH for _ in range(CHART_HEIGHT)]
    for kind, column in sorted(means):  # validations last, since they are few and would be overdrawn
        share = (high - means[kind, column]) / ((high - low) or 1)
        grid[round(share * (CHART_HEIGHT - 1))][column] = MARKS[kind]
    label = {0: f"{high:.3f}", CHART_HEIGHT - 1: f"{low:.3f}"}
    lines = [f"{label.get(row, ''):>9} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    axis = f"{'':9} 0{'step ' + str(last_step):>{CHART_WIDTH}}"
    return [*lines, axis, f"{'':10} {MARKS['step']} training  {MARKS['validation']} validation, nats per token"]


def _show_log(folder: Path, lines: int) -> None:
    """Show the last lines of a run's worker (child.log) and of its supervisor (supervisor.log)."""
    logs = {}
    for path in (folder / SUPERVISOR_LOG, folder / WORKER_LOG):
        if path.exists():
            with open(open_plain(path), encoding="utf-8", errors="replace") as file:
                logs[path.name] = file.read().splitlines()[-lines:]
    shown = ["\n  ".join([f"{folder / name}:", *tail]) for name, tail in logs.items() if tail]
    answer({"run": folder, "logs": logs}, *(shown or [Note("the log is empty")]))


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
        time.sleep(WATCH_S)


def _draw(folder: Path) -> None:
    """Draw status, curve, card and newest events in place until the run ends."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    events: deque[str] = deque(maxlen=SHOWN_EVENTS)
    with Live(console=console(), auto_refresh=False) as live:
        for status, journals, new in _looks(folder):
            events += new
            curves = (("step", journals.curves["loss"]), ("validation", journals.curves["validation"]))
            points = [(bucket.step, bucket.mean, kind) for kind, curve in curves for bucket in curve.buckets]
            speed = f"{number(status.tokens_per_second, 0)} tokens/s" if status.tokens_per_second is not None else ""
            machine = "; ".join(filter(None, (speed, *_cards(journals.sample))))
            lines = [status_line(status), *text_chart(points), machine, *events]
            live.update(Group(*(Text(clean(line), no_wrap=True, overflow="ellipsis") for line in lines if line)))
            live.refresh()


def _print_changes(folder: Path) -> None:
    last: tuple[int, str] | None = None
    for status, _, new in _looks(folder):
        for text in new:
            show(text)
        if (status.step, status.state) != last:
            last = (status.step, status.state)
            show(status_line(status))
            emit(status)


def stop(run: RunArgument) -> None:
    """Stop a run after it has saved a checkpoint, and wait until it has ended."""
    folder, limits = find_run(run), supervision()
    stopped = stop_run(folder, limits.save_timeout_s + limits.hang_floor_s)
    status = run_status(folder)
    line = status_line(status) if stopped else f"{folder} is not running"
    answer({**to_plain(status), "stopped": stopped}, Note(line))


def rm(
    runs: Annotated[list[str] | None, Argument(metavar="RUN", help="Names or folders of runs, or 'last'.")] = None,
    unused: Annotated[bool, Option("--unused", help="Delete what nothing needs and what can be made again.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
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
        if inner := [str(run) for run in run_folders() if folder in run.parents and run not in folders]:
            hint = f"delete them too: hivetune rm {' '.join(map(quoted, [folder, *inner]))}"
            raise UsageError(f"{folder} holds other runs: {', '.join(inner)}", hint=hint)
    for folder in folders:
        with hold_run(folder):  # one that is in use is refused before another is deleted
            show(f"{folder}: {size(size_of(folder))}")
    _ask(f"delete {'this run' if len(folders) == 1 else f'these {len(folders)} runs'}", yes=yes)
    with closing(open_database()) as database:
        freed = sum(remove_run(database, folder) for folder in folders)
    answer({"deleted": folders, "size_bytes": freed}, f"{size(freed)} freed")


def _remove_unused(*, yes: bool) -> None:
    with closing(open_database()) as database:
        unused = find_unused(database)
        total = sum(entry.size_bytes for entry in unused)
        document = {"pruned": yes, "size_bytes": total, "unused": unused}
        if not unused or (MODE.json and not yes):
            answer(document, "nothing to delete")
            return
        if not MODE.json:
            answer({}, Table("what, where=path, size=size_bytes|size, why", unused), f"{size(total)} can be freed")
        _ask("delete all of them", yes=yes)
        for entry in unused:
            delete(database, entry)
    answer(document, f"{size(total)} freed")


def _ask(question: str, *, yes: bool) -> None:
    """Raise UsageError if there is no terminal to ask on, and end the command if the answer is no."""
    if yes:
        return
    if MODE.json or not sys.stdin.isatty():
        raise UsageError("nothing was deleted: no terminal to confirm on", hint="give --yes")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was deleted")
        raise typer.Exit

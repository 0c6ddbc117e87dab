"""`hivetune runs`, `show`, `logs`, `stop`, `resume`: look after runs, also in the background or crashed."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.journal import read_journal
from hivetune.base.private import open_plain
from hivetune.cli.arguments import RunArgument
from hivetune.cli.chart import text_chart
from hivetune.cli.output import MODE, duration, emit, number, say, size, table
from hivetune.cli.output import show as display
from hivetune.cli.top import card_line
from hivetune.cli.training import measure_and_train, show_training
from hivetune.cluster.carry import carry_run
from hivetune.config import override_config
from hivetune.dashboard.exporters.follow import reports_of
from hivetune.errors import UsageError
from hivetune.process.detach import start_detached, systemd_unit
from hivetune.process.launch import Ahead
from hivetune.run.choices import read_resolved
from hivetune.run.find import find_run, known_runs, shortest_name
from hivetune.run.folder import EVENTS, SUPERVISOR_LOG, WORKER_LOG
from hivetune.run.status import RunStatus, loss_curve, run_status, stop_run
from hivetune.run.tell import tell_event
from hivetune.train.open import load_run


def runs() -> None:
    """All runs, newest first: state, steps, losses."""
    statuses = sorted(known_runs(), key=lambda status: status.created, reverse=True)
    if not MODE.json and not statuses:
        say("no runs yet; start one: hivetune train CONFIG")
        return
    rows = [
        (s.run.name, s.state, f"{s.step}/{s.steps}", number(s.loss), number(s.validation_loss), s.restarts, s.run)
        for s in statuses
    ]
    table("", ("run", "state", "steps", "loss", "validation", "restarts", "folder"), rows, numeric=("steps", "loss"))
    for status in statuses:
        for problem in (status.problem, status.storage_problem):
            if problem:
                say(f"{status.run.name}: {problem}")
    emit({"runs": [status.document() for status in statuses]})


def show(run: RunArgument) -> None:
    """One run: state, losses, speed, faults and what was done about them."""
    folder = find_run(run)
    status = run_status(folder)
    display(status_line(status))
    choices, how = _choices(folder)
    display(how)
    for line in text_chart(loss_curve(folder)):
        display(line)
    reports = reports_of(folder)
    for report in reports:
        problem = f"; {report.problem}" if report.problem else ""
        display(f"  {report.points} points in {report.target} at {report.place}{problem}")
    events = list(read_journal(folder / EVENTS))
    sample: dict[str, Any] | None = None
    for entry in events:
        if told := tell_event(entry):
            display(f"  {time.strftime('%d %b %H:%M:%S', time.localtime(entry['time']))}  {told}")
        if entry["event"] == "sample":
            sample = entry
        elif entry["event"] == "failure" and sample is not None:
            display(f"{'':19}{_machine_then(sample, entry['time'])}")
    more = {"choices": choices, "reports": [asdict(report) for report in reports], "events": events}
    emit({**status.document(), **more})


def _choices(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """What the run computes with, and a line that says it; a damaged config is said, not fatal."""
    try:
        config, choices = read_resolved(folder)
    except UsageError as error:
        return None, f"  its choices are unreadable: {error.message}"
    if choices.dtype is None:
        return choices.made(), "  device and precision are not chosen yet"
    wanted = " (dtype: auto)" if config.dtype == "auto" else ""
    path = f", {choices.path} path" if choices.path else ""
    return choices.made(), f"  computed in {choices.dtype}{wanted} on {choices.device}{path}"


def logs(
    run: RunArgument,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="How many of the last lines.")] = 50,
) -> None:
    """What a run's worker (child.log) and its supervisor in the background (supervisor.log) printed."""
    folder = find_run(run)
    documents = {}
    for name in (SUPERVISOR_LOG, WORKER_LOG):
        path = folder / name
        if path.exists():
            with open(open_plain(path), encoding="utf-8", errors="replace") as file:
                tail = file.read().splitlines()[-lines:]
            documents[name] = tail
            for line in (f"{path}:", *(f"  {line}" for line in tail)) if tail else ():
                display(line)
    if not any(documents.values()):
        say("its processes printed nothing")
    emit({"run": str(folder), "logs": documents})


def stop(run: RunArgument) -> None:
    """Stop a run after a clean checkpoint; returns when it has ended."""
    folder = find_run(run)
    settings = read_resolved(folder)[0].supervise  # not more: a run whose model is gone can be stopped too
    stopped = stop_run(folder, settings.save_timeout_s + settings.hang_floor_s)
    status = run_status(folder)
    say(status_line(status) if stopped else f"{folder} is not running")
    emit({**status.document(), "stopped": stopped})


def resume(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Change supervise.* or report_to.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="In the background.")] = False,
    unit: Annotated[bool, typer.Option("--unit", help="Only print a systemd user unit that does it.")] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="HOST:PORT", help="On a free device of this cluster.")
    ] = None,
) -> None:
    """Go on with a run that was stopped, failed or interrupted, from its newest good checkpoint."""
    folder = find_run(run)
    if on is not None:
        if overrides or detach or unit:
            raise UsageError("--on can't be combined with --set, --detach or --unit")
        summary = carry_run(load_run(folder), on, say)
        show_training(summary)
        emit(summary)
        return
    for override in overrides or ():
        if not override.startswith(("supervise.", "report_to=")):
            raise UsageError(f"--set {override}: only supervise.* and report_to can be changed for a run that exists")
    if unit:
        text = systemd_unit(folder, overrides or ())
        display(text)
        name = f"hivetune-{folder.name}"
        say(f"save it as ~/.config/systemd/user/{name}.service, then: systemctl --user enable --now {name}")
        emit({"run": str(folder), "unit": text})
        return
    if detach:
        start_detached(folder, overrides or ())
        say(f"training goes on in the background\nfollow it: hivetune watch {shortest_name(folder)}")
        emit({"run": str(folder), "status": "started"})
        return
    with Ahead() as ahead:
        ahead.start()
        opened = load_run(folder)
        summary = measure_and_train(replace(opened, config=override_config(opened.config, overrides or ())), ahead)
    show_training(summary)
    emit(summary)


def status_line(status: RunStatus) -> str:
    parts = [f"{status.run.name}: {status.state}", f"step {status.step} of {status.steps}"]
    if status.loss is not None:
        parts.append(f"loss {number(status.loss)}")
    if status.validation_loss is not None:
        parts.append(f"validation {number(status.validation_loss)}")
    if status.left_s is not None:
        parts.append(f"{duration(status.left_s)} left")
    if status.restarts:
        parts.append(f"{status.restarts} restarts")
    if status.quarantined:
        parts.append(f"{status.quarantined} rows quarantined")
    if status.damaged_lines:
        parts.append(f"{status.damaged_lines} damaged lines of its journals left out")
    if status.storage_problem:
        parts.append(status.storage_problem)
    if status.problem:
        parts.append(status.problem)
    if status.state == "interrupted":
        parts.append(f"go on with: hivetune resume {shortest_name(status.run)}")
    return ", ".join(parts)


def _machine_then(sample: Mapping[str, Any], failed_at: float) -> str:
    """What was measured last before a fault, for who looks for its cause."""
    parts = [f"{max(0, failed_at - sample['time']):.0f} s before: {size(sample['available_bytes'])} of memory left"]
    if "resident_bytes" in sample:
        parts.append(f"the worker held {size(sample['resident_bytes'])}")
    parts.append(f"{size(sample['disk_free_bytes'])} of disk")
    for index, card in enumerate(sample.get("cards", ())):
        parts.append(card_line(index, card))
    return "; ".join(parts)

"""The commands on runs: `runs`, `show`, `rm`; and `config`."""

import json
import sys
import time
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
from hivetune.cli.output import MODE, Note, Table, answer, emit, facts, moment, present, say, show, size, value_text
from hivetune.config import RunConfig, known_settings
from hivetune.dashboard.watched import WatchedRun
from hivetune.errors import UsageError
from hivetune.release.prune import delete, find_unused, remove_run
from hivetune.run.folder import EVENTS, SUPERVISOR_LOG, WORKER_LOG, read_resolved
from hivetune.run.status import event_text, find_run, known_runs, lock_idle_run, run_folders, run_status, shortest_name

WATCH_S = 1.0  # a step of a small model takes as long
LOG_LINES = 50  # a traceback with its cause
# The figures of the machine in the samples of a run.
SAMPLE = ("available_bytes", "resident_bytes", "disk_free_bytes", "cards")
COMPUTED = "dtype device path kernels"
STATE = "state step steps pid loss validation_loss tokens_per_second left_s restarts quarantined last_fault "
STATE += "damaged_lines storage_problem problem"


def runs() -> None:
    """List all runs, newest first."""
    statuses = list(known_runs())[::-1]
    problems = [(s.run.name, problem) for s in statuses for problem in (s.problem, s.storage_problem) if problem]
    lines = [{**to_plain(status), "name": status.run.name} for status in statuses]
    table = Table("run=name state step steps loss validation_loss restarts folder=run", lines)
    nothing = Note("" if MODE.json else "no runs yet; start one: hivetune train CONFIG")
    answer({"runs": statuses}, table if lines else nothing, *(f"{name}: {problem}" for name, problem in problems))


def show_run(
    run: RunArgument,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow the run until it ends.")] = False,
    log: Annotated[bool, Option("--log", help="Print the last lines of the run's logs.")] = False,
) -> None:
    """Show one run: state, losses, speed, and each fault with its remedy; or follow it, or print its log.

    Ctrl-C ends --follow, not the run. With --follow --json each change is printed as a line of JSON.
    """
    if follow and log:
        raise UsageError("--follow and --log exclude each other", hint="run them one after the other")
    folder = find_run(run)
    if log:
        _show_log(folder)
    elif follow:
        try:
            _follow(folder)
        except KeyboardInterrupt:
            say("the run continues" if run_status(folder).state == "running" else "")
    else:
        _show_state(folder)


def _show_state(folder: Path) -> None:
    document, choices = to_plain(run_status(folder)), None
    computed: Any = None
    try:
        choices = read_resolved(folder)[1].as_dict()
        computed = {name: choices[name] for name in COMPUTED.split() if name in choices}
    except UsageError as error:  # a damaged config is reported, and hides nothing else
        computed = f"cannot read its choices: {error.message}"
    events = list(read_journal(folder / EVENTS))
    told = facts({"run": folder.name, **{key: document[key] for key in STATE.split()}, "computed": computed})
    interrupted = document["state"] == "interrupted"
    following = f"continue it: hivetune train {shortest_name(folder)}" if interrupted else ""
    answer({**document, "choices": choices, "events": events}, told, *_events_text(events), following)


def _events_text(events: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each event, and below a fault the free memory and load at that time, which hint at the cause."""
    sample: dict[str, Any] = {}
    for entry in events:
        if text := event_text(entry):
            yield f"{moment(entry['time'])}  {text}"
        if entry["event"] == "failure" and sample:
            yield f"{'':18}{max(0, entry['time'] - sample['time']):.0f} s before: {_machine_text(sample)}"
        sample = entry if entry["event"] == "sample" else sample


def _machine_text(sample: Mapping[str, Any]) -> str:
    """Return the figures of machine and cards in one sample; those that a driver does not report are left out."""
    return value_text("", {key: sample[key] for key in SAMPLE if sample.get(key)})


def _show_log(folder: Path) -> None:
    """Show the last lines of a run's worker (child.log) and of its supervisor (supervisor.log)."""
    logs = {}
    for path in (folder / SUPERVISOR_LOG, folder / WORKER_LOG):
        if path.exists():
            with open(open_plain(path), encoding="utf-8", errors="replace") as file:  # a planted link is not followed
                logs[path.name] = file.read().splitlines()[-LOG_LINES:]
    shown = ["\n  ".join([f"{folder / name}:", *tail]) for name, tail in logs.items() if tail]
    answer({"run": folder, "logs": logs}, *(shown or [Note("the log is empty")]))


def _follow(folder: Path) -> None:
    """Print a line for each event and each new step until the run has ended."""
    run, last = WatchedRun(folder), ("", 0)
    run.status()
    seen = run.read.num_events
    while True:
        status = run.status()
        # Only what was appended is read.
        new, seen = run.read.num_events - seen, run.read.num_events
        present(*(text for _, text in list(run.read.events)[-new:] if new))
        if (status.state, status.step) != last:
            last = (status.state, status.step)
            figures = {"loss": status.loss, "validation": status.validation_loss, "left_s": status.left_s}
            known = value_text("", {key: value for key, value in figures.items() if value is not None})
            told = f"{status.state}, step {status.step} of {status.steps}" + (f", {known}" if known != "-" else "")
            show("; ".join([told, *([_machine_text(run.read.sample)] if run.read.sample else [])]))
            emit(status)
        if status.state != "running":
            return
        time.sleep(WATCH_S)


def rm(
    runs: Annotated[list[str] | None, Argument(metavar="RUN", help="Names or folders of runs, or 'last'.")] = None,
    unused: Annotated[
        bool, Option("--unused", help="Delete files that are no longer needed and can be made again.")
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete runs with their checkpoints and adapters; releases registered from them are kept.

    With --unused, delete files that are no longer needed instead. The command lists what it would delete, and asks.
    """
    if bool(runs) == unused:
        raise UsageError("no run to delete is given", hint="give runs, or --unused alone")
    if unused:
        _remove_unused(yes=yes)
    else:
        _remove_runs(runs or [], yes=yes)


def _remove_runs(names: list[str], *, yes: bool) -> None:
    folders = sorted({find_run(name) for name in names}, key=lambda run: -len(run.parts))  # the inner ones first
    for folder in folders:
        if inner := [str(run) for run in run_folders() if folder in run.parents and run not in folders]:
            hint = f"delete them too: hivetune rm {' '.join(map(quoted, [folder, *inner]))}"
            raise UsageError(f"{folder} contains other runs: {', '.join(inner)}", hint=hint)
    for folder in folders:
        with lock_idle_run(folder):  # one that is in use is refused before another is deleted
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
        if not unused or (MODE.json and not yes):  # a program cannot be asked: it gets the list
            answer(document, "nothing to delete")
            return
        present(Table("what where=path size_bytes why", unused), f"{size(total)} can be freed")
        _ask("delete all of them", yes=yes)
        for entry in unused:
            delete(database, entry)
    answer(document, f"{size(total)} freed")


def _ask(question: str, *, yes: bool) -> None:
    """Raise UsageError if there is no terminal to ask on, and end the command if the answer is no."""
    if yes:
        return
    if MODE.json or not sys.stdin.isatty():  # cron would wait for ever
        raise UsageError("nothing was deleted: there is no terminal on which to confirm", hint="give --yes")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was deleted")
        raise typer.Exit


def config(schema: Annotated[bool, Option("--schema", help="Print the JSON Schema.")] = False) -> None:
    """List the settings of the YAML config with their defaults, or print their JSON Schema for an editor."""
    document, settings = RunConfig.model_json_schema(), known_settings()
    cells = [(setting.key, setting.default.strip('"') or "required", setting.meaning) for setting in settings]
    answer(
        {"json_schema": document, "keys": [setting.key for setting in settings], "settings": settings},
        json.dumps(document, indent=1) if schema else Table("setting default meaning", cells),
    )

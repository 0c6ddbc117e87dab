"""The command `cycle`: run the loop, look once, or control a loop that runs."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.base.disk import lock_holder
from hivetune.cli.arguments import model_folder
from hivetune.cli.output import duration, emit, emit_failed, parts, plain_progress, say, show, show_unit, size, table
from hivetune.config import RunConfig, load_config
from hivetune.cycle.decide import STATIONS, Observation, decide
from hivetune.cycle.ledger import (
    NOW,
    PAUSED,
    act_text,
    acts_of,
    admit_rows,
    cycles_of,
    loop_folder,
    loop_names,
    outcome_of,
    suspect_rows,
)
from hivetune.cycle.loop import Listener, Loop, opened, release_name
from hivetune.cycle.observe import observe
from hivetune.cycle.pool import LookCache
from hivetune.errors import DoesNotFit, HivetuneError, UsageError
from hivetune.process.detach import cycle_unit

SPOKEN = ("status", "pause", "resume", "now", "admit")
SHOWN_ACTS = 5


def cycle(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|status|pause|resume|now|admit", help="A YAML config starts the loop; the others control it."
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the loop to control; default: the only one.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Exit when there is nothing to do.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done now, and why.")] = False,
    unit: Annotated[bool, typer.Option("--unit", help="Print a systemd user unit for this loop.")] = False,
) -> None:
    """Train, compare, promote and watch whenever new rows arrive, until stopped.

    It may be stopped or killed at any time; the same command continues. Control a running loop with status, pause and
    resume; `now` starts a cycle at the next new row; `admit` accepts rows that were set aside as suspect.
    """
    if what in SPOKEN:
        if overrides or once or dry_run or unit:
            raise UsageError(f"cycle {what} takes no options", hint="options belong to: hivetune cycle CONFIG")
        _control(what, name)
        return
    if name is not None:
        message = f"cycle {what} {name}: a config takes no NAME; it has cycle.name"
        raise UsageError(message, hint=f"give NAME only after one of: {', '.join(SPOKEN)}")
    config = load_config(Path(what), overrides or ())
    if unit:
        release_name(config)
        show_unit(cycle_unit(Path(what), overrides or ()), "hivetune-cycle")
    elif dry_run:
        _look(config)
    else:
        with opened(config, Listener(say, partial(plain_progress, unit=""))) as loop:
            _run(loop, once=once)


def _run(loop: Loop, *, once: bool) -> None:
    say(f"loop of {loop.name}; stop with Ctrl-C, continue with the same command")
    action = loop.run(once=once)
    with closing(open_database()) as database:
        cycles, acts = cycles_of(database, loop.name), acts_of(database, loop.name)
    document = {"name": loop.name, "action": action, "cycles": [parts(cycle, *_PARTS) for cycle in cycles[-1:]]}
    last = acts[-1] if acts else None
    if last is not None and (last.outcome == "failed" or last.details.get("end") == "failed"):
        codes = [act.details.get("exit_code", 1) for act in acts if act.outcome == "failed" and act.cycle == last.cycle]
        error = HivetuneError(last.words, hint="try again with the same command; details: hivetune cycle status")
        error.exit_code = codes[-1] if codes else DoesNotFit.exit_code  # closed without a failure, so over its budget
        emit_failed(document, error)
    emit(document)
    if cycles and cycles[-1].end == "refused":
        show(f"cycle {cycles[-1].id} refused: {cycles[-1].reason}")


def _look(config: RunConfig) -> None:
    """Look once and show the decision; only a snapshot of the rows is written."""
    name = release_name(config)
    model_folder(config.model)
    now = time.time()
    observed = observe(config, name, LookCache(), now)
    action = decide(observed, config.cycle, now)
    for key, value in observation_lines(observed, config.cycle.after_rows):
        show(f"  {key}: {value}")
    show(f"decision: {action.kind.replace('_', ' ')}: {action.reason}")
    if action.kind == "wait":
        show(f"until: {_moment(action.not_before)}")
    emit({"name": name, "action": action, "observed": observed})


def observation_lines(state: Observation, after_rows: int) -> Iterator[tuple[str, str]]:
    """Yield the facts behind a decision, as pairs of texts."""
    yield "champion", f"{state.desired or 'none yet'}{f', not served: {state.problem}' if state.problem else ''}"
    opened, allowed = state.open, state.allowed
    if opened is not None:
        stations = ", ".join(station for station in STATIONS if station in opened.done) or "nothing"
        yield "open cycle", f"{opened.id}, for {opened.opened_for}; done: {stations}"
    elif not state.problem:
        note = ", with these settings tried before" if state.known else ""
        yield "new groups of rows", f"{state.new_groups} (cycle.after_rows: {after_rows}){note}"
    if state.predicted_hours is not None:
        energy = "" if state.predicted_kwh is None else f", {state.predicted_kwh:.2g} kWh"
        yield "training", f"at most {duration(state.predicted_hours * 3600)}{energy}"
    if state.disk_needed_bytes:
        yield "disk", f"{size(state.disk_needed_bytes)} needed, {size(state.disk_free_bytes)} free"
    yield "long work", f"{'may continue' if allowed.now else 'waits'}: {allowed.reason}"
    failed = state.failed
    last = "" if failed is None else f"{failed.kind.replace('_', ' ')}, {failed.times} in a row: {failed.words}"
    for key, value in (
        ("failed last", last),
        ("failed cycles", f"{state.failed_cycles} in a row" if state.failed_cycles else ""),
        ("worse than before", state.watch_failed),
        ("no rows", state.unusable),
        ("forgotten rows in the champion", str(state.forgotten_rows or "")),
        ("requested", "paused" if state.paused else "now" if state.asked else ""),
    ):
        if value:
            yield key, value


def _control(word: str, name: str | None) -> None:
    names = [name] if name is not None else loop_names()
    if not names or not {*names} <= {*loop_names()}:
        of_name = "" if name is None else f" of {name}"
        raise UsageError(f"there is no loop{of_name}", hint="start one: hivetune cycle CONFIG")
    if word == "status":
        emit({"cycles": [_status(loop_name) for loop_name in names]})
        return
    if len(names) > 1:
        raise UsageError(f"there are several loops: {', '.join(names)}", hint=f"choose one: hivetune cycle {word} NAME")
    folder = loop_folder(names[0])
    if word == "admit":
        with closing(open_database()) as database:
            admitted = admit_rows(database, names[0])
        show(f"{admitted} rows accepted as new rows")
        emit({"name": names[0], "said": word, "rows": admitted})
        return
    runs = lock_holder(folder) is not None
    if word == "resume":
        (folder / PAUSED).unlink(missing_ok=True)
        show(f"{names[0]} {'continues' if runs else 'is not paused any more'}")
    else:
        flag, state = {
            "pause": (PAUSED, f"is paused{'; a running training stops at a checkpoint' if runs else ''}"),
            "now": (NOW, f"starts a cycle {'as soon as possible' if runs else 'when it runs'}"),
        }[word]
        (folder / flag).touch()
        show(f"{names[0]} {state}")
    if not runs:
        show(f"{names[0]} does not run; start it: hivetune cycle CONFIG")
    emit({"name": names[0], "said": word})


def _status(name: str) -> dict[str, Any]:
    folder = loop_folder(name)
    holder = lock_holder(folder)
    with closing(open_database()) as database:
        cycles, acts = cycles_of(database, name), acts_of(database, name)
        suspect = len(suspect_rows(database, name))
    paused = (folder / PAUSED).exists()
    running = f"running in process {holder.pid}" if holder is not None else "not running"
    show(f"{name}: {running}{', paused' if paused else ''}")
    rows = [
        (c.id, _moment(c.opened), c.opened_for, c.champion or "-", (c.end or "open").replace("_", " "), c.reason or "-")
        for c in cycles[-SHOWN_ACTS:]
    ]
    table("", ("cycle", "opened", "for", "champion then", "ended as", "why"), rows)
    if suspect:
        show(f"  {suspect} rows are set aside as suspect; to accept them: hivetune cycle admit {name}")
    for act in acts[-SHOWN_ACTS:]:
        show(f"  {_moment(act.started)} {act_text(act, running=holder is not None)}")
    return {
        "name": name,
        "pid": holder.pid if holder is not None else None,
        "paused": paused,
        "suspect_rows": suspect,
        "cycles": [parts(cycle, *_PARTS) for cycle in cycles],
        "acts": [replace(act, outcome=outcome_of(act, running=holder is not None)) for act in acts[-SHOWN_ACTS:]],
    }


_PARTS = ("id", "opened", "opened_for", "champion", "closed", "end", "reason", "run")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

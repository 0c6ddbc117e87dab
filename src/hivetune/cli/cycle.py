"""The command `cycle`: run the loop, look once, or control a loop that runs."""

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.base.disk import lock_holder
from hivetune.base.journal import read_tail
from hivetune.cli.arguments import model_folder
from hivetune.cli.output import duration, emit, emit_failed, parts, plain_progress, say, show, show_unit, size, table
from hivetune.config import RunConfig, load_config
from hivetune.cycle.loop import Listener, Look, Loop, look, opened, release_name
from hivetune.cycle.record import JOURNAL, NOW, PAUSED, cycles_of, loop_folder, loop_names
from hivetune.cycle.rows import LookCache
from hivetune.errors import UsageError
from hivetune.process.detach import cycle_unit

SPOKEN = ("status", "pause", "resume", "now")
SHOWN = 5


def cycle(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|status|pause|resume|now", help="A YAML config starts the loop; the others control it."
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
    resume; `now` starts a cycle at the next new row.
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
    seen = loop.run(once=once)
    with closing(open_database()) as database:
        cycles = cycles_of(database, loop.name)
    document = {"name": loop.name, "look": _document(seen), "cycles": [parts(cycle, *_PARTS) for cycle in cycles[-1:]]}
    if loop.failure is not None:
        emit_failed(document, loop.failure)
    emit(document)
    if cycles and cycles[-1].end == "refused":
        show(f"cycle {cycles[-1].id} refused: {cycles[-1].reason}")


def _look(config: RunConfig) -> None:
    """Look once and show the decision; only a snapshot of the rows is written."""
    name = release_name(config)
    model_folder(config.model)
    seen = look(config, name, LookCache(), time.time())
    for key, value in look_lines(seen, config.cycle.after_rows):
        show(f"  {key}: {value}")
    show(f"decision: {seen.do}: {seen.reason}")
    if seen.do == "wait":
        show(f"until: {_moment(seen.again_at)}")
    emit({"name": name, "look": _document(seen)})


def look_lines(seen: Look, after_rows: int) -> Iterator[tuple[str, str]]:
    """Yield the facts behind a decision, as pairs of texts."""
    yield "champion", f"{seen.champion or 'none yet'}{f', not served: {seen.problem}' if seen.problem else ''}"
    if seen.open is not None:
        yield "open cycle", f"{seen.open.id}, for {seen.open.opened_for}; at: {seen.open.station or 'its beginning'}"
        if seen.open.failures:
            yield "failed last", f"{seen.open.station}, {seen.open.failures} in a row: {seen.open.words}"
    elif not seen.problem:
        yield "new groups of rows", f"{seen.rows.groups} (cycle.after_rows: {after_rows})"
    if seen.rows.hours is not None:
        yield "training", f"at most {duration(seen.rows.hours * 3600)}"
    if seen.rows.disk_bytes:
        yield "disk", f"{size(seen.rows.disk_bytes)} needed"
    yield "long work", f"{'may continue' if seen.allowed.now else 'waits'}: {seen.allowed.reason}"
    if seen.failed_cycles:
        yield "failed cycles", f"{seen.failed_cycles} in a row"
    if seen.rows.problem:
        yield "no rows", seen.rows.problem
    if seen.forgotten:
        yield "forgotten rows in the champion", str(seen.forgotten)


def _document(seen: Look) -> dict[str, Any]:
    rows = {key: getattr(seen.rows, key) for key in ("groups", "hours", "disk_bytes", "problem")}
    plain = parts(seen, "do", "reason", "again_at", "champion", "problem", "forgotten", "failed_cycles", "allowed")
    return {**plain, "open": None if seen.open is None else seen.open.id, "rows": rows}


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
        cycles = cycles_of(database, name)
    paused = (folder / PAUSED).exists()
    running = f"running in process {holder.pid}" if holder is not None else "not running"
    show(f"{name}: {running}{', paused' if paused else ''}")
    rows = [
        (c.id, _moment(c.opened), c.opened_for, c.champion or "-", (c.end or "open").replace("_", " "), c.reason or "-")
        for c in cycles[-SHOWN:]
    ]
    table("", ("cycle", "opened", "for", "champion then", "ended as", "why"), rows)
    stations = [entry for entry in read_tail(folder / JOURNAL) if entry["event"] == "end"][-SHOWN:]
    for entry in stations:
        show(f"  {_moment(entry['time'])} {entry['station']} {entry['outcome']}: {entry['words']}")
    return {
        "name": name,
        "pid": holder.pid if holder is not None else None,
        "paused": paused,
        "cycles": [parts(cycle, *_PARTS) for cycle in cycles],
        "stations": stations,
    }


_PARTS = ("id", "opened", "opened_for", "champion", "closed", "end", "reason", "run")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

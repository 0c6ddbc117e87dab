"""The command `cycle`: run the loop, look once, or control a loop that runs."""

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from hivetune.base.database import open_database
from hivetune.base.disk import lock_holder
from hivetune.base.journal import read_tail
from hivetune.cli.arguments import SetOption, model_folder
from hivetune.cli.output import Table, answer, duration, moment, parts, plain_progress, say, show_unit, size
from hivetune.config import RunConfig, load_config
from hivetune.cycle.loop import Listener, Look, Loop, look, opened, release_name
from hivetune.cycle.record import JOURNAL, NOW, PAUSED, CycleRow, cycles_of, loop_folder, loop_names
from hivetune.cycle.rows import LookCache
from hivetune.errors import UsageError
from hivetune.process.detach import cycle_unit

SPOKEN = ("status", "pause", "resume", "now")
SHOWN = 5
CYCLE_PARTS = "id opened opened_for champion closed end reason run"
CYCLES = "cycle=id, opened|time, for=opened_for, champion then=champion, ended as=end, why=reason"
WHAT_HELP = "A YAML config starts the loop; the others control it."


def cycle(
    what: Annotated[str, Argument(metavar="CONFIG|status|pause|resume|now", help=WHAT_HELP)],
    name: Annotated[str | None, Argument(metavar="NAME", help="The loop to control; default: the only one.")] = None,
    overrides: SetOption = None,
    once: Annotated[bool, Option("--once", help="Exit when there is nothing to do.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be done now, and why.")] = False,
    unit: Annotated[bool, Option("--unit", help="Print a systemd user unit for this loop.")] = False,
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
    last = _cycles(loop.name)[-1:]
    document = {"name": loop.name, "look": _document(seen), "cycles": [parts(each, CYCLE_PARTS) for each in last]}
    refused = [f"cycle {each.id} refused: {each.reason}" for each in last if each.end == "refused"]
    answer(document, *refused, error=loop.failure)


def _cycles(name: str) -> list[CycleRow]:
    with closing(open_database()) as database:
        return cycles_of(database, name)


def _look(config: RunConfig) -> None:
    """Look once and show the decision; only a snapshot of the rows is written."""
    name = release_name(config)
    model_folder(config.model)
    seen = look(config, name, LookCache(), time.time())
    facts = [f"  {key}: {value}" for key, value in look_lines(seen, config.cycle.after_rows)]
    until = f"until: {moment(seen.again_at)}" if seen.do == "wait" else ""
    answer({"name": name, "look": _document(seen)}, *facts, f"decision: {seen.do}: {seen.reason}", until)


def look_lines(seen: Look, after_rows: int) -> Iterator[tuple[str, str]]:
    """Yield the facts behind a decision, as pairs of texts."""
    yield "champion", seen.champion or "none yet"
    if seen.open is not None:
        yield "open cycle", f"{seen.open.id}, for {seen.open.opened_for}; at: {seen.open.station or 'its beginning'}"
        if seen.open.failures:
            yield "failed last", f"{seen.open.station}, {seen.open.failures} in a row: {seen.open.words}"
    else:
        yield "new groups of rows", f"{seen.rows.groups} (cycle.after_rows: {after_rows})"
    if seen.rows.hours is not None:
        yield "training", f"at most {duration(seen.rows.hours * 3600)}"
    if seen.rows.disk_bytes:
        yield "disk", f"{size(seen.rows.disk_bytes)} needed"
    yield "long work", f"{'may continue' if seen.allowed.now else 'waits'}: {seen.allowed.reason}"
    if seen.rows.problem:
        yield "no rows", seen.rows.problem


def _document(seen: Look) -> dict[str, Any]:
    plain = parts(seen, "do reason again_at champion allowed")
    rows = parts(seen.rows, "groups hours disk_bytes problem")
    return {**plain, "open": None if seen.open is None else seen.open.id, "rows": rows}


def _control(word: str, name: str | None) -> None:
    names = [name] if name is not None else loop_names()
    if not names or not {*names} <= {*loop_names()}:
        of_name = "" if name is None else f" of {name}"
        raise UsageError(f"there is no loop{of_name}", hint="start one: hivetune cycle CONFIG")
    if word == "status":
        states = [_status(each) for each in names]
        blocks = [block for _, text in states for block in text]
        answer({"cycles": [document for document, _ in states]}, *blocks)
        return
    if len(names) > 1:
        raise UsageError(f"there are several loops: {', '.join(names)}", hint=f"choose one: hivetune cycle {word} NAME")
    folder = loop_folder(names[0])
    runs = lock_holder(folder) is not None
    if word == "resume":
        (folder / PAUSED).unlink(missing_ok=True)
        state = "continues" if runs else "is not paused any more"
    else:
        (folder / (PAUSED if word == "pause" else NOW)).touch()
        paused = f"is paused{'; a running training stops at a checkpoint' if runs else ''}"
        state = paused if word == "pause" else f"starts a cycle {'as soon as possible' if runs else 'when it runs'}"
    still = "" if runs else f"{names[0]} does not run; start it: hivetune cycle CONFIG"
    answer({"name": names[0], "said": word}, f"{names[0]} {state}", still)


def _status(name: str) -> tuple[dict[str, Any], list[str | Table]]:
    folder = loop_folder(name)
    holder, paused = lock_holder(folder), (folder / PAUSED).exists()
    pid = None if holder is None else holder.pid
    cycles = [parts(each, CYCLE_PARTS) for each in _cycles(name)]
    stations = [entry for entry in read_tail(folder / JOURNAL) if entry["event"] == "end"][-SHOWN:]
    running = "not running" if pid is None else f"running in process {pid}"
    text: list[str | Table] = [f"{name}: {running}{', paused' if paused else ''}", Table(CYCLES, cycles[-SHOWN:])]
    text += [f"  {moment(at['time'])} {at['station']} {at['outcome']}: {at['words']}" for at in stations]
    return {"name": name, "pid": pid, "paused": paused, "cycles": cycles, "stations": stations}, text

"""The command `cycle`: run the loop, look once, or control a loop that runs."""

import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from hivetune.base.database import open_database
from hivetune.base.disk import lock_holder
from hivetune.base.journal import read_tail
from hivetune.cli.arguments import SetOption, model_folder
from hivetune.cli.output import Table, answer, facts, parts, plain_progress, say
from hivetune.config import RunConfig, load_config
from hivetune.cycle.loop import Listener, Look, Loop, look, opened, release_name
from hivetune.cycle.record import JOURNAL, NOW, PAUSED, CycleRow, cycles_of, loop_folder, loop_names
from hivetune.cycle.rows import LookCache
from hivetune.errors import UsageError

SPOKEN = ("status", "pause", "resume", "now")
SHOWN = 5
CYCLE_PARTS = "id opened opened_for champion closed end reason run"
CYCLES = "cycle=id opened for=opened_for champion_then=champion ended_as=end why=reason"
WHAT_HELP = "A YAML config starts the loop; the others control it."


def cycle(
    what: Annotated[str, Argument(metavar="CONFIG|status|pause|resume|now", help=WHAT_HELP)],
    name: Annotated[str | None, Argument(metavar="NAME", help="The loop to control; default: the only one.")] = None,
    overrides: SetOption = None,
    once: Annotated[bool, Option("--once", help="Exit when there is nothing to do.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be done now, and why.")] = False,
) -> None:
    """Train, compare, promote and watch whenever new rows arrive, until stopped.

    It may be stopped or killed at any time; the same command continues. Control a running loop with status, pause and
    resume; `now` starts a cycle at the next new row.
    """
    if what in SPOKEN:
        if overrides or once or dry_run:
            raise UsageError(f"cycle {what} takes no options", hint="options belong to: hivetune cycle CONFIG")
        _control(what, name)
        return
    if name is not None:
        message = f"cycle {what} {name}: a config takes no NAME; it has cycle.name"
        raise UsageError(message, hint=f"give NAME only after one of: {', '.join(SPOKEN)}")
    config = load_config(Path(what), overrides or ())
    if dry_run:
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
    document = _document(seen)
    answer({"name": name, "look": document}, facts(document))


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
        answer({"cycles": states}, *(block for state in states for block in _status_text(state)))
        return
    if len(names) > 1:
        raise UsageError(f"there are several loops: {', '.join(names)}", hint=f"choose one: hivetune cycle {word} NAME")
    folder = loop_folder(names[0])
    runs = lock_holder(folder) is not None
    if word == "resume":
        (folder / PAUSED).unlink(missing_ok=True)
        state = "continues" if runs else "is not paused any more"
    elif word == "pause":
        (folder / PAUSED).touch()
        state = f"is paused{'; a running training stops at a checkpoint' if runs else ''}"
    else:
        (folder / NOW).touch()
        state = f"starts a cycle {'as soon as possible' if runs else 'when it runs'}"
    still = "" if runs else f"{names[0]} does not run; start it: hivetune cycle CONFIG"
    answer({"name": names[0], "said": word}, f"{names[0]} {state}", still)


def _status(name: str) -> dict[str, Any]:
    folder = loop_folder(name)
    holder = lock_holder(folder)
    return {
        "name": name,
        "pid": None if holder is None else holder.pid,
        "paused": (folder / PAUSED).exists(),
        "cycles": [parts(each, CYCLE_PARTS) for each in _cycles(name)],
        "stations": [entry for entry in read_tail(folder / JOURNAL) if entry["event"] == "end"][-SHOWN:],
    }


def _status_text(state: Mapping[str, Any]) -> list[str | Table]:
    running = "not running" if state["pid"] is None else f"running in process {state['pid']}"
    return [
        f"{state['name']}: {running}{', paused' * state['paused']}",
        Table(CYCLES, state["cycles"][-SHOWN:]),
        Table("time station outcome words", state["stations"]),
    ]

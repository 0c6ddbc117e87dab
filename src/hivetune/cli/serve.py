"""The commands that run until they are stopped: `serve` with its `clients`, and `cycle`."""

import re
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from typer import Argument, Option

from hivetune.base.database import open_database
from hivetune.base.disk import lock_holder
from hivetune.base.journal import read_tail
from hivetune.cli.arguments import CaptureOption, SetOption, ThreadsOption, model_folder
from hivetune.cli.output import Note, Table, answer, emit_until_stopped, facts, parts, say, show
from hivetune.config import load_config
from hivetune.cycle.loop import Look, Loop, look, opened, release_name
from hivetune.cycle.record import JOURNAL, NOW, PAUSED, CycleRow, cycles_of, loop_folder, loop_names
from hivetune.cycle.rows import RowsNow
from hivetune.errors import UsageError
from hivetune.release.registry import champion_versions
from hivetune.serve.guard import clients, make_client, revoke_client

DEFAULT_CLIENT = "default"
CARD_HELP = "Offload to this card; use the CPU while a run trains on it."


def serve(
    names: Annotated[
        list[str] | None,
        Argument(metavar="NAME", help="Names of releases to serve; default: all that have a champion."),
    ] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8642,
    allow_host: Annotated[
        list[str] | None, Option(help="Also accept requests with this Host header, such as box:8642.")
    ] = None,
    capture: CaptureOption = False,
    canary: Annotated[float, Option(min=0, max=1, help="Share of sessions answered by the candidate, 0 to 1.")] = 0.0,
    slots: Annotated[int, Option(min=1, max=64, help="Number of requests that are answered at the same time.")] = 4,
    context: Annotated[int, Option(min=256, help="Context of each answer (prompt and answer), in tokens.")] = 4096,
    threads: ThreadsOption = None,
    card: Annotated[str, Option(metavar="cuda:N", help=CARD_HELP)] = "",
) -> None:
    """Serve champions, other releases and their base model over the OpenAI API, with a token per client.

    A promotion or rollback takes effect while the server runs, without losing a request.
    """
    # Only now: a loop needs no web server, whose packages are an extra.
    from hivetune.dashboard.app import dashboard_addition
    from hivetune.llama.backend import find_engine
    from hivetune.serve.run import GatewaySettings, refuse_open, run_gateway

    if card and not re.fullmatch(r"cuda(:\d+)?", card):  # llama.cpp would take the CPU without a word
        raise UsageError(f"--card {card}: not a card", hint="give cuda:0 or cuda:1; list all: hivetune doctor")
    settings = GatewaySettings(
        names=tuple(names or ()),
        host=host,
        port=port,
        allow_hosts=tuple(allow_host or ()),
        capture=capture,
        canary=canary,
        slots=slots,
        context_tokens=context,
        threads=threads,
        card=card,
    )
    with closing(open_database()) as database:
        # An address for others needs tokens.
        refuse_open(settings, sum(client.revoked is None for client in clients(database)))
        is_promoted = bool(champion_versions(database))
    if not names and not is_promoted:
        say("no champion to serve yet; make one: hivetune register RUN --as NAME, then hivetune promote NAME@1")
    if why := find_engine().passed_over:
        say(why)
    run_gateway(settings, _tell, dashboard_addition)


def _tell(url: str) -> None:
    """Print the addresses of a gateway that listens, and the token of a first client."""
    from hivetune.dashboard.page import BELOW, dashboard_token
    from hivetune.serve.run import is_loopback

    with closing(open_database()) as database:
        # Made once the gateway listens, since a gateway that fails to start would never show it.
        has_client = any(client.revoked is None for client in clients(database))
        token = None if has_client else make_client(database, DEFAULT_CLIENT)
    show(f"listening on {url}/v1")
    # The link holds the token of the dashboard, which only this machine may see.
    if is_loopback(urlsplit(url).hostname or ""):
        show(f"dashboard: {url}{BELOW}/login?token={dashboard_token()}")
    if token is not None:
        show(f"token of client {DEFAULT_CLIENT!r}, shown only once: {token}")
    say("stop with Ctrl-C")
    emit_until_stopped({"url": url, "token": token})


def show_clients(
    new: Annotated[
        str | None, Option(metavar="NAME", help="Create a client and print its token, which is shown only once.")
    ] = None,
    revoke: Annotated[str | None, Option(metavar="NAME", help="Revoke the token of this client.")] = None,
) -> None:
    """List the clients of the gateway, or create or revoke a client's token."""
    with closing(open_database()) as database:
        if revoke is not None:
            revoke_client(database, revoke)
        token = None if new is None else make_client(database, new)
        found = [parts(each, "name created revoked") for each in clients(database)]
    answer(
        {"token": token, "clients": found},
        Note(f"the token of {revoke} is revoked" if revoke else ""),
        token or "",
        Note(f"this is the token of {new}; it is not shown again" if new else ""),
        Table("client=name created revoked", found) if not new and not revoke else "",
    )


SPOKEN = ("status", "pause", "resume", "now")
SHOWN = 5  # of each list: what happened today
CYCLE_PARTS = "id opened opened_for champion closed end reason run"
CYCLES = "cycle=id opened for=opened_for champion_then=champion ended_as=end why=reason"
DOES = {"wait": "wait", "open": "begin a cycle", "continue": "continue the open cycle"}
WHAT_HELP = "A YAML config starts the loop; the others control it."


def cycle(
    what: Annotated[str, Argument(metavar="CONFIG|status|pause|resume|now", help=WHAT_HELP)],
    name: Annotated[str | None, Argument(metavar="NAME", help="The loop to control; default: the only one.")] = None,
    overrides: SetOption = None,
    once: Annotated[bool, Option("--once", help="Exit when there is nothing to do.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what the loop would do now, and why.")] = False,
) -> None:
    """Train, compare, promote and watch whenever new rows arrive, until stopped.

    It may be stopped or killed at any time; run the same command again to resume. Control a running loop with status,
    pause and resume; `now` starts a cycle at the next new row."""
    if what in SPOKEN:
        if overrides or once or dry_run:
            raise UsageError(f"cycle {what} takes no options", hint="options belong to: hivetune cycle CONFIG")
        _control(what, name)
        return
    if name is not None:
        message = f"cycle {what} {name}: a config takes no NAME; it has cycle.name"
        raise UsageError(message, hint=f"give NAME only after one of: {', '.join(SPOKEN)}")
    config = load_config(Path(what), overrides or ())
    release = release_name(config)  # a config that no cycle can run is refused before its model is prepared
    model_folder(config.model, config.template)
    if dry_run:  # only a snapshot of the rows is written
        document = look_document(look(config, release, RowsNow(), time.time()))
        answer({"name": release, "look": document}, facts({**document, "do": DOES[document["do"]]}))
    else:
        with opened(config, say) as loop:
            _run(loop, once=once)


def _run(loop: Loop, *, once: bool) -> None:
    say(f"loop of {loop.name}; stop with Ctrl-C, continue with the same command")
    seen = loop.run(once=once)
    last = _cycles(loop.name)[-1:]
    document = {"name": loop.name, "look": look_document(seen), "cycles": [parts(each, CYCLE_PARTS) for each in last]}
    refused = [f"cycle {each.id} refused: {each.reason}" for each in last if each.end == "refused"]
    answer(document, *refused, error=loop.failure)


def _cycles(name: str) -> list[CycleRow]:
    with closing(open_database()) as database:
        return cycles_of(database, name)


def look_document(seen: Look) -> dict[str, Any]:
    plain = parts(seen, "do reason champion")
    rows = parts(seen.rows, "groups problem")
    return {**plain, "open": None if seen.open is None else seen.open.id, "rows": rows}


def _control(word: str, name: str | None) -> None:
    known = loop_names()
    names = known if name is None else [each for each in known if each == name]
    if not names:
        of_name = "" if name is None else f" of {name}"
        raise UsageError(f"there is no loop{of_name}", hint="start one: hivetune cycle CONFIG")
    if word == "status":
        states = [_status(each) for each in names]
        blocks: list[str | Table] = []
        for each in states:
            running = "not running" if each["pid"] is None else f"running in process {each['pid']}"
            blocks.append(f"{each['name']}: {running}{', paused' * each['paused']}")
            blocks.append(Table(CYCLES, each["cycles"][-SHOWN:]))
            blocks.append(Table("time station outcome words", each["stations"]))
        answer({"cycles": states}, *blocks)
        return
    if len(names) > 1:
        raise UsageError(f"there are several loops: {', '.join(names)}", hint=f"choose one: hivetune cycle {word} NAME")
    folder = loop_folder(names[0])
    runs = lock_holder(folder) is not None
    if word == "resume":
        (folder / PAUSED).unlink(missing_ok=True)
        state = "continues" if runs else "is not paused any more"
    elif word == "pause":
        (folder / PAUSED).touch()  # the loop looks for the files, so it need not run now
        state = f"is paused{'; a running training stops at a checkpoint' if runs else ''}"
    else:
        (folder / NOW).touch()
        state = f"starts a cycle as soon as it has a new row{'' if runs else ' and runs'}"
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

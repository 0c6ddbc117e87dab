"""The commands `serve` (the OpenAI API of the champions) and `clients` (who may use it)."""

import re
from contextlib import closing
from sqlite3 import Connection
from typing import Annotated
from urllib.parse import urlsplit

from typer import Argument, Option

from hivetune.base.database import open_database
from hivetune.cli.arguments import CaptureOption, ThreadsOption
from hivetune.cli.output import Note, Table, answer, emit_until_stopped, say, show
from hivetune.dashboard.access import BELOW, dashboard_token
from hivetune.dashboard.app import dashboard_addition
from hivetune.errors import UsageError
from hivetune.llama.backend import unused_program
from hivetune.release.registry import desired
from hivetune.serve.guard import Client, clients, make_client, revoke_client
from hivetune.serve.run import GatewaySettings, is_loopback, refuse_open, run_gateway

DEFAULT_CLIENT = "default"
CARD_HELP = "Offload to this card; use the CPU while a run trains on it."


def serve(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="Names to serve; default: all.")] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8642,
    allow_host: Annotated[list[str] | None, Option(help="Accept this Host header too, such as box:8642.")] = None,
    capture: CaptureOption = False,
    canary: Annotated[float, Option(min=0, max=1, help="Share of sessions answered by the candidate, 0 to 1.")] = 0.0,
    slots: Annotated[int, Option(min=1, max=64, help="Number of answers at the same time.")] = 4,
    context: Annotated[int, Option(min=256, help="Context of each answer in tokens.")] = 4096,
    threads: ThreadsOption = None,
    card: Annotated[str, Option(metavar="cuda:N", help=CARD_HELP)] = "",
) -> None:
    """Serve champions, other releases and their base model over the OpenAI API, with a token per client.

    A promotion or rollback takes effect while the server runs, without losing a request.
    """
    if card and not re.fullmatch(r"cuda(:\d+)?", card):
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
        refuse_open(settings, len(_clients_with_tokens(database)))
        is_promoted = bool(desired(database))
    if not names and not is_promoted:
        say("no champion to serve yet; make one: hivetune register RUN --as NAME, then hivetune promote NAME@1")
    if unused := unused_program():
        say(unused)
    run_gateway(settings, _tell, dashboard_addition)


def _clients_with_tokens(database: Connection) -> list[Client]:
    return [client for client in clients(database) if client.revoked is None]


def _tell(url: str) -> None:
    with closing(open_database()) as database:
        # Made once the gateway listens, since a gateway that fails to start would never show it.
        token = None if _clients_with_tokens(database) else make_client(database, DEFAULT_CLIENT)
    show(f"listening on {url}/v1")
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
    """List the clients of the gateway, or create or revoke the token of one."""
    token = None
    with closing(open_database()) as database:
        if revoke is not None:
            revoke_client(database, revoke)
        if new is not None:
            token = make_client(database, new)
        found = clients(database)
    answer(
        {"token": token, "clients": found},
        Note(f"the token of {revoke} is revoked") if revoke else "",
        token or "",
        Note(f"this is the token of {new}; it is not shown again") if new else "",
        Table("client=name created revoked", found) if not new and not revoke else "",
    )

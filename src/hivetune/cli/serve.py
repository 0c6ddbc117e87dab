"""`hivetune serve`: the OpenAI API of the champions in the registry, on this machine, with capture and rollback."""

import re
from contextlib import closing
from sqlite3 import Connection
from typing import Annotated
from urllib.parse import urlsplit

import typer

from hivetune.base.database import open_database
from hivetune.cli.output import emit, say, show
from hivetune.dashboard.access import BELOW, dashboard_token
from hivetune.dashboard.app import dashboard_addition
from hivetune.dashboard.exporters.prometheus import HomeCollector
from hivetune.errors import UsageError
from hivetune.llama.backend import unused_program
from hivetune.release.gguf import SERVED_QUANT
from hivetune.release.registry import desired
from hivetune.serve.gateway.clients import Client, clients, make_client
from hivetune.serve.gateway.run import GatewaySettings, is_loopback, refuse_open, run_gateway

DEFAULT_CLIENT = "default"


def serve(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="What to serve; all by default.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any free one.")] = 8642,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="Another value of the Host header, such as box:8642.")
    ] = None,
    capture: Annotated[bool, typer.Option("--capture", help="Keep prompts and answers in the store.")] = False,
    canary: Annotated[
        float, typer.Option("--canary", min=0, max=1, help="Share of sessions that the candidate answers.")
    ] = 0.0,
    quant: Annotated[str, typer.Option("--quant", help="Number type of the base model.")] = SERVED_QUANT,
    slots: Annotated[int, typer.Option("--slots", min=1, max=64, help="Answers at once.")] = 4,
    context: Annotated[int, typer.Option("--context", min=256, help="Tokens of context of each slot.")] = 4096,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    private_cache: Annotated[
        bool, typer.Option("--private-cache", help="No client profits from the prompt of another one, nor can time it.")
    ] = False,
    card: Annotated[
        str, typer.Option("--card", metavar="cuda:N", help="Offload to this card, on the CPU while a run trains on it.")
    ] = "",
) -> None:
    """Serve champions, other releases and their base over the OpenAI API: one address, a token per client.

    A promotion or a rollback in the registry takes effect while it runs, and no request is lost to it.
    """
    if card and not re.fullmatch(r"cuda(:\d+)?", card):
        raise UsageError(f"--card {card}: no card", hint="give cuda:0, cuda:1, ...; hivetune doctor lists them")
    settings = GatewaySettings(
        names=tuple(names or ()),
        host=host,
        port=port,
        allow_hosts=tuple(allow_host or ()),
        capture=capture,
        canary=canary,
        quant=quant,
        slots=slots,
        context_tokens=context,
        threads=threads,
        private_cache=private_cache,
        card=card,
    )
    with closing(open_database()) as database:
        refuse_open(settings, len(_clients_with_tokens(database)))
    if not names and not _is_promoted():
        say("nothing is promoted, so nothing is served yet: hivetune register RUN --as NAME, hivetune promote NAME@1")
    if unused := unused_program():
        say(unused)
    run_gateway(settings, _tell, [HomeCollector()], dashboard_addition)


def _clients_with_tokens(database: Connection) -> list[Client]:
    return [client for client in clients(database) if client.revoked is None]


def _first_token() -> str | None:
    """A token for whoever starts a gateway for the first time; None when there are clients already. Made when the
    gateway listens: one that could not begin would never show it."""
    with closing(open_database()) as database:
        return None if _clients_with_tokens(database) else make_client(database, DEFAULT_CLIENT)


def _is_promoted() -> bool:
    with closing(open_database()) as database:
        return bool(desired(database))


def _tell(url: str) -> None:
    token = _first_token()
    show(f"listening on {url}/v1")
    if is_loopback(urlsplit(url).hostname or ""):
        show(f"dashboard: {url}{BELOW}/login?token={dashboard_token()}")
    if token is not None:
        show(f"token of the client {DEFAULT_CLIENT!r}, shown once: {token}")
    say("Ctrl-C ends it")
    emit({"url": url, "token": token})

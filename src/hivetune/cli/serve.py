"""The commands `serve` (the OpenAI API of the champions), `clients` (who may use it) and `route`."""

import re
import sys
from contextlib import closing
from sqlite3 import Connection
from urllib.parse import urlsplit

from hivetune.base.database import open_database
from hivetune.cli.output import emit, moment, say, show, table
from hivetune.dashboard.access import BELOW, dashboard_token
from hivetune.dashboard.app import dashboard_addition
from hivetune.dashboard.exporters.prometheus import HomeCollector
from hivetune.errors import UsageError
from hivetune.llama.backend import unused_program
from hivetune.process.detach import serve_unit
from hivetune.release.gguf import SERVED_QUANT
from hivetune.release.registry import desired
from hivetune.routing.choose import Asking, choose
from hivetune.routing.domains import declared_keys
from hivetune.routing.steps import families
from hivetune.serve.gateway.clients import Client, clients, make_client, revoke_client
from hivetune.serve.gateway.run import GatewaySettings, is_loopback, refuse_open, run_gateway
from hivetune.serve.swap.wanted import wanted

DEFAULT_CLIENT = "default"
UNIT = "hivetune-serve"


def serve(
    names: list[str] | None = None,
    host: str = "127.0.0.1",
    port: int = 8642,
    allow_host: list[str] | None = None,
    capture: bool = False,
    canary: float = 0.0,
    quant: str = SERVED_QUANT,
    slots: int = 4,
    context: int = 4096,
    threads: int | None = None,
    private_cache: bool = False,
    unit: bool = False,
    card: str = "",
) -> None:
    """Serve champions, other releases and their base model over the OpenAI API, with a token per client.

    A promotion or rollback takes effect while the server runs, without losing a request.
    """
    if card and not re.fullmatch(r"cuda(:\d+)?", card):
        raise UsageError(f"--card {card}: not a card", hint="give cuda:0 or cuda:1; list all: hivetune doctor")
    if unit:
        text = serve_unit([word for word in sys.argv[2:] if word not in ("--unit", "--json")])
        show(text)
        say(f"save it as ~/.config/systemd/user/{UNIT}.service, then: systemctl --user enable --now {UNIT}")
        emit({"unit": text})
        return
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
        say("no champion to serve yet; make one: hivetune register RUN --as NAME, then hivetune promote NAME@1")
    if unused := unused_program():
        say(unused)
    run_gateway(settings, _tell, [HomeCollector()], dashboard_addition)


def _clients_with_tokens(database: Connection) -> list[Client]:
    return [client for client in clients(database) if client.revoked is None]


def _first_token() -> str | None:
    """Return a new token, or None if there are clients already.

    It is made once the gateway listens, since a gateway that fails to start would never show it.
    """
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
        show(f"token of client {DEFAULT_CLIENT!r}, shown only once: {token}")
    say("stop with Ctrl-C")
    emit({"url": url, "token": token})


def show_clients(new: str | None = None, revoke: str | None = None) -> None:
    """List the clients of the gateway, or create or revoke the token of one."""
    token = None
    with closing(open_database()) as database:
        if revoke is not None:
            revoke_client(database, revoke)
            say(f"the token of {revoke} is revoked")
        if new is not None:
            token = make_client(database, new)
            show(token)
            say(f"this is the token of {new}; it is not shown again")
        all_clients = clients(database)
    if new is None and revoke is None:
        rows = [(client.name, moment(client.created), moment(client.revoked)) for client in all_clients]
        table("", ("client", "created", "revoked"), rows)
    emit(
        {
            "token": token,
            "clients": [
                {"name": client.name, "created": client.created, "revoked": client.revoked} for client in all_clients
            ],
        }
    )


def route_request(
    text: str, name: str | None = None, agent: str | None = None, category: str | None = None, system: str | None = None
) -> None:
    """Show which adapter answers a request, and why.

    A declared key decides first, then the text; otherwise the shared adapter answers.
    """
    with closing(open_database()) as database:
        all_families = families(database)
    shared = name or (next(iter(all_families)) if len(all_families) == 1 else None)
    if shared is None or shared not in all_families:
        named = f"; families: {', '.join(all_families)}" if all_families else ""
        message = (
            f"{shared} has no specialists"
            if shared
            else "several releases have specialists"
            if all_families
            else "there are no specialists"
        )
        raise UsageError(
            f"{message}{named}", hint="train some: hivetune experts CONFIG --train; or choose a release: --name NAME"
        )
    with closing(open_database()) as database:
        desired = wanted(database, [shared])  # as the gateway sees it: adapters that cannot be loaded are left out
    for problem in desired.problems:
        say(problem)
    if shared not in desired.experts:
        raise UsageError(f"cannot read the router of {shared}", hint="make it again: hivetune experts CONFIG --train")
    request_text = sys.stdin.read() if text == "-" else text
    question = Asking(shared, declared_keys(agent, category, system, ()), request_text)
    choice = choose(desired.experts, desired.family, question, desired.champions)
    show(f"{choice.model}: {choice.reason}")
    emit({"name": choice.model, "by": choice.by, "reason": choice.reason, "problems": list(desired.problems)})

"""`hivetune clients`: who may ask the gateway; a token is shown once and kept as a hash."""

import time
from contextlib import closing
from typing import Annotated

import typer

from hivetune.base.database import open_database
from hivetune.cli.output import emit, say, show, table
from hivetune.serve.gateway.clients import clients, make_client, revoke_client


def show_clients(
    new: Annotated[str | None, typer.Option("--new", metavar="NAME", help="Make a token and print it once.")] = None,
    revoke: Annotated[
        str | None, typer.Option("--revoke", metavar="NAME", help="Refuse this client's token from now on.")
    ] = None,
) -> None:
    """The clients of the gateway; with --new or --revoke, one more or one less."""
    token = None
    with closing(open_database()) as database:
        if revoke is not None:
            revoke_client(database, revoke)
            say(f"the token of {revoke} is refused from now on")
        if new is not None:
            token = make_client(database, new)
            show(token)
            say(f"the token of {new}; it is not shown again")
        known = clients(database)
    if new is None and revoke is None:
        rows = [(client.name, _day(client.created), _day(client.revoked)) for client in known]
        table("", ("client", "created", "revoked"), rows)
    emit(
        {
            "token": token,
            "clients": [
                {"name": client.name, "created": client.created, "revoked": client.revoked} for client in known
            ],
        }
    )


def _day(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

"""`hivetune dashboard`: everything in a browser, on this machine."""

import webbrowser
from typing import Annotated

import typer

from hivetune.cli.output import MODE, emit, say, show
from hivetune.dashboard.access import dashboard_token
from hivetune.dashboard.app import run_dashboard


def dashboard_command(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any free one.")] = 8643,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    new_token: Annotated[
        bool, typer.Option("--new-token", help="Make another token: everybody is signed out.")
    ] = False,
) -> None:
    """Show runs, cycles, releases, rows and this machine in a browser, and keep the pages up to date.

    It listens on this machine alone and only reads; what can be done there is asked for twice. A gateway that runs
    shows the same at /dashboard.
    """
    token = dashboard_token(new=new_token)

    def tell(url: str) -> None:
        address = f"{url}login?token={token}"
        show(f"open {address}")
        say("the address holds the token of this dashboard: a browser keeps a cookie instead. Ctrl-C ends the server")
        emit({"url": url, "token": token})
        if open_it and not MODE.json:
            webbrowser.open(address)

    run_dashboard(port, tell)

"""The dashboard as a server of its own, on the loopback, at a low priority: training comes first."""

import os
import socket
from collections.abc import Callable
from contextlib import closing

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hivetune.dashboard.access import BELOW
from hivetune.dashboard.app import dashboard_addition
from hivetune.serve.gateway.guard import Door, Guard
from hivetune.serve.gateway.run import listen_on, own_hosts

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
# Behind four busy processes on two cores the first page of a home with a run of 100,000 steps came after 11 s at 19 and
# 3 s at 5. What pages cost later is bounded by live.py.
LOW_PRIORITY = 5
_SHUTDOWN_S = 2


def run_dashboard(port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` gets the address. Raises Busy when the port is taken."""
    os.nice(LOW_PRIORITY)
    with closing(listen_on(HOST, port)) as listening:
        servers: list[uvicorn.Server] = []
        app = guarded_dashboard(lambda: servers[0].should_exit, listening)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_S,
            server_header=False,
        )
        servers.append(uvicorn.Server(config))
        on_ready(f"http://{HOST}:{listening.getsockname()[1]}{BELOW}/")
        servers[0].run([listening])


def guarded_dashboard(ending: Callable[[], bool], listening: socket.socket) -> ASGIApp:
    """Everything that this server answers, behind the guard."""
    added = dashboard_addition(ending)
    app = Starlette(routes=[Route("/", _to_dashboard), *added.routes])
    elsewhere = Door(client_of=lambda token: None, open=frozenset({"/"}))
    return Guard(app, own_hosts(_NAMES, listening.getsockname()[1]), [added.door, elsewhere])


async def _to_dashboard(request: Request) -> Response:
    return RedirectResponse(f"{BELOW}/", 303)

"""The gateway as a process: registry, model servers, guard and page on one port until it is told to stop."""

import contextlib
import errno
import math
import resource
import socket
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import psutil
import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import lock
from hivetune.errors import Busy, HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import CONTEXT_TOKENS, ServerSettings, open_backend
from hivetune.process.lease import training_on
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.release.registry import rollback
from hivetune.serve.api import Gateway, page_routes
from hivetune.serve.capture import Capture
from hivetune.serve.guard import Door, Guard, client_of
from hivetune.serve.route import Deployment, Wanted, gateway_folder, wanted
from hivetune.serve.servers import Keeper, LiveBackend
from hivetune.serve.watch import Watch, due_watches

_OTHER_SERVES = "it serves this home already, and takes up promotions by itself; see: hivetune status"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# For the answers that are being given when the gateway is stopped.
SHUTDOWN_S = 10
HTTP_PORT = 80
# Many systems begin with 1,024 open files, and a thousand silent connections once kept every client out.
MAX_FILES = 1 << 16
# Tokens of a prompt that are computed at once. Beside a prompt of 2,700 tokens a short request of another adapter waits
# for one such piece: a second for a model of 135 million weights on two cores, where llama.cpp's 2,048 take eight.
PROMPT_BATCH = 256
# A watch ends without a change of hive.db.
READ_AGAIN_S = 30.0


@dataclass(frozen=True)
class GatewaySettings:
    """The settings of `hivetune serve`."""

    names: tuple[str, ...] = ()  # to serve; every champion if empty
    host: str = "127.0.0.1"
    port: int = 8642
    # More accepted values of the Host header, with port.
    allow_hosts: tuple[str, ...] = ()
    capture: bool = False
    # The share of each name's sessions that its candidate answers.
    canary: float = 0.0
    quant: str = SERVED_QUANT
    slots: int = 4
    context_tokens: int = CONTEXT_TOKENS  # of each slot
    threads: int | None = None
    # What backends offload to while nobody trains on it; empty: they choose themselves.
    card: str = ""


class Addition(NamedTuple):
    """Routes of another package on the same port, with their access rule."""

    routes: Sequence[BaseRoute]
    door: Door


def run_gateway(
    settings: GatewaySettings,
    on_ready: Callable[[str], None] = lambda url: None,
    add: Callable[[], Addition] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` is called with the address.

    `add` returns additional routes, which are served only while no other machine can reach the gateway.

    Raises UsageError for a name that is not registered, Busy when another gateway of this home runs or the port is
    taken. A model that can't be loaded is retried, and /health names it.
    """
    with closing(open_database()) as database:
        wanted(database, settings.names)
    with lock(gateway_folder(), hint=_OTHER_SERVES), closing(listen_on(settings.host, settings.port)) as listening:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MAX_FILES), most))
        port = listening.getsockname()[1]
        watch = Watch(_roll_back, open_database)
        watch.load()
        registry = Registry(settings, watch)
        keeper = Keeper(registry.read, partial(start_live, settings), settings.canary)
        gateway = Gateway(keeper, watch, Capture() if settings.capture else None)
        server = make_server(guarded(gateway, settings, port, add), SHUTDOWN_S)
        gateway.stop = partial(setattr, server, "should_exit", True)
        on_ready(f"http://{_bracketed(settings.host)}:{port}")
        server.run([listening])
        if gateway.failure is not None:
            raise gateway.failure


def make_server(app: ASGIApp, shutdown_s: int) -> uvicorn.Server:
    """Return a server that sends no Server header and logs no requests. `shutdown_s`: seconds for its last answers."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            http="h11",
            ws="none",
            timeout_graceful_shutdown=shutdown_s,
            server_header=False,
            # The guard checks what the client sent, not what a header says that it sent.
            proxy_headers=False,
        )
    )


def guarded(
    gateway: Gateway, settings: GatewaySettings, port: int, add: Callable[[], Addition] | None = None
) -> ASGIApp:
    """Return the gateway behind the guard, with its page and, unless other machines can reach it, `add`'s routes."""
    app = gateway.app()
    additions = [add()] if add is not None and is_loopback(settings.host) else []
    app.router.routes += [*page_routes(), *(route for added in additions for route in added.routes)]
    database = sqlite3.connect(database_path(), check_same_thread=False)
    names = _LOOPBACK if is_loopback(settings.host) else (settings.host,)
    hosts = own_hosts(names, port) | {host.lower() for host in settings.allow_hosts}
    return Guard(app, hosts, [*(added.door for added in additions), Door(partial(client_of, database))])


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address that only this machine can reach."""
    return host in _LOOPBACK


def own_hosts(names: Sequence[str], port: int) -> frozenset[str]:
    """Return the accepted values of the Host header."""
    # Clients leave the usual port out.
    bare = {_bracketed(name) for name in names} if port == HTTP_PORT else set()
    return frozenset({f"{_bracketed(name)}:{port}" for name in names} | bare)


def start_live(settings: GatewaySettings, deployment: Deployment) -> LiveBackend:
    """Start a model server, load everything of `deployment` and warm it up.

    Raises HivetuneError and its subclasses, after which nothing is left running.
    """
    base = base_gguf(deployment.model, deployment.model_sha256, settings.quant)
    server = ServerSettings(
        adapters=tuple((adapter, 0.0) for adapter in deployment.served.values()),
        slots=settings.slots,
        context_tokens=settings.context_tokens,
        threads=settings.threads,
        device=deployment.device,
        batch_tokens=PROMPT_BATCH,
    )
    # Where it does not fit, the kernel might end the run that has the card.
    if deployment.device == "cpu" and base.stat().st_size > psutil.virtual_memory().available:
        raise MachineNotFit(
            f"a training run uses {settings.card}, and {deployment.model} does not fit into the main memory",
            hint="it is served again when the run ends: hivetune runs",
        )
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(open_backend(base, server))
        backend.complete([{"role": "user", "content": "Hello"}], max_tokens=1)
        properties = backend.request("/props")
        return LiveBackend(
            deployment,
            backend,
            settings.slots,
            stack.pop_all().close,
            context_tokens=settings.context_tokens,
            takes_tools=bool(properties.get("chat_template_caps", {}).get("supports_tools", True)),
            template=str(properties.get("chat_template", "")),
        )


class Registry:
    """The releases to serve and to watch, read again after each change of hive.db and every `READ_AGAIN_S`."""

    def __init__(self, settings: GatewaySettings, watch: Watch):
        self._settings, self._watch = settings, watch
        self._database = sqlite3.connect(database_path(), check_same_thread=False)
        self._seen: tuple[int, float] = (-1, -math.inf)
        self._state = Wanted()

    def read(self) -> Wanted:
        """Return the deployment that should be served now. Raises HivetuneError, sqlite3.Error."""
        (version,) = self._database.execute("PRAGMA data_version").fetchone()
        now_s = time.monotonic()
        if version != self._seen[0] or now_s - self._seen[1] >= READ_AGAIN_S:
            with closing(open_database()) as database:
                self._state = wanted(database, self._settings.names)
                due: dict[str, str] = {}
                for name in self._state.champions:
                    due |= due_watches(database, name, canary=self._settings.canary > 0, now=time.time())
            self._watch.keep(due)
            self._seen = version, now_s
        # On a full disk the counts are kept, and saved later.
        with contextlib.suppress(HivetuneError, sqlite3.Error):
            self._watch.save_now_and_then(now_s)
        return placed(self._state, self._settings.card)


def placed(state: Wanted, card: str) -> Wanted:
    """Return the state with its deployment on the card, or on the CPU while a run trains on that card."""
    if not card:
        return state
    taken = training_on(card)
    deployment = state.deployment and replace(state.deployment, device="cpu" if taken else card)
    return replace(state, deployment=deployment, taken=card if taken else "")


def _roll_back(label: str, reason: str) -> None:
    """Roll back `label` if it is still the champion, or withdraw it if it is still the candidate."""
    # A person may have been faster, which the registry refuses.
    with closing(open_database()) as database, contextlib.suppress(UsageError):
        rollback(database, label, by="gateway", reason=reason)


def listen_on(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises Busy if the port is taken, UsageError for an address of another machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's delay off only then, and without, small answers took 40 ms more.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise Busy(f"port {port} of {host} is in use", hint="choose another one with --port") from None
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="give an address of this machine (--host) and a port from 1024 on (--port)",
        ) from None
    return listening


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def refuse_open(settings: GatewaySettings, num_clients: int) -> None:
    """Raise UsageError for an address that other machines can reach while no client has a token."""
    if not is_loopback(settings.host) and not num_clients:
        raise UsageError(
            f"--host {settings.host} can be reached from other machines, and no client has a token",
            hint="make one first: hivetune clients --new NAME",
        )

"""The guard of every request, and the clients whose tokens it knows.

It checks Host, Origin, size and token on every path before anything else reads the request.
"""

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hivetune.base.database import transaction
from hivetune.base.disk import home, sha256_bytes
from hivetune.base.paths import quoted
from hivetune.errors import UsageError
from hivetune.serve.request import error_body

# Of a body, before anything is known of it: of a declared length here, of others where they are read (api.py). What no
# context holds is refused once the context is known (forward.py).
LIMIT_BYTES = 8 << 20
# Of a client that reads no answer, or goes on sending what was refused. A slow reader holds up whoever needs another
# adapter.
SLOW_CLIENT_S = 30.0
# int() also takes signs, underscores and other alphabets' digits, which a proxy reads otherwise.
_SIZE = re.compile("[0-9]{1,18}")
# Paths without a token: the page itself holds nothing, and /login is where a browser brings its token.
OPEN = frozenset({"/", "/health", "/login", "/chat.js", "/chat.css"})
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    # With no-referrer a browser sends `Origin: null` with a form of our own.
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
    # Whatever a model says, the page loads and runs nothing but its own files.
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
)


class Client(NamedTuple):
    """A client of the gateway. `revoked`: the time when its token was revoked, or None."""

    name: str
    created: float
    revoked: float | None


def make_client(database: sqlite3.Connection, name: str) -> str:
    """Create a client and return its token, which is stored only as a hash. Raises UsageError for a taken name."""
    if not name or not name.isprintable():
        raise UsageError(f"{name!r} can't be the name of a client", hint="use printable characters")
    token = f"hive-{secrets.token_urlsafe(32)}"
    with transaction(database):
        if any(client.name == name and client.revoked is None for client in clients(database)):
            hint = f"revoke it first: hivetune clients --revoke {quoted(name)}"
            raise UsageError(f"the client {name!r} already has a token", hint=hint)
        database.execute("INSERT OR REPLACE INTO clients VALUES (?, ?, ?, NULL)", (name, _hash(token), time.time()))
    return token


def revoke_client(database: sqlite3.Connection, name: str) -> None:
    """Refuse the client's token from now on. Raises UsageError for an unknown client."""
    statement = "UPDATE clients SET revoked = ? WHERE name = ? AND revoked IS NULL"
    with transaction(database):
        revoked = database.execute(statement, (time.time(), name)).rowcount
    if not revoked:
        names = ", ".join(client.name for client in clients(database) if client.revoked is None) or "none"
        raise UsageError(f"no client is called {name!r}", hint=f"there are: {names}")


def clients(database: sqlite3.Connection) -> list[Client]:
    """Return all clients by name, revoked ones included."""
    return [Client(*row) for row in database.execute("SELECT name, created, revoked FROM clients ORDER BY name")]


def client_of(database: sqlite3.Connection, token: str) -> str | None:
    """Return the name of the client with this token, or None."""
    digest, holder = _hash(token), None
    for name, stored in database.execute("SELECT name, token_sha256 FROM clients WHERE revoked IS NULL"):
        # All in constant time: else the time of a refusal would tell how much of a hash is right.
        if hmac.compare_digest(stored, digest):
            holder = str(name)
    return holder


def _hash(token: str) -> str:
    # A random token of 256 bits can't be guessed, so it needs no slow hash.
    return hashlib.sha256(token.encode()).hexdigest()


def cookie_of_home(kind: str = "hivetune") -> str:
    """Return the name of this home's cookie."""
    # The servers of two homes have two ports, which share their cookies.
    return f"{kind}-{sha256_bytes(os.fsencode(home()))[:8]}"


@dataclass(frozen=True)
class Door:
    """The access rule for the paths below `below`. `client_of` returns the client of a token or of a cookie's value, or
    None. `open`: paths that need no token. `login`: the page to which a browser without a token is redirected; if
    empty, the request is refused."""

    client_of: Callable[[str], str | None]
    below: str = ""
    cookie: str = field(default_factory=cookie_of_home)
    open: frozenset[str] = OPEN
    login: str = ""


class Guard:
    """An ASGI application that protects another one. `hosts`: the accepted values of Host, in lower case. Of `doors`,
    the first one whose path matches a request is used; a request that matches none is refused."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], doors: Sequence[Door]):
        self.app, self.hosts, self.doors = app, hosts, doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(scope["path"], receive, answered, *refusal)
            return
        await self.app(scope, receive, answered)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str, str] | None:
        """Return HTTP status, message and the address to redirect a browser to; None for a request that may pass."""
        names = [name for name, _ in scope["headers"]]
        # Of two tokens a proxy may have checked the other one. h11 refuses two lengths and two hosts.
        if names.count(b"authorization") > 1 or names.count(b"x-api-key") > 1:
            return 400, "a request has one token", ""
        # A page of another site can reach a port of this machine through a rebound name, a form or a script. Host and
        # Origin reveal that, on every path without exception: CVE-2025-14279 and CVE-2026-2611 were one too few.
        host = headers.get("host", "").lower()
        if host not in self.hosts:
            named = ascii(host)[1:-1][:100] or "none"
            message = f"the Host {named} is not served here; if it is yours: hivetune serve --allow-host {named}"
            return 421, message, ""
        if "origin" in headers and headers["origin"].lower().partition("://")[2] not in self.hosts:
            return 403, "requests from other sites are refused", ""
        size = headers.get("content-length", "0")
        if not _SIZE.fullmatch(size) or int(size) > LIMIT_BYTES:
            return 413, f"a request must have at most {LIMIT_BYTES:,} bytes", ""
        # Each door has its own tokens: a client of the API may not use the dashboard.
        path = scope["path"]
        door = next((door for door in self.doors if f"{path}/".startswith(f"{door.below}/")), None)
        try:
            client = door.client_of(token_of(headers, door.cookie)) if door is not None else None
        except sqlite3.Error as error:
            return 503, f"the tokens of clients can't be read: {error}; look at hive.db with: hivetune doctor", ""
        scope["client_name"], scope["cookie_name"] = client, door.cookie if door is not None else ""
        if client is not None or (door is not None and path in door.open):
            return None
        if door is not None and door.login:
            get = scope["method"] == "GET"
            return (303, "sign in first", door.login) if get else (401, f"sign in first, at {door.login}", "")
        return 401, "a token is needed: Authorization: Bearer TOKEN; make one with: hivetune clients --new NAME", ""


def token_of(headers: Mapping[str, str], cookie_name: str) -> str:
    """Return the token in the Authorization header, in Anthropic's x-api-key or in the login cookie, or ""."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    if "x-api-key" in headers:
        return headers["x-api-key"].strip()
    # Ports share cookies, so the cookie of another program may stand before ours, in whatever form.
    return cookie_parser(headers.get("cookie", "")).get(cookie_name, "")


async def _refuse(path: str, receive: Receive, send: Send, status: int, message: str, location: str) -> None:
    """Refuse a request, and read for a while the rest of its body, so that the client gets the response."""
    body = json.dumps(error_body(status, message, path=path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"location", location.encode())] if location else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    # A connection that is closed before its request is read is reset, and the answer may be lost (RFC 9112, 9.6).
    with suppress(TimeoutError):
        async with asyncio.timeout(SLOW_CLIENT_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})

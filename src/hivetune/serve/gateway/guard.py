"""What every request passes before anything reads it: Host, Origin, size and token, on every path. Plain ASGI.

Who may come in is a question of doors: the dashboard behind the gateway has another token than the API's clients.

A page of another site can reach a port on this machine (a rebound name, a form, a script): Host and Origin say so, and
are checked on every path without exception (MLflow's CVE-2025-14279 and CVE-2026-2611 were one path too few).
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LIMIT_BYTES = 8 << 20
READ_ON_S = 5.0  # of a request that is refused
COOKIE = "hivetune"
# Paths without a token: the page itself holds nothing, and /login is where a browser brings its token.
OPEN = frozenset({"/", "/health", "/login", "/chat.js", "/chat.css"})
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer a browser sends `Origin: null` with a form of our own
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
)


@dataclass(frozen=True)
class Door:
    """Who may ask for what lies below a path. `client_of`: token, or value of the cookie -> client, or None. `open`:
    paths that need no token. `login`: where a browser without one is sent; empty: it is refused."""

    client_of: Callable[[str], str | None]
    below: str = ""
    cookie: str = COOKIE
    open: frozenset[str] = OPEN
    login: str = ""


class Guard:
    """Wraps an app. `hosts`: the values of Host that are ours, in lower case. `doors`: the first one whose path a
    request lies below counts; a request that lies below none is refused."""

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
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(receive, send, *refusal)
            return
        await self.app(scope, _limited(receive, LIMIT_BYTES), _with_headers(send))

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str, str] | None:
        """Status, what is said, and where a browser is sent instead; None for a request that may pass."""
        if headers.get("host", "").lower() not in self.hosts:
            return 421, "this Host is not served here", ""
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] not in self.hosts:
            return 403, "requests from other sites are refused", ""
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size) > LIMIT_BYTES:
            return 413, f"a request holds at most {LIMIT_BYTES:,} bytes", ""
        path = scope["path"]
        door = next((door for door in self.doors if f"{path}/".startswith(f"{door.below}/")), None)
        client = door.client_of(token_of(headers, door.cookie)) if door is not None else None
        scope["client_name"] = client
        if client is not None or (door is not None and path in door.open):
            return None
        if door is not None and door.login:
            get = scope["method"] == "GET"
            return (303, "sign in first", door.login) if get else (401, f"sign in first, at {door.login}", "")
        return 401, "a token is needed: Authorization: Bearer TOKEN; make one with: hivetune clients --new NAME", ""


class TooLarge(Exception):
    """A body without a length grew beyond the limit."""


def token_of(headers: Mapping[str, str], cookie_name: str = COOKIE) -> str:
    """The token of a request's Authorization header, or of the cookie that the login set: ports share their cookies,
    so that one of another program, in whatever form, may stand before it."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    return cookie_parser(headers.get("cookie", "")).get(cookie_name, "")


def error_body(status: int, message: str, kind: str = "") -> dict[str, Any]:
    """An error as the OpenAI API words it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    kind = kind or kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


async def _refuse(receive: Receive, send: Send, status: int, message: str, location: str) -> None:
    """A connection that is closed before its request is read is reset, and the answer may be lost (RFC 9112, 9.6): what
    is still sent is read and thrown away for a while."""
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    headers += [(b"location", location.encode())] if location else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_ON_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


def _limited(receive: Receive, limit_bytes: int) -> Receive:
    read = 0

    async def limited() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit_bytes:
            raise TooLarge
        return message

    return limited


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *HEADERS]
        await send(message)

    return with_headers

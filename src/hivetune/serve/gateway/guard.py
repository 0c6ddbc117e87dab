"""What every request passes before anything reads it: Host, Origin, size and token, on every path. Plain ASGI.

A page of another site can reach a port on this machine (a rebound name, a form, a script): Host and Origin say so, and
are checked on every path without exception (MLflow's CVE-2025-14279 and CVE-2026-2611 were one path too few).
"""

import http.cookies
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LIMIT_BYTES = 8 << 20
COOKIE = "hivetune"
# Paths without a token: the page itself holds nothing, and /login is where a browser brings its token.
OPEN = frozenset({"/", "/health", "/login", "/chat.js", "/chat.css"})
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
)


class Guard:
    """Wraps an app. `hosts`: the values of Host that are ours, in lower case; `client_of`: token -> client or None."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], client_of: Callable[[str], str | None]):
        self.app, self.hosts, self.client_of = app, hosts, client_of

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
            await refuse(send, *refusal)
            return
        await self.app(scope, _limited(receive, LIMIT_BYTES), _with_headers(send))

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        if headers.get("host", "").lower() not in self.hosts:
            return 421, "this Host is not served here"
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] not in self.hosts:
            return 403, "requests from other sites are refused"
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size) > LIMIT_BYTES:
            return 413, f"a request holds at most {LIMIT_BYTES:,} bytes"
        client = self.client_of(token_of(headers))
        if client is None and scope["path"] not in OPEN:
            return (
                401,
                "a token is needed: Authorization: Bearer TOKEN; make one with: hivetune clients --new NAME",
            )
        scope["client_name"] = client
        return None


class TooLarge(Exception):
    """A body without a length grew beyond the limit."""


def token_of(headers: Mapping[str, str]) -> str:
    """The token of a request's Authorization header, or of the cookie that /login set."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    try:
        cookie = http.cookies.SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except http.cookies.CookieError:
        return ""
    return cookie.value if cookie is not None else ""


def error_body(status: int, message: str, kind: str = "") -> dict[str, Any]:
    """An error as the OpenAI API words it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    kind = kind or kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


async def refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


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

"""The dashboard as an ASGI application, inside the gateway or as a server of its own: pages, forms, login.

A person confirms an action on its own page and posts the form with its token. Errors are pages in plain words.
"""

import asyncio
import os
import socket
import sqlite3
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from hivetune.dashboard import page
from hivetune.dashboard.acts import FORMS
from hivetune.dashboard.page import BELOW, LOGIN, STATIC, MakePage, Page, PageRequest, fragment, whole
from hivetune.dashboard.pages import PAGES
from hivetune.dashboard.review import act_on_row, review_page
from hivetune.dashboard.watched import Watcher
from hivetune.errors import Busy, HivetuneError, NotDeployed, NotThere, UsageError
from hivetune.serve.guard import Guard
from hivetune.serve.run import Addition, listen_on, make_server, own_hosts

MAX_FORM_BYTES = 64 << 10  # a correction is the longest, and at most as long as an answer
FORM_TIMEOUT_S = 30.0  # a connection is held so long by whoever sends a form slowly
HOST = "127.0.0.1"
# An open page asks again every 3 s and would delay the end.
SHUTDOWN_S = 2
# Training comes first. Beside four busy processes on two cores, the first page of a home with a run of 100,000 steps
# took 11 s at priority 19 and 3 s at 5.
LOW_PRIORITY = 5
_T = TypeVar("_T")


class _Forged(HivetuneError):
    """Raised for a form without a valid token of its page (cross-site request forgery)."""


STATUSES: Mapping[type[Exception], int] = {_Forged: 403, NotDeployed: 409, Busy: 409, UsageError: 400, NotThere: 404}


def dashboard_addition() -> Addition:
    """Return the dashboard's routes with their access rule."""
    watcher, thread = Watcher(), ThreadPoolExecutor(1, "dashboard")

    async def drawn(make: Callable[[], _T]) -> _T:
        """Return the result of `make`, called in the one thread that makes all pages, since training has precedence."""
        return await asyncio.get_running_loop().run_in_executor(thread, make)

    async def answered(make: MakePage, request: Request) -> Response:
        asked = _page_request(request, await _checked_form(request) if request.method == "POST" else None)
        return HTMLResponse(await drawn(lambda: whole(make(watcher, asked), asked)))

    async def reviewed(request: Request) -> Response:
        """Perform an action on a stored row. Respond with the changed row to a script, else with the whole page."""
        form = await _checked_form(request)
        row = await drawn(partial(act_on_row, form))
        if request.headers.get("accept") == "application/json":
            return JSONResponse({"id": row.id, "html": fragment("review_row.html", {"row": row})})
        back = urllib.parse.urlencode(dict(urllib.parse.parse_qsl(form.get("back", ""))))
        return RedirectResponse(f"{BELOW}/review?{back}", 303)

    routes = [
        Route("/login", _login, methods=["GET", "POST"]),
        Route("/logout", _logout, methods=["POST"]),
        *(Route(f"/static/{name}", partial(_static, path)) for name, path in STATIC.items()),
        *(Route(path, partial(answered, make), methods=["GET", "POST"]) for path, make in FORMS.items()),
        Route("/review/act", reviewed, methods=["POST"]),
        *(Route(path, partial(answered, make)) for path, make in {**PAGES, "/review": review_page}.items()),
    ]
    # What is told in plain words; any other is a bug.
    handlers = dict.fromkeys((HTTPException, HivetuneError, OSError, sqlite3.Error, Exception), _refusal)
    return Addition((Mount(BELOW, app=Starlette(routes=routes, exception_handlers=handlers)),), page.dashboard_door())


def _page_request(request: Request, form: Mapping[str, str] | None = None) -> PageRequest:
    # `path` is what Mount adds: the rest of the address.
    named = {key: str(value) for key, value in request.path_params.items() if key != "path"}
    return PageRequest(request.url.path.removeprefix(BELOW), named, dict(request.query_params), form)


async def _form(request: Request) -> dict[str, str]:
    # Starlette's own reading needs python-multipart, whose parser had CVE-2024-24762. A form here is urlencoded.
    body = b""
    try:
        async with asyncio.timeout(FORM_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_FORM_BYTES:
                    raise UsageError(f"the form has more than {MAX_FORM_BYTES:,} bytes: shorten the text")
        fields = urllib.parse.parse_qs(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50)
    except (TimeoutError, ClientDisconnect):
        raise UsageError("the form is incomplete: open its page again") from None
    except ValueError:
        raise UsageError("the form can't be read: open its page again") from None
    return {name: values[-1] for name, values in fields.items()}


async def _checked_form(request: Request) -> dict[str, str]:
    """Return the fields of a form that carries this dashboard's token."""
    form = await _form(request)
    if not page.is_equal(form.get("token", ""), page.form_token(_page_request(request).path)):
        raise _Forged("this form is not from this dashboard, or is an old one", hint="open the page again")
    return form


async def _login(request: Request) -> Response:
    """Exchange the token, from a form or from the address that the terminal shows, for a cookie that no script can
    read."""
    sent = await _form(request) if request.method == "POST" else request.query_params
    token = sent.get("token", "").strip()
    if page.is_token(token):
        # "lax" would send the cookie with a link from another site, and the page would open there.
        response: Response = RedirectResponse(f"{BELOW}/", 303)
        response.set_cookie(page.cookie_name(), page.cookie_value(), httponly=True, samesite="strict", path=BELOW)
        return response
    shown = Page("login.html", "Sign in", {"wrong": bool(token)})
    return HTMLResponse(whole(shown, _page_request(request), signed_in=False), 401 if token else 200)


async def _logout(request: Request) -> Response:
    await _checked_form(request)
    response = RedirectResponse(LOGIN, 303)
    response.delete_cookie(page.cookie_name(), path=BELOW, httponly=True, samesite="strict")
    return response


async def _static(path: Path, request: Request) -> Response:
    kind = "text/javascript" if path.suffix == ".js" else "text/css"
    # Read again each time, so that a page is never beside the style sheet of an earlier version.
    return Response(path.read_bytes(), media_type=f"{kind}; charset=utf-8")


async def _refusal(request: Request, error: Exception) -> Response:
    """Return the page for an error, with its HTTP status."""
    status, message, lines = STATUSES.get(type(error), 500), "an unexpected error; the log of the server has it", []
    match error:
        case HivetuneError():
            message, lines = error.message, [error.hint] if error.hint else []
        case HTTPException():
            messages = {404: "there is no such page", 405: f"{request.method} is not allowed here"}
            status, message = error.status_code, messages.get(error.status_code, error.detail)
        case OSError():
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        case sqlite3.Error():
            message = f"the store can not be read now: {error}"
    asked = _page_request(request)
    shown = Page("message.html", HTTPStatus(status).phrase, {"problem": message, "lines": lines})
    return HTMLResponse(whole(shown, asked, signed_in=asked.path != "/login"), status)


def run_dashboard(port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` is called with the address. Raises Busy if the port is taken."""
    os.nice(LOW_PRIORITY)
    with closing(listen_on(HOST, port)) as listening:
        on_ready(f"http://{HOST}:{listening.getsockname()[1]}{BELOW}/")
        make_server(guarded_dashboard(listening), SHUTDOWN_S).run([listening])


def guarded_dashboard(listening: socket.socket) -> ASGIApp:
    """Return the whole ASGI application of this server, protected by the guard."""
    added = dashboard_addition()
    # A path that is not below the dashboard has no door, and is refused.
    hosts = own_hosts((HOST, "localhost"), listening.getsockname()[1])
    return Guard(Starlette(routes=list(added.routes)), hosts, [added.door])

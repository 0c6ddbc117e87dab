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

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

import hivetune
from hivetune.dashboard.access import (
    BELOW,
    STATIC,
    cookie_name,
    cookie_value,
    dashboard_door,
    is_form_token,
    is_token,
    takes_ticket,
)
from hivetune.dashboard.page import DASHBOARD_FOLDER, Page, PageRequest, fragment, whole
from hivetune.dashboard.pages.acts import FORMS, MakePage
from hivetune.dashboard.pages.data import data_page, report_page
from hivetune.dashboard.pages.now import cycles_page, loop_page, now_page
from hivetune.dashboard.pages.releases import release_page, releases_page, rows_page
from hivetune.dashboard.pages.review import act_on_row, review_page
from hivetune.dashboard.pages.runs import evaluation_page, run_page, runs_page
from hivetune.dashboard.watched import Watcher
from hivetune.errors import Busy, HivetuneError, NotDeployed, NotThere, UsageError
from hivetune.serve.guard import Door, Guard
from hivetune.serve.run import Addition, listen_on, own_hosts

PAGES: Mapping[str, MakePage] = {
    "/": now_page,
    "/runs": runs_page,
    "/runs/{run}": run_page,
    "/runs/{run}/evaluation": evaluation_page,
    "/cycles": cycles_page,
    "/cycles/{name}": loop_page,
    "/releases": releases_page,
    "/releases/{name}/{version:int}": release_page,
    "/releases/{name}/{version:int}/rows": rows_page,
    "/data": data_page,
    "/data/{snapshot}/report": report_page,
    "/review": review_page,
}
# The pages of runs and snapshots have style sheets of their own.
_PACKAGE = Path(hivetune.__file__).parent
_FILES = {
    "dashboard.css": (DASHBOARD_FOLDER / "static" / "dashboard.css", "text/css"),
    "dashboard.js": (DASHBOARD_FOLDER / "static" / "dashboard.js", "text/javascript"),
    "page.css": (_PACKAGE / "judge" / "page.css", "text/css"),
    "report.css": (_PACKAGE / "data" / "prepare" / "page.css", "text/css"),
}
# Errors that are pages in plain words; any other is a bug.
_REFUSALS: tuple[type[Exception], ...] = (HivetuneError, OSError, sqlite3.Error)
_T = TypeVar("_T")
MAX_FORM_BYTES = 64 << 10
REVIEW_ACT = "/review/act"
FORM_TIMEOUT_S = 30.0


def dashboard_addition() -> Addition:
    """Return routes and door of the dashboard."""
    return Addition((Mount(BELOW, app=_Dashboard().app()),), dashboard_door())


class _Dashboard:
    """The handlers of the dashboard, with the runs that they watch."""

    def __init__(self) -> None:
        self.watcher = Watcher()
        self._thread = ThreadPoolExecutor(1, "dashboard")

    def app(self) -> Starlette:
        routes = [
            Route("/login", _login, methods=["GET", "POST"]),
            Route("/logout", _logout, methods=["POST"]),
            *(Route(f"/static/{name}", partial(_static, name)) for name in STATIC),
            *(Route(path, partial(self._act, *form), methods=["GET", "POST"]) for path, form in FORMS.items()),
            Route(REVIEW_ACT, self._review, methods=["POST"]),
            *(Route(path, partial(self._page, make)) for path, make in PAGES.items()),
        ]
        handlers = {HTTPException: _http_error, Exception: _bug, **dict.fromkeys(_REFUSALS, _refusal)}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _page(self, make: MakePage, request: Request) -> Response:
        page_request = _page_request(request)
        return HTMLResponse(await self._drawn(lambda: whole(make(self.watcher, page_request), page_request)))

    async def _drawn(self, make: Callable[[], _T]) -> _T:
        """Return what `make` returns. All pages are made in one thread: training comes first."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def _act(self, confirm: MakePage, do: MakePage, request: Request) -> Response:
        form = None if request.method == "GET" else await _checked_form(request)
        page_request = _page_request(request, form)
        page = await self._drawn(partial(confirm if form is None else do, self.watcher, page_request))
        return HTMLResponse(whole(page, page_request))

    async def _review(self, request: Request) -> Response:
        """Do an act on a stored row. A script gets the row as it is now, a browser without one the page again."""
        form = await _checked_form(request)
        row = await self._drawn(partial(act_on_row, form))
        if request.headers.get("accept") == "application/json":
            return JSONResponse({"id": row.id, "html": fragment("review_row.html", {"row": row})})
        back = urllib.parse.urlencode(dict(urllib.parse.parse_qsl(form.get("back", ""))))
        return RedirectResponse(f"{BELOW}/review?{back}", 303)


def _page_request(request: Request, form: Mapping[str, str] | None = None) -> PageRequest:
    named = {key: str(value) for key, value in request.path_params.items() if key != "path"}
    return PageRequest(request.url.path.removeprefix(BELOW), named, dict(request.query_params), form or {})


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form, each once. Raises UsageError."""
    body = b""
    try:
        async with asyncio.timeout(FORM_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_FORM_BYTES:
                    raise UsageError(f"a form holds at most {MAX_FORM_BYTES:,} bytes")
    except (TimeoutError, ClientDisconnect):
        raise UsageError("the form is incomplete") from None
    try:
        fields = urllib.parse.parse_qs(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError:
        raise UsageError("the form can't be read") from None
    return {name: values[-1] for name, values in fields.items()}


async def _checked_form(request: Request) -> dict[str, str]:
    """Return the fields of a form of this dashboard."""
    form = await _form(request)
    if not is_form_token(_page_request(request).path, form.get("token", "")):
        raise _Forged("this form is not from this dashboard, or is an old one", hint="open the page again")
    return form


class _Forged(HivetuneError):
    """The form lacks the token of its page."""


async def _login(request: Request) -> Response:
    """Exchange the token, from a form or from the address that the terminal shows, for a cookie that no script can
    read."""
    page_request = _page_request(request)
    sent = await _form(request) if request.method == "POST" else page_request.query
    token = sent.get("token", "").strip()
    if is_token(token) or takes_ticket(token):
        response: Response = RedirectResponse(f"{BELOW}/", 303)
        response.set_cookie(cookie_name(), cookie_value(), httponly=True, samesite="strict", path=BELOW)
        return response
    page = Page("login.html", "Sign in", {"wrong": bool(token)})
    return HTMLResponse(whole(page, page_request, signed_in=False), 401 if token else 200)


async def _logout(request: Request) -> Response:
    await _checked_form(request)
    response = RedirectResponse(f"{BELOW}/login", 303)
    response.delete_cookie(cookie_name(), path=BELOW, httponly=True, samesite="strict")
    return response


async def _static(name: str, request: Request) -> Response:
    path, kind = _FILES[name]
    return Response(path.read_bytes(), media_type=f"{kind}; charset=utf-8")


def _error_page(request: Request, title: str, status: int, message: str, hint: str = "") -> Response:
    page_request = _page_request(request)
    page = Page("error.html", title, {"message": message, "hint": hint})
    return HTMLResponse(whole(page, page_request, signed_in=page_request.path != "/login"), status)


async def _refusal(request: Request, error: Exception) -> Response:
    message, status = _error_text(error)
    hint = error.hint if isinstance(error, HivetuneError) else ""
    return _error_page(request, HTTPStatus(status).phrase, status, message, hint)


def _error_text(error: Exception) -> tuple[str, int]:
    """Return what happened in words, and the HTTP status for it."""
    if isinstance(error, HivetuneError):
        kinds: dict[type[HivetuneError], int] = {
            _Forged: 403,
            NotDeployed: 409,
            Busy: 409,
            UsageError: 400,
            NotThere: 404,
        }
        return error.message, kinds.get(type(error), 500)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}", 500
    return f"the store can't be read now: {error}" if isinstance(error, sqlite3.Error) else str(error), 500


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such page", 405: f"{request.method} is not allowed here"}
    status = error.status_code
    return _error_page(request, HTTPStatus(status).phrase, status, messages.get(status, error.detail))


async def _bug(request: Request, error: Exception) -> Response:
    return _error_page(request, "Error", 500, "an unexpected error; the log of the server has it")


HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
# Training comes first. Beside four busy processes on two cores, the first page of a home with a run of 100,000 steps
# took 11 s at priority 19 and 3 s at 5.
LOW_PRIORITY = 5
_SHUTDOWN_S = 2


def run_dashboard(port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` gets the address. Raises Busy when the port is taken."""
    os.nice(LOW_PRIORITY)
    with closing(listen_on(HOST, port)) as listening:
        config = uvicorn.Config(
            guarded_dashboard(listening),
            log_level="warning",
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_S,
            server_header=False,
        )
        on_ready(f"http://{HOST}:{listening.getsockname()[1]}{BELOW}/")
        uvicorn.Server(config).run([listening])


def guarded_dashboard(listening: socket.socket) -> ASGIApp:
    """Return everything that this server answers, behind the guard."""
    added = dashboard_addition()
    app = Starlette(routes=[Route("/", _to_dashboard), *added.routes])
    elsewhere = Door(client_of=lambda token: None, open=frozenset({"/"}))
    return Guard(app, own_hosts(_NAMES, listening.getsockname()[1]), [added.door, elsewhere])


async def _to_dashboard(request: Request) -> Response:
    return RedirectResponse(f"{BELOW}/", 303)

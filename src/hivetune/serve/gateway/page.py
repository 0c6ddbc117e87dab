"""The chat page of the gateway, and how a browser trades its token for a cookie. No foreign request, no build step."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hivetune.serve.gateway.guard import COOKIE, error_body, token_of

_FILES = {
    "/": ("chat.html", "text/html"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat.css": ("chat.css", "text/css"),
}


def routes() -> list[Route]:
    """The page's files and /login."""
    return [*(Route(path, _file) for path in _FILES), Route("/login", _login, methods=["POST"])]


async def _file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    content = resources.files("hivetune.serve.gateway").joinpath("page_files", name).read_bytes()
    return Response(content, media_type=f"{kind}; charset=utf-8")


async def _login(request: Request) -> Response:
    """The token comes in the Authorization header and goes back as a cookie that no script can read."""
    if request.scope["client_name"] is None:
        return JSONResponse(error_body(401, "this token is not known; hivetune clients --new NAME makes one"), 401)
    token = token_of({"authorization": request.headers.get("authorization", "")}) or request.cookies.get(COOKIE, "")
    response = JSONResponse({"client": request.scope["client_name"]})
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", path="/")
    return response

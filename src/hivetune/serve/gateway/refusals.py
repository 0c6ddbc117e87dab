"""What the gateway refuses or fails at, in the form of the OpenAI API's errors and in plain words."""

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from hivetune.errors import HivetuneError, MachineNotFit, NotThere, UsageError
from hivetune.serve.gateway.fields import FieldRefused
from hivetune.serve.gateway.guard import TooLarge, error_body
from hivetune.serve.gateway.upstream import Refused
from hivetune.serve.swap.router import Withdrawn

RETRY_AFTER_S = 5


class TooMany(HivetuneError):
    """More requests than may be open."""


def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, HivetuneError)
    if isinstance(error, Refused):
        return _refusal(error.status, error.message)
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    later = {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, TooMany | MachineNotFit):
        return _refusal(429 if isinstance(error, TooMany) else 503, message, later)
    if isinstance(error, FieldRefused):
        return JSONResponse(error_body(400, message, param=error.field), 400)
    if isinstance(error, UsageError):
        status = 410 if isinstance(error, Withdrawn) else 404 if isinstance(error, NotThere) else 400
        return _refusal(status, message)
    return _refusal(502, message)


def _not_served(request: Request, error: Exception) -> Response:
    """Says what there is: a client may expect all of the OpenAI API here, or have left out the /v1."""
    there = [path for path in request.app.routes if isinstance(path, Route) and path.path.startswith("/v1/")]
    named = ", ".join(f"{min(path.methods or {''})} {path.path.replace(':path', '')}" for path in there)
    return _refusal(
        404,
        f"{request.url.path} is not served; here are {named}. For text use /v1/chat/completions; embeddings, images and"
        " speech need a server of their own",
    )


def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    use = (error.headers or {}).get("Allow", "")
    return _refusal(405, f"{request.method} is not allowed at {request.url.path}; use {use}", error.headers)


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error_body(status, message), status, headers)


HANDLERS: Mapping[int | type[Exception], ExceptionHandler] = {
    HivetuneError: _ours,
    TooLarge: lambda request, error: _refusal(413, "the request is too large"),
    404: _not_served,
    405: _wrong_method,
    Exception: lambda request, error: _refusal(500, "an unexpected error; see the log"),
}

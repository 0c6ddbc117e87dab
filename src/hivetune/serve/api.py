"""The gateway's API: answers, models, feedback, metrics, health, and the chat page.

A request is one function, `answer`: read, checked, routed, queued, forwarded, counted and captured. Every answer names
its release (`X-Hivetune-Release`, `system_fingerprint`) and has its own id, which feedback refers to. No prompt and no
answer is ever written to a log.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ExceptionHandler, Message, Receive, Scope, Send

from hivetune.data.read import refuse_constant, unique_keys
from hivetune.errors import HivetuneError, MachineNotFit, NotThere, UsageError
from hivetune.serve import metrics
from hivetune.serve.capture import Capture, CapturedAnswer, Feedback, messages_of
from hivetune.serve.dialects import anthropic, ollama
from hivetune.serve.dialects.base import Dialect, Named, Read, error_body
from hivetune.serve.dialects.openai import OPENAI
from hivetune.serve.dialects.responses import RESPONSES
from hivetune.serve.fields import FeedbackFields, FieldRefused, checked_fields, ignored_fields
from hivetune.serve.forward import Asked, Refused, Upstream, forward, num_tokens, refuse_larger
from hivetune.serve.guard import TooLarge, token_of
from hivetune.serve.metrics import Metrics
from hivetune.serve.route import GREEDY, Withdrawn
from hivetune.serve.servers import Keeper
from hivetune.serve.watch import Watch

MAX_OPEN_PER_CLIENT = 1024  # requests at once, waiting ones included
SLOW_CLIENT_S = 60.0
RETRY_AFTER_S = 5
DIALECTS: tuple[Dialect, ...] = (*OPENAI, RESPONSES, anthropic.ANTHROPIC, *ollama.OLLAMA)

_T = TypeVar("_T")


class TooMany(HivetuneError):
    """Too many concurrent requests."""


@dataclass
class Gateway:
    """The state that all handlers share. Without `capture` nothing is stored. `failed` is called when a bug has ended
    the keeper: nothing is loaded from then on, so the server must end."""

    keeper: Keeper
    watch: Watch
    capture: Capture | None = None
    metrics: Metrics = field(default_factory=Metrics)
    failed: Callable[[BaseException], None] = lambda error: None
    _open: Counter[str] = field(default_factory=Counter)

    def app(self) -> Starlette:
        """Return the ASGI application, without the guard (guard.py) and without the chat page (`page_routes`)."""
        return Starlette(
            routes=[
                *(Route(each.path, partial(self.answer, each), methods=["POST"]) for each in DIALECTS),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
                Route("/v1/feedback", self.feedback, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/api/tags", self.tags),
                Route("/api/show", self.show, methods=["POST"]),
                Route("/api/version", self.version),
                Route("/metrics", self.show_metrics),
                Route("/health", self.health),
            ],
            exception_handlers=HANDLERS,
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async def keep() -> None:
            try:
                await self.keeper.run()
            except Exception as error:  # noqa: BLE001 (it is raised again when the server has ended)
                self.failed(error)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            if self.capture is not None:
                await asyncio.to_thread(self.capture.close)
            await asyncio.to_thread(self.watch.save)

    async def answer(self, dialect: Dialect, request: Request) -> Response:
        """Answer a request of an API: whole, or as a stream."""
        client = request.scope["client_name"] or ""
        if self._open[client] >= MAX_OPEN_PER_CLIENT:
            raise TooMany("too many concurrent requests")
        self._open[client] += 1
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._open.subtract, (client,))
            exchange = await self._read(dialect, request, client)
            try:
                # A server sends nothing, no header either, before an answer is whole or the first piece of a stream is
                # there; so here a disconnect is watched for.
                beginning = stack.enter_async_context(forward(self.keeper, exchange.asked, exchange.routed))
                upstream = await _unless_disconnected(request, beginning)
                if upstream is None:
                    self.metrics.vanished(exchange.label)
                    return Response(status_code=499)  # nobody reads it
                exchange.upstream = upstream
                if exchange.fields.get("stream") is True:
                    return _Stream(exchange.stream(upstream), stack.pop_all(), exchange.headers, dialect.media_type)
                told = await exchange.whole(await upstream.document())
                return JSONResponse(told, headers=exchange.headers)
            except (UsageError, MachineNotFit):  # the client's mistake, or nothing is loaded: not the release's
                raise
            except HivetuneError:
                exchange.failed()
                raise

    async def _read(self, dialect: Dialect, request: Request, client: str) -> "_Exchange":
        """Read a request as its API says."""
        raw = await _raw_body(request)
        contexts = [live.context_tokens for live in self.keeper.lives.values()]
        if contexts:  # before it is parsed
            refuse_larger(dialect.main_field, len(raw), max(contexts))
        document = _document(raw)

        def recall(answer: str) -> list[dict[str, Any]]:
            return messages_of(answer, client)

        if "previous_response_id" in document:  # it looks into hive.db
            read = await asyncio.to_thread(dialect.read, document, recall)
        else:
            read = dialect.read(document, recall)
        return _Exchange(self, dialect, read, document, client, request.headers, len(raw))

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a prompt, as Anthropic's clients ask before they send it."""
        client = request.scope["client_name"] or ""
        fields = (await self._read(anthropic.ANTHROPIC, request, client)).fields
        live = await self.keeper.live(self.keeper.routes.find(fields.get("model", ""), client))
        return JSONResponse({"input_tokens": await num_tokens(live, fields)})

    async def tags(self, request: Request) -> Response:
        return JSONResponse(ollama.tags(self.keeper.routes.names()))

    async def show(self, request: Request) -> Response:
        document = _document(await _raw_body(request))
        name = str(document.get("model") or document.get("name") or "").removesuffix(":latest")
        live = await self.keeper.live(self.keeper.routes.find(name, ""))
        return JSONResponse(ollama.show(live.template, live.context_tokens, takes_tools=live.takes_tools))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": ollama.VERSION})

    async def feedback(self, request: Request) -> Response:
        """Join `{"id", "rating": "up|down", "correction"?, "reason"?}` to a captured answer."""
        fields = checked_fields(FeedbackFields, _document(await _raw_body(request)))
        client = request.scope["client_name"] or ""
        if fields.keys() <= {"id", "reason"}:
            raise UsageError('feedback needs a "rating" or a "correction"')
        if self.capture is None:
            raise UsageError("answers are not captured, so none can be rated", hint="start the gateway with --capture")
        entry = Feedback(client=client, **fields)
        label = await self.capture.rate(entry)
        if entry.rating == "down":
            self.watch.complained(label, entry.id, client)
        return JSONResponse({"id": entry.id, "release": label}, status_code=202)

    async def models(self, request: Request) -> Response:
        served = [self._model(name) for name in self.keeper.routes.names()]
        return JSONResponse({"object": "list", "data": served})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.keeper.routes.names():
            raise NotThere(f"the model {name!r} is not served")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        """Describe a model. `defaults`: its generation settings, and the system prompt of most of its rows."""
        defaults = dict(self.keeper.wanted.generation.get(self.keeper.routes.champions.get(name, name), GREEDY))
        return {"id": name, "object": "model", "created": 0, "owned_by": "hivetune", "defaults": defaults}

    async def show_metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text, self.keeper, self.capture)  # it may look at the disk
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        """Answer 200 when every wanted model can be asked, else 503. A client with a token also gets the problems."""
        document: dict[str, Any] = {"status": "ok" if self.keeper.ready else "loading"}
        if request.scope["client_name"] is not None:
            document |= {"champions": dict(self.keeper.routes.champions), "problems": self.keeper.problems}
            if self.capture is not None:
                names = ("captured", "waiting", "left_out", "problem")
                document["capture"] = {name: getattr(self.capture, name) for name in names}
        return JSONResponse(document, 200 if self.keeper.ready else 503)


@dataclass
class _Exchange:
    """One request with its answer, as the counters, the capture and the watch need it. `label`: of its release."""

    gateway: Gateway
    dialect: Dialect
    read: Read
    document: Mapping[str, Any]
    client: str
    request_headers: Mapping[str, str]
    size_bytes: int
    label: str = ""
    id: str = field(default_factory=lambda: f"hive-{secrets.token_hex(12)}")
    started: float = field(default_factory=time.monotonic)
    upstream: Upstream | None = None
    captured: str = ""

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.read.fields

    @property
    def asked(self) -> Asked:
        return Asked(
            self.dialect.upstream,
            self.fields,
            self.client,
            self.session or self.id,
            self.dialect.main_field,
            self.declared,
            self.dialect.thoughts,
            self.size_bytes,
            scored=self.capture is not None,
        )

    @property
    def capture(self) -> Capture | None:
        """Return where the answer is captured: a chat, unless its client wishes that it is not."""
        wish = self.request_headers.get("x-hivetune-capture", "").strip().lower()
        is_wanted = wish in ("", "yes", "true", "1", "on") and "messages" in self.fields
        return self.gateway.capture if is_wanted else None

    def routed(self, label: str) -> None:
        """Note the release before its answer, so that an early failure counts against it too."""
        self.label = label

    @property
    def session(self) -> str | None:
        """Return the session that the client names: X-Session-Id, else metadata.session_id, else OpenAI's `user`."""
        named = _header(self.request_headers, "x-session-id") or self._metadata("session_id")
        return named or self.fields.get("user")

    @property
    def declared(self) -> dict[str, str]:
        """Return the agent and the category that a request declares, by the header X-Hivetune-Agent or its metadata,
        and its system prompt."""
        agent = _header(self.request_headers, "x-hivetune-agent") or self._metadata("agent")
        pairs = {"agent": agent, "category": self._metadata("category")}
        declared = {kind: " ".join(value.split()).casefold() for kind, value in pairs.items() if value}
        first = (self.fields.get("messages") or [{}])[0]
        system = {"system": first.get("content") or ""} if first.get("role") in ("system", "developer") else {}
        return {kind: value for kind, value in (declared | system).items() if value}

    def _metadata(self, key: str) -> str | None:
        value = (self.fields.get("metadata") or {}).get(key)
        return value if isinstance(value, str) and value.strip() else None

    @property
    def begun(self) -> str | None:
        """Return the beginning of the answer, which a client may send as its last message: the model continues it."""
        last = (self.fields.get("messages") or [{}])[-1]
        if last.get("role") != "assistant" or last.get("tool_calls"):
            return None
        return last.get("content") or ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the release in ASCII, the only letters of a header: a base may have any name."""
        headers = {"X-Hivetune-Release": ascii(self.label)[1:-1]}
        if self.captured:
            headers["X-Hivetune-Captured"] = self.captured
        template = "" if self.upstream is None else self.upstream.live.template
        ignored = [self.dialect.names.get(name, name) for name in ignored_fields(self.fields, template)]
        if ignored := [*self.read.ignored, *ignored]:
            headers["X-Hivetune-Ignored"] = ", ".join(ignored)
        return headers

    @property
    def named(self) -> Named:
        return Named(self.id, self.label, self.fields, self.document)

    async def whole(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the answer's document, counted and captured."""
        await self.keep()
        return self.dialect.writer(self.named).whole(document)

    async def stream(self, upstream: Upstream) -> AsyncGenerator[bytes]:
        """Yield server-sent events. An answer that breaks off ends with an error event, never silently."""
        writer = self.dialect.writer(self.named)
        try:
            async for event in upstream.events():
                if piece := writer.event(event):
                    yield piece
        except HivetuneError as error:
            self.failed(broken=True)
            yield writer.error(error.message)
            return
        except (asyncio.CancelledError, GeneratorExit):
            self.gateway.metrics.vanished(self.label)
            raise
        await self.keep()  # before the client is told: whoever saw the end finds it captured
        if self.captured == "later" and self.dialect.media_type == "text/event-stream":
            yield b": hivetune-captured: later\n\n"  # a comment, as HTML's standard of event streams has them
        yield writer.end()

    def failed(self, *, broken: bool = False) -> None:
        self.gateway.metrics.failed(self.label, broken=broken)
        if self.label:
            self.gateway.watch.answered(self.label, self.client, error=True)

    async def keep(self) -> None:
        """Count, watch and capture an answer that is whole."""
        assert self.upstream is not None
        now, said = time.monotonic(), self.upstream.said
        seconds = now - self.started
        self.gateway.metrics.answered(self.label, seconds, now - self.upstream.sent_s, said.tokens)
        self.gateway.watch.answered(self.label, self.client, error=False)
        if self.capture is None:
            return
        message = said.message
        if self.begun and not said.text.startswith(self.begun):  # llama.cpp repeats it in a whole answer alone
            message["content"] = self.begun + said.text
        entry = CapturedAnswer(
            id=self.id,
            label=self.label,
            messages=self.fields["messages"] if self.begun is None else self.fields["messages"][:-1],
            answer=message,
            finish=said.finish,
            tools=self.fields.get("tools") or (),
            session=self.session,
            user=self.fields.get("user"),
            client=self.client,
            keys=self.declared,
            logprob=said.logprob,
            seconds=seconds,
        )
        self.captured = "yes" if await self.capture.keep(entry) else "later"


class _Stream(StreamingResponse):
    """A stream that returns its slot however it ends: read to its end, abandoned by its client before the first byte or
    later, or not read for `SLOW_CLIENT_S`. A slow reader would hold up everybody who needs another adapter."""

    def __init__(
        self,
        content: AsyncGenerator[bytes],
        stack: contextlib.AsyncExitStack,
        headers: Mapping[str, str],
        media_type: str,
    ):
        super().__init__(content, media_type=media_type, headers=headers)
        self._stack, self._content = stack, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(SLOW_CLIENT_S):
                await send(message)

        async with self._stack, contextlib.aclosing(self._content):
            with contextlib.suppress(TimeoutError):  # it is told by its connection, which is closed now
                await super().__call__(scope, receive, send_soon)


async def _unless_disconnected(request: Request, answer: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the answer, or None when the client went away first. Then the model server is told to stop too."""
    answering = asyncio.ensure_future(answer)

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    going = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({answering, going}, return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        for task in (answering, going):
            task.cancel()
        await asyncio.wait({answering, going})  # so that what they hold is given back before anything else is


MAX_NAME_BYTES = 512


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header that names something. Names are sent as UTF-8, and read as Latin-1 by the server. Raises
    FieldRefused for one that is too long to remember."""
    value = headers.get(name)
    if value is None or not value.strip():
        return None
    if len(value) > MAX_NAME_BYTES:
        raise FieldRefused(name, f"a header holds at most {MAX_NAME_BYTES} bytes")
    with contextlib.suppress(UnicodeDecodeError):
        return value.encode("latin-1").decode()
    return value


async def _raw_body(request: Request) -> bytes:
    """Return the body of a request. Raises UsageError."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise UsageError("the client went away") from None


def _document(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. A lone surrogate, which UTF-8 can't encode, is replaced. Raises UsageError for
    other bodies, and for a key with two values."""
    try:
        document = json.loads(raw, parse_constant=refuse_constant, object_pairs_hook=unique_keys)
        if b"\\ud" in raw.lower():
            document = json.loads(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("the body is not a JSON object")
    return document


# Errors say in plain words what to do.


def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HivetuneError)
    if isinstance(error, Refused):
        return _refusal(request, error.status, error.message)
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    if isinstance(error, FieldRefused):
        return JSONResponse(error_body(400, message, error.field, error.code, path=request.url.path), 400)
    statuses = {TooMany: 429, MachineNotFit: 503, Withdrawn: 410, NotThere: 404, UsageError: 400}
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 502)
    return _refusal(request, status, message, {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None)


def _not_served(request: Request, error: Exception) -> Response:
    """Answer with the existing paths. A client may expect the whole OpenAI API here, or may have left out the /v1."""
    routes = [path for path in request.app.routes if isinstance(path, Route) and path.path.startswith("/v1/")]
    named = ", ".join(f"{min(path.methods or {''})} {path.path.replace(':path', '')}" for path in routes)
    return _refusal(
        request,
        404,
        f"{request.url.path} is not served; here are {named}. For text use /v1/chat/completions; images and speech need"
        " a server of their own",
    )


def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    use = (error.headers or {}).get("Allow", "")
    return _refusal(request, 405, f"{request.method} is not allowed at {request.url.path}; use {use}", error.headers)


def _refusal(request: Request, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error_body(status, message, path=request.url.path), status, headers)


HANDLERS: Mapping[int | type[Exception], ExceptionHandler] = {
    HivetuneError: _own_error,
    TooLarge: lambda request, error: _refusal(request, 413, "the request is too large"),
    404: _not_served,
    405: _wrong_method,
    Exception: lambda request, error: _refusal(request, 500, "an unexpected error; see the log"),
}


_FILES = {
    "/": ("chat.html", "text/html"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat.css": ("chat.css", "text/css"),
}


def page_routes() -> list[Route]:
    """Return the routes of the chat page and of /login. The page requests nothing from other sites."""
    return [*(Route(path, _file) for path in _FILES), Route("/login", _login, methods=["POST"])]


async def _file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    content = resources.files("hivetune.serve").joinpath("page_files", name).read_bytes()
    return Response(content, media_type=f"{kind}; charset=utf-8")


async def _login(request: Request) -> Response:
    """Exchange the token in the Authorization header for a cookie that no script can read."""
    if request.scope["client_name"] is None:
        return _refusal(request, 401, "this token is not known; hivetune clients --new NAME makes one")
    name = request.scope["cookie_name"]
    response = JSONResponse({"client": request.scope["client_name"]})
    response.set_cookie(name, token_of(request.headers, name), httponly=True, samesite="strict", path="/")
    return response

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
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Counted
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ExceptionHandler, Message, Receive, Scope, Send

from hivetune.data.read import refuse_constant, unique_keys
from hivetune.errors import HivetuneError, MachineNotFit, NotThere, UsageError
from hivetune.serve.capture import Capture, CapturedAnswer, Feedback, messages_of
from hivetune.serve.dialects import anthropic, ollama
from hivetune.serve.dialects.base import OPENAI, Dialect, Named, Read, error_body
from hivetune.serve.dialects.responses import RESPONSES
from hivetune.serve.fields import FEEDBACK_FIELDS, FieldRefused, checked_fields, ignored_fields
from hivetune.serve.forward import Asked, Refused, Upstream, forward, num_tokens, refuse_larger
from hivetune.serve.guard import SLOW_CLIENT_S, TooLarge, token_of
from hivetune.serve.route import GREEDY, Withdrawn
from hivetune.serve.servers import Keeper
from hivetune.serve.watch import Watch

MAX_OPEN_PER_CLIENT = 1024  # requests at once, waiting ones included
RETRY_AFTER_S = 5
DIALECTS: tuple[Dialect, ...] = (*OPENAI, RESPONSES, anthropic.ANTHROPIC, *ollama.OLLAMA)

_T = TypeVar("_T")


class TooMany(HivetuneError):
    """Too many concurrent requests."""


SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
Gauges = Mapping[str, tuple[str, Callable[[], float]]]


class Metrics:
    """The counters of one gateway for Prometheus. No label holds a prompt, a user or a session."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        by, text = ("release",), "Answers by release and outcome"
        self.answers = Counted("hivetune_answers", text, ("outcome", "release"), registry=own)
        self.tokens = Counted("hivetune_tokens", "Tokens written by release", by, registry=own)
        self.seconds = Histogram("hivetune_answer_seconds", "Seconds per answer", by, buckets=SECONDS, registry=own)

    def show(self, gauges: Gauges) -> None:
        """Add what is read when somebody looks."""
        for name, (text, value) in gauges.items():
            Gauge(f"hivetune_{name}", text, registry=self._registry).set_function(value)

    def count(self, outcome: str, release: str) -> None:
        """Count an answer: ok, error, broken_stream or client_gone."""
        self.answers.labels(outcome, release or "none").inc()

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))


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

    def __post_init__(self) -> None:
        keeper, capture = self.keeper, self.capture

        def waiting() -> float:
            return keeper.live.turns.num_waiting if keeper.live else 0

        def running() -> float:
            return keeper.live.turns.num_running if keeper.live else 0

        self.metrics.show(
            {
                "waiting_requests": ("Requests that wait for a slot", waiting),
                "running_requests": ("Requests that are answered now", running),
                "swaps": ("Model servers that were replaced by others", lambda: keeper.swaps),
                "backend_restarts": ("Model servers that died and were started again", lambda: keeper.restarts),
            }
        )
        if capture is not None:
            self.metrics.show(
                {
                    "captured_answers": ("Answers in the store", lambda: capture.captured),
                    "capture_left_out": ("Answers that could not be stored", lambda: capture.left_out),
                }
            )

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
        asyncio.get_running_loop().set_exception_handler(told_unless_cancelled)

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
            await asyncio.wait({keeping})
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
            exchange = await self._exchange(dialect, request, client)
            try:
                # A server sends nothing, no header either, before an answer is whole or the first piece of a stream is
                # there; so here a disconnect is watched for.
                beginning = stack.enter_async_context(forward(self.keeper, exchange.asked, exchange.routed))
                upstream = await _unless_disconnected(request, beginning)
                if upstream is None:
                    self.metrics.count("client_gone", exchange.label)
                    return Response(status_code=499)  # nobody reads it
                exchange.upstream = upstream
                if exchange.asked.fields.get("stream") is True:
                    return _Stream(exchange.stream(upstream), stack.pop_all(), exchange.headers, dialect.media_type)
                told = await exchange.whole(await upstream.document())
                return JSONResponse(told, headers=exchange.headers)
            except (UsageError, MachineNotFit):  # the client's mistake, or nothing is loaded: not the release's
                raise
            except HivetuneError:
                exchange.failed()
                raise

    async def _read(self, dialect: Dialect, request: Request, client: str) -> tuple[Read, dict[str, Any], int]:
        """Return a request as its API says, the document that was sent, and its size in bytes."""
        raw = await _raw_body(request)
        if self.keeper.live is not None:  # before it is parsed
            refuse_larger(dialect.main_field, len(raw), self.keeper.live.context_tokens)
        document = _document(raw)

        def recall(answer: str) -> list[dict[str, Any]]:
            return messages_of(answer, client)

        if "previous_response_id" in document:  # it looks into hive.db
            return await asyncio.to_thread(dialect.read, document, recall), document, len(raw)
        return dialect.read(document, recall), document, len(raw)

    async def _exchange(self, dialect: Dialect, request: Request, client: str) -> "_Exchange":
        read, document, size_bytes = await self._read(dialect, request, client)
        fields, identity = read.fields, f"hive-{secrets.token_hex(12)}"
        session = _header(request, "x-session-id") or _metadata(fields, "session_id") or fields.get("user")
        wish = request.headers.get("x-hivetune-capture", "").strip().lower()
        is_captured = wish in ("", "yes", "true", "1", "on") and "messages" in fields
        capture = self.capture if is_captured else None
        asked = Asked(
            dialect.upstream,
            fields,
            client,
            session or identity,
            dialect.main_field,
            _declared(request, fields),
            dialect.thoughts,
            size_bytes,
            scored=capture is not None,
        )
        return _Exchange(self, dialect, read, asked, session, capture, Named(identity, "", fields, document))

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a prompt, as Anthropic's clients ask before they send it."""
        client = request.scope["client_name"] or ""
        (fields, _), *_ = await self._read(anthropic.ANTHROPIC, request, client)
        self.keeper.routes.find(fields.get("model", ""), client)
        live = await self.keeper.server()
        return JSONResponse({"input_tokens": await num_tokens(live, fields)})

    async def tags(self, request: Request) -> Response:
        return JSONResponse(ollama.tags(self.keeper.routes.names()))

    async def show(self, request: Request) -> Response:
        document = _document(await _raw_body(request))
        name = str(document.get("model") or document.get("name") or "").removesuffix(":latest")
        self.keeper.routes.find(name, "")
        live = await self.keeper.server()
        return JSONResponse(ollama.show(live.template, live.context_tokens, takes_tools=live.takes_tools))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": ollama.VERSION})

    async def feedback(self, request: Request) -> Response:
        """Join `{"id", "rating": "up|down", "correction"?, "reason"?}` to a captured answer."""
        fields = checked_fields(FEEDBACK_FIELDS, _document(await _raw_body(request)))
        client = request.scope["client_name"] or ""
        if fields.keys() <= {"id", "reason"}:
            raise UsageError('feedback needs a "rating" or a "correction"')
        if self.capture is None:
            raise UsageError("answers are not captured, so none can be rated", hint="start the gateway with --capture")
        entry = Feedback(client=client, **fields)
        label = await self.capture.rate(entry)
        if entry.rating == "down":
            self.watch.complained(label, entry.id)
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
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: Request) -> Response:
        """Answer 200 when every wanted model can be asked, else 503. A client with a token also gets the problems."""
        document: dict[str, Any] = {"status": "ok" if self.keeper.ready else "loading"}
        if request.scope["client_name"] is not None:
            document |= {"champions": dict(self.keeper.routes.champions), "problems": self.keeper.problems}
            if self.capture is not None:
                names = ("captured", "left_out", "problem")
                document["capture"] = {name: getattr(self.capture, name) for name in names}
        return JSONResponse(document, 200 if self.keeper.ready else 503)


def told_unless_cancelled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a callback raised, but for the result of a wait that was cancelled."""
    # anyio 4.16 sets it where a model server writes to its Unix socket at the moment that a client goes away (as on
    # closing, agronholm/anyio#1267).
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


@dataclass
class _Exchange:
    """One request with its answer, as the counters, the capture and the watch need it. `session`: as the client names
    it. `named`: the names of its answer. `captured`: whether the answer is stored, yes or no."""

    gateway: Gateway
    dialect: Dialect
    read: Read
    asked: Asked
    session: str | None
    capture: Capture | None
    named: Named
    started: float = field(default_factory=time.monotonic)
    upstream: Upstream | None = None
    captured: str = ""

    @property
    def label(self) -> str:
        return self.named.label

    def routed(self, label: str) -> None:
        """Note the release before its answer, so that an early failure counts against it too."""
        self.named = replace(self.named, label=label)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"X-Hivetune-Release": self.label}
        if self.captured:
            headers["X-Hivetune-Captured"] = self.captured
        template = "" if self.upstream is None else self.upstream.live.template
        ignored = [self.dialect.names.get(name, name) for name in ignored_fields(self.asked.fields, template)]
        if ignored := [*self.read.ignored, *ignored]:
            headers["X-Hivetune-Ignored"] = ", ".join(ignored)
        return headers

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
            self.gateway.metrics.count("client_gone", self.label)
            raise
        await self.keep()  # before the client is told: whoever saw the end finds it captured
        if self.captured == "no" and self.dialect.media_type == "text/event-stream":
            yield b": hivetune-captured: no\n\n"  # a comment, as HTML's standard of event streams has them
        yield writer.end()

    def failed(self, *, broken: bool = False) -> None:
        self.gateway.metrics.count("broken_stream" if broken else "error", self.label)
        if self.label:
            self.gateway.watch.answered(self.label, error=True)

    async def keep(self) -> None:
        """Count, watch and capture an answer that is whole."""
        assert self.upstream is not None
        said, seconds = self.upstream.said, time.monotonic() - self.started
        metrics = self.gateway.metrics
        metrics.count("ok", self.label)
        metrics.tokens.labels(self.label).inc(said.tokens)
        metrics.seconds.labels(self.label).observe(seconds)
        self.gateway.watch.answered(self.label, error=False)
        if self.capture is None:
            return
        fields, message = self.asked.fields, said.message
        *before, last = fields["messages"]
        if last["role"] != "assistant" or last.get("tool_calls"):
            before.append(last)
        elif not said.text.startswith(begun := last.get("content") or ""):
            # The beginning of an answer, which the model continues. llama.cpp repeats it in a whole answer alone.
            message["content"] = begun + said.text
        entry = CapturedAnswer(
            id=self.named.id,
            label=self.label,
            messages=before,
            answer=message,
            finish=said.finish,
            tools=fields.get("tools") or (),
            session=self.session,
            user=fields.get("user"),
            client=self.asked.client,
            keys=self.asked.declared,
            logprob=said.logprob,
            seconds=seconds,
        )
        self.captured = "yes" if await self.capture.keep(entry) else "no"


class _Stream(StreamingResponse):
    """A stream that returns its slot however it ends: read to its end, abandoned by its client before the first byte or
    later, or not read for `SLOW_CLIENT_S`."""

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


def _header(request: Request, name: str) -> str | None:
    """Return a header that names something. Raises FieldRefused for one that is too long to remember."""
    value = request.headers.get(name, "")
    if len(value) > MAX_NAME_BYTES:
        raise FieldRefused(name, f"a header holds at most {MAX_NAME_BYTES} bytes")
    with contextlib.suppress(UnicodeDecodeError):  # sent as UTF-8, and read as Latin-1 by the server
        value = value.encode("latin-1").decode()
    return value if value.strip() else None


def _metadata(fields: Mapping[str, Any], key: str) -> str | None:
    value = (fields.get("metadata") or {}).get(key)
    return value if isinstance(value, str) and value.strip() else None


def _declared(request: Request, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the agent and the category that a request declares, by the header X-Hivetune-Agent or its metadata, and
    its system prompt."""
    pairs = {"agent": _header(request, "x-hivetune-agent") or _metadata(fields, "agent")}
    pairs["category"] = _metadata(fields, "category")
    declared = {kind: " ".join(value.split()).casefold() for kind, value in pairs.items() if value}
    first = (fields.get("messages") or [{}])[0]
    if first.get("role") in ("system", "developer") and first.get("content"):
        declared["system"] = first["content"]
    return declared


async def _raw_body(request: Request) -> bytes:
    """Return the body of a request. Raises UsageError."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise UsageError("the client went away") from None


def _document(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises UsageError for other bodies, and for a key with two values."""
    try:
        document = json.loads(raw, parse_constant=refuse_constant, object_pairs_hook=unique_keys)
        if b"\\ud" in raw.lower():  # a lone surrogate, which UTF-8 can't encode
            document = json.loads(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("the body is not a JSON object")
    return document


# Errors say in plain words what to do.
_STATUSES: Mapping[type[Exception], int] = {
    TooLarge: 413,
    TooMany: 429,
    MachineNotFit: 503,
    Withdrawn: 410,
    NotThere: 404,
    UsageError: 400,
    HivetuneError: 502,
}


def _refuse(request: Request, error: Exception) -> Response:
    """Answer every error, in the form of the request's API."""
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)
    headers: Mapping[str, str] | None = None
    about: dict[str, str | None] = {}
    if isinstance(error, HTTPException):
        status, headers, message = error.status_code, error.headers, _not_served(request, error)
    elif isinstance(error, HivetuneError):
        status = error.status if isinstance(error, Refused) else status
        message = f"{error.message}; {error.hint}" if error.hint else error.message
    else:
        message = "the request is too large" if status == 413 else "an unexpected error; see the log"
    if isinstance(error, FieldRefused):
        about = {"param": error.field, "code": error.code}
    if status in (429, 503):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    return JSONResponse(error_body(status, message, **about, path=request.url.path), status, headers)


def _not_served(request: Request, error: HTTPException) -> str:
    """Name the existing paths. A client may expect the whole OpenAI API here, or may have left out the /v1."""
    path, allowed = request.url.path, (error.headers or {}).get("Allow")
    if error.status_code == 401:
        return error.detail
    if allowed is not None:
        return f"{request.method} is not allowed at {path}; use {allowed}"
    routes = [each for each in request.app.routes if isinstance(each, Route) and each.path.startswith("/v1/")]
    here = ", ".join(f"{min(each.methods or {''})} {each.path.replace(':path', '')}" for each in routes)
    return f"{path} is not served; here are {here}. For text use /v1/chat/completions"


HANDLERS: Mapping[Any, ExceptionHandler] = dict.fromkeys((HTTPException, HivetuneError, TooLarge, Exception), _refuse)


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
        raise HTTPException(401, "this token is not known; hivetune clients --new NAME makes one")
    name = request.scope["cookie_name"]
    response = JSONResponse({"client": request.scope["client_name"]})
    response.set_cookie(name, token_of(request.headers, name), httponly=True, samesite="strict", path="/")
    return response

"""The gateway's API: answers, models, feedback, metrics, health, and the chat page. No prompt and no answer is ever
written to a log."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Counted
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ExceptionHandler, Message, Receive, Scope, Send

from hivetune.data.read import refuse_constant, unique_keys
from hivetune.errors import HivetuneError, MachineNotFit, NotThere, UsageError
from hivetune.serve.capture import Capture, CapturedAnswer, Feedback, messages_of
from hivetune.serve.dialects import anthropic, ollama
from hivetune.serve.dialects.responses import RESPONSES
from hivetune.serve.fields import FEEDBACK_FIELDS, FieldRefused, checked_fields
from hivetune.serve.forward import Piece, Refused, forward, num_tokens, refuse_larger
from hivetune.serve.guard import LIMIT_BYTES, SLOW_CLIENT_S, token_of
from hivetune.serve.request import OPENAI, Dialect, Request, error_body
from hivetune.serve.route import GREEDY, Withdrawn
from hivetune.serve.servers import Keeper
from hivetune.serve.watch import Watch

DIALECTS: tuple[Dialect, ...] = (OPENAI, RESPONSES, anthropic.ANTHROPIC, *ollama.OLLAMA)
# Requests at once, waiting ones included: each holds a connection, of which a process has a limited number.
MAX_OPEN_PER_CLIENT = 1024
# Of a header: sessions are remembered, one for each slot.
MAX_NAME_BYTES = 512
RETRY_AFTER_S = 5
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)

Pieces = AsyncGenerator[Piece]


class TooMany(HivetuneError):
    """Raised for a request above the limit of concurrent requests."""


class TooLarge(HivetuneError):
    """Raised when a body without a declared length grows beyond the limit."""


class Counts:
    """Counters since the start, for Prometheus. No label contains a prompt, a user or a session."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        by, text = ("release",), "Answers by release and outcome"
        # The outcome is ok, error, broken_stream or client_gone.
        self.answers = Counted("hivetune_answers", text, ("outcome", "release"), registry=own)
        self.tokens = Counted("hivetune_tokens", "Tokens written by release", by, registry=own)
        self.seconds = Histogram("hivetune_answer_seconds", "Seconds per answer", by, buckets=SECONDS, registry=own)


@dataclass
class Gateway:
    """The state that all requests share. Without `capture` nothing is stored. `stop` ends the server; `failure` is the
    bug that ended the keeper, after which no model would be loaded, or None.
    """

    keeper: Keeper
    watch: Watch
    capture: Capture | None = None
    stop: Callable[[], None] = lambda: None
    failure: Exception | None = None
    counts: Counts = field(default_factory=Counts)
    _open: Counter[str] = field(default_factory=Counter)

    def app(self) -> Starlette:
        """Return the ASGI application, without the guard (guard.py) and without the chat page (`page_routes`)."""
        table: list[tuple[str, str, Callable[..., Any]]] = [
            *(("POST", each.path, partial(self.answer, each)) for each in DIALECTS),
            ("POST", "/v1/messages/count_tokens", self.count_tokens),
            ("POST", "/v1/feedback", self.feedback),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.models),
            ("GET", "/api/tags", self.tags),
            ("POST", "/api/show", self.show),
            ("GET", "/api/version", self.version),
            ("GET", "/metrics", self.metrics),
            ("GET", "/health", self.health),
        ]
        routes = [Route(path, handler, methods=[method]) for method, path, handler in table]
        return Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(told_unless_cancelled)

        async def keep() -> None:
            try:
                await self.keeper.run()
            except Exception as error:  # noqa: BLE001 (it is raised again when the server has ended)
                self.failure = error
                self.stop()

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
            if self.capture is not None:
                await asyncio.to_thread(self.capture.close)
            await asyncio.to_thread(self.watch.save)

    # ---- a request with its answer

    async def answer(self, dialect: Dialect, http: HttpRequest) -> Response:
        """Answer a request of an API, in one document or as a stream of events."""
        client = _client(http)
        if self._open[client] >= MAX_OPEN_PER_CLIENT:
            raise TooMany("too many concurrent requests")
        self._open[client] += 1
        # What is held for the request is given back with it, or, for a stream, at the stream's end.
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._open.subtract, (client,))
            request = await self._read(dialect, http)
            try:
                # A server sends nothing, no header either, before an answer is whole or the first piece of a stream is
                # there; so here a disconnect is watched for.
                begun = await _unless_disconnected(http, stack.enter_async_context(forward(self.keeper, request)))
                if begun is None:
                    self._count("client_gone", request)
                    return Response(status_code=499)  # nobody reads it
                if request.streams:
                    told = {"headers": request.headers, "media_type": dialect.media_type}
                    return _Stream(self._stream(request, begun), stack.pop_all(), **told)
                document, _ = await anext(begun)
                await self._keep(request)
                return JSONResponse(dialect.writer(request).whole(document), headers=request.headers)
            except (UsageError, MachineNotFit):  # the client's mistake, or nothing is loaded: not the release's
                raise
            except HivetuneError:
                self._failed("error", request)
                raise

    async def _read(self, dialect: Dialect, http: HttpRequest) -> Request:
        """Return the request, read by its API's rules. Raises UsageError for an invalid one."""
        raw, client = await _raw_body(http), _client(http)
        # Before it is parsed, which takes the event loop from everybody.
        if self.keeper.live is not None:
            refuse_larger(dialect.main_field, len(raw), self.keeper.live.context_tokens)
        document, recall = _document(raw), partial(messages_of, client=client)
        # What looks into hive.db may wait for the disk.
        if "previous_response_id" in document:
            fields, ignored = await asyncio.to_thread(dialect.read, document, recall)
        else:
            fields, ignored = dialect.read(document, recall)
        wish = http.headers.get("x-hivetune-capture", "").strip().lower()
        is_wished = wish in ("", "yes", "true", "1", "on")
        return Request(
            dialect,
            document,
            fields,
            ignored,
            len(raw),
            client,
            session=_named(http, "x-session-id", fields, "session_id") or fields.get("user"),
            declared=_declared(http, fields),
            captures=is_wished and self.capture is not None,
        )

    async def _stream(self, request: Request, pieces: Pieces) -> AsyncGenerator[bytes]:
        """Yield the events of an answer. If it breaks off, the last one is an error event."""
        writer = request.dialect.writer(request)
        try:
            async for piece in pieces:
                if events := writer.event(*piece):
                    yield events
        except HivetuneError as error:
            self._failed("broken_stream", request)
            yield writer.error(error.message)
            return
        except (asyncio.CancelledError, GeneratorExit):
            self._count("client_gone", request)
            raise
        # Before the client is told: whoever saw the end finds it captured.
        await self._keep(request)
        if request.captured == "no" and request.dialect.media_type == "text/event-stream":
            # A comment, as HTML's standard of event streams has them: its headers have left.
            yield b": hivetune-captured: no\n\n"
        yield writer.end()

    def _count(self, outcome: str, request: Request) -> None:
        self.counts.answers.labels(outcome, request.label or "none").inc()

    def _failed(self, outcome: str, request: Request) -> None:
        self._count(outcome, request)
        if request.label:
            self.watch.answered(request.label, error=True)

    async def _keep(self, request: Request) -> None:
        """Count a complete answer, pass it to the watch, and capture it."""
        label, said, seconds = request.label, request.said, time.monotonic() - request.started_s
        self._count("ok", request)
        self.counts.tokens.labels(label).inc(said.tokens)
        self.counts.seconds.labels(label).observe(seconds)
        self.watch.answered(label, error=False)
        if self.capture is None or not request.captures:
            return
        fields, message = request.fields, said.message
        *before, last = fields["messages"]
        begun = last.get("content") or ""
        if last["role"] != "assistant" or last.get("tool_calls"):
            before.append(last)
        elif not message["content"].startswith(begun):
            # The beginning of an answer, which the model continues. llama.cpp repeats it in a whole answer alone.
            message["content"] = begun + message["content"]
        entry = CapturedAnswer(
            id=request.id,
            label=label,
            messages=before,
            answer=message,
            finish=said.finish,
            tools=fields.get("tools") or (),
            session=request.session,
            user=fields.get("user"),
            client=request.client,
            keys=request.declared,
            logprob=said.logprob,
            seconds=seconds,
        )
        try:
            await self.capture.keep(entry)
            request.captured = "yes"
        except HivetuneError:  # its client is told, and /health says why
            request.captured = "no"

    # ---- beside it

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Return the number of tokens of a prompt, as Anthropic's clients ask before they send it."""
        request = await self._read(anthropic.ANTHROPIC, http)
        self.keeper.routes.find(request.fields.get("model", ""), request.owner)
        live = await self.keeper.server()
        return JSONResponse({"input_tokens": await num_tokens(live, request.fields)})

    async def feedback(self, http: HttpRequest) -> Response:
        """Store feedback, `{"id", "rating": "up|down", "correction"?, "reason"?}`, on a captured answer."""
        fields = checked_fields(FEEDBACK_FIELDS, _document(await _raw_body(http)))
        if fields.keys() <= {"id", "reason"}:
            raise UsageError('the feedback has neither a "rating" nor a "correction"')
        if not fields.get("correction", "-").strip():  # it would take the place of an answer
            raise FieldRefused("correction", "must not be empty")
        if self.capture is None:
            raise UsageError("answers are not captured, so none can be rated", hint="start the gateway with --capture")
        entry = Feedback(client=_client(http), **fields)
        label = await self.capture.keep(entry)
        if entry.rating == "down":
            self.watch.complained(label, entry.id)
        return JSONResponse({"id": entry.id, "release": label}, status_code=202)

    async def models(self, http: HttpRequest) -> Response:
        """Describe all models, or the one named in the path. `defaults` has its generation settings and the system
        prompt of most of its rows.
        """
        routes, judged, name = self.keeper.routes, self.keeper.wanted.generation, http.path_params.get("name")
        about = {"object": "model", "created": 0, "owned_by": "hivetune"}
        served = {
            each: {"id": each, **about, "defaults": dict(judged.get(routes.champions.get(each, each), GREEDY))}
            for each in routes.names()
        }
        if name is None:
            return JSONResponse({"object": "list", "data": [*served.values()]})
        if name not in served:
            raise NotThere(f"the model {name!r} is not served")
        return JSONResponse(served[name])

    async def tags(self, http: HttpRequest) -> Response:
        return JSONResponse(ollama.tags(self.keeper.routes.names()))

    async def show(self, http: HttpRequest) -> Response:
        document = _document(await _raw_body(http))
        name = str(document.get("model") or document.get("name") or "").removesuffix(":latest")
        self.keeper.routes.find(name, "")
        live = await self.keeper.server()
        return JSONResponse(ollama.show(live.template, live.context_tokens, takes_tools=live.takes_tools))

    async def version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": ollama.VERSION})

    async def metrics(self, http: HttpRequest) -> Response:
        """Return counters and current values in Prometheus' text format."""
        keeper, capture, now = self.keeper, self.capture, CollectorRegistry()
        turns = keeper.live.turns if keeper.live else None
        snapshot = {
            "waiting_requests": ("Requests that wait for a slot", turns.num_waiting if turns else 0),
            "running_requests": ("Requests that are answered now", turns.num_running if turns else 0),
            "swaps": ("Model servers that were replaced by others", keeper.swaps),
            "backend_restarts": ("Model servers that died and were started again", keeper.restarts),
        }
        if capture is not None:
            snapshot["captured_answers"] = ("Answers in the store", capture.captured)
            snapshot["capture_left_out"] = ("Answers that could not be stored", capture.left_out)
        for name, (text, value) in snapshot.items():
            Gauge(f"hivetune_{name}", text, registry=now).set(value)
        return Response(generate_latest(self.counts.registry) + generate_latest(now), media_type=CONTENT_TYPE_LATEST)

    async def health(self, http: HttpRequest) -> Response:
        """Answer 200 when every wanted model is ready, else 503. A client with a token also gets the problems."""
        keeper, capture = self.keeper, self.capture
        document: dict[str, Any] = {"status": "ok" if keeper.ready else "loading"}
        if http.scope["client_name"] is not None:
            document |= {"champions": dict(keeper.routes.champions), "problems": keeper.problems}
            if capture is not None:
                document["capture"] = {name: getattr(capture, name) for name in ("captured", "left_out", "problem")}
        return JSONResponse(document, 200 if keeper.ready else 503)


def told_unless_cancelled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception of a callback, except when it only reports that a wait was cancelled."""
    # anyio 4.16 sets it where a model server writes to its Unix socket at the moment that a client goes away (as on
    # closing, agronholm/anyio#1267).
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


class _Stream(StreamingResponse):
    """A stream that frees its slot however it ends: read to its end, abandoned by its client, or not read for
    `SLOW_CLIENT_S`. `stack` holds the slot and all else to release.
    """

    def __init__(self, content: AsyncGenerator[bytes], stack: contextlib.AsyncExitStack, **more: Any):
        super().__init__(content, **more)
        self._stack, self._content = stack, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(SLOW_CLIENT_S):
                await send(message)

        async with self._stack, contextlib.aclosing(self._content):
            # Who reads nothing is told by its connection, which is closed now.
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, send_soon)


async def _unless_disconnected(http: HttpRequest, answer: Coroutine[Any, Any, Pieces]) -> Pieces | None:
    """Return the answer, or None if the client disconnected first; then the model server stops computing too."""
    answering = asyncio.ensure_future(answer)

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    going = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({answering, going}, return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        for task in (answering, going):
            task.cancel()
        # So that what they hold is given back before anything else is.
        await asyncio.wait({answering, going})


def _client(http: HttpRequest) -> str:
    return http.scope["client_name"] or ""


def _named(http: HttpRequest, header: str, fields: Mapping[str, Any], key: str) -> str | None:
    """Return the value of a header, else of `key` in the request's metadata, or None if neither was sent. Raises
    FieldRefused for a header of more than MAX_NAME_BYTES.
    """
    value = http.headers.get(header, "")
    if len(value) > MAX_NAME_BYTES:
        raise FieldRefused(header, f"the header must have at most {MAX_NAME_BYTES} bytes")
    # Sent as UTF-8, and read as Latin-1 by the server.
    with contextlib.suppress(UnicodeDecodeError):
        value = value.encode("latin-1").decode()
    told = (fields.get("metadata") or {}).get(key)
    named = value if value.strip() else told
    return named if isinstance(named, str) and named.strip() else None


def _declared(http: HttpRequest, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the agent, category and system prompt of a request. Agent and category are read from headers, else from
    metadata.
    """
    pairs = {kind: _named(http, f"x-hivetune-{kind}", fields, kind) for kind in ("agent", "category")}
    declared = {kind: " ".join(value.split()).casefold() for kind, value in pairs.items() if value}
    first = (fields.get("messages") or [{}])[0]
    if first.get("role") in ("system", "developer") and first.get("content"):
        declared["system"] = first["content"]
    return declared


async def _raw_body(http: HttpRequest) -> bytes:
    body = bytearray()
    try:
        async for piece in http.stream():
            body += piece
            if len(body) > LIMIT_BYTES:
                raise TooLarge(f"a request must have at most {LIMIT_BYTES:,} bytes")
    except ClientDisconnect:
        raise UsageError("the client disconnected") from None
    return bytes(body)


def _document(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises UsageError for any other body, and for a repeated key."""
    try:
        document = json.loads(raw, parse_constant=refuse_constant, object_pairs_hook=unique_keys)
        # A lone surrogate can be written so, and is a text that UTF-8, and so the store, can't encode.
        if b"\\ud" in raw.lower():
            document = json.loads(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("the body is not a JSON object")
    return document


# ---- errors, in plain words and in the form of the request's API; the first that fits

_STATUSES: Mapping[type[Exception], int] = {
    TooLarge: 413,
    TooMany: 429,
    MachineNotFit: 503,
    Withdrawn: 410,
    NotThere: 404,
    UsageError: 400,
    HivetuneError: 502,
    Exception: 500,
}


def _refuse(http: HttpRequest, error: Exception) -> Response:
    status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
    headers: Mapping[str, str] | None = None
    about: dict[str, str | None] = {}
    if isinstance(error, HTTPException):
        status, headers, message = error.status_code, error.headers, _not_served(http, error)
    elif isinstance(error, HivetuneError):
        status = error.status if isinstance(error, Refused) else status
        message = f"{error.message}; {error.hint}" if error.hint else error.message
    else:
        message = "an unexpected error; see the log"
    if isinstance(error, FieldRefused):
        about = {"param": error.field, "code": error.code}
    if status in (429, 503):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    return JSONResponse(error_body(status, message, **about, path=http.url.path), status, headers)


def _not_served(http: HttpRequest, error: HTTPException) -> str:
    if error.status_code == 401:
        return error.detail
    path, allowed = http.url.path, (error.headers or {}).get("Allow")
    if allowed is not None:
        return f"{http.method} is not allowed at {path}; use {allowed}"
    # A client may expect the whole OpenAI API here, or may have left out the /v1.
    return f"{path} is not served; chats are at /v1/chat/completions, and docs/clients.md names the other paths"


HANDLERS: Mapping[Any, ExceptionHandler] = dict.fromkeys((HTTPException, HivetuneError, Exception), _refuse)

# ---- the chat page, which requests nothing from other sites

_FILES = {
    "/": ("chat.html", "text/html"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat.css": ("chat.css", "text/css"),
}


def page_routes() -> list[Route]:
    """Return the routes of the chat page and of /login."""
    return [*(Route(path, _file) for path in _FILES), Route("/login", _login, methods=["POST"])]


async def _file(http: HttpRequest) -> Response:
    name, kind = _FILES[http.url.path]
    content = resources.files("hivetune.serve").joinpath("page_files", name).read_bytes()
    return Response(content, media_type=f"{kind}; charset=utf-8")


async def _login(http: HttpRequest) -> Response:
    """Exchange the token in the Authorization header for a cookie that no script can read."""
    if http.scope["client_name"] is None:
        raise HTTPException(401, "this token is not known; hivetune clients --new NAME makes one")
    name = http.scope["cookie_name"]
    response = JSONResponse({"client": http.scope["client_name"]})
    response.set_cookie(name, token_of(http.headers, name), httponly=True, samesite="strict", path="/")
    return response

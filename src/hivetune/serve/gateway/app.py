"""The OpenAI API in front of the backends: chat, completions, models, feedback, metrics, health.

Every answer names its release (`X-Hivetune-Release`, `system_fingerprint`) and has an id of its own, by which feedback
finds it. No prompt and no answer is ever written to a log.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path
from starlette.types import Message, Receive, Scope, Send

from hivetune.errors import HivetuneError, MachineNotFit, NotThere, UsageError
from hivetune.process.lease import Answering
from hivetune.serve.experts.choose import plain_text
from hivetune.serve.gateway import metrics
from hivetune.serve.gateway.capture import Capture, Captured, Feedback
from hivetune.serve.gateway.guard import error_body
from hivetune.serve.gateway.metrics import Metrics
from hivetune.serve.gateway.refusals import HANDLERS, TooMany
from hivetune.serve.gateway.sessions import REASON_HEADER, Sessions, chosen, keys_of_request, session_of
from hivetune.serve.gateway.upstream import Upstream, ask, joined_calls
from hivetune.serve.swap.keeper import Keeper
from hivetune.serve.swap.router import served_names
from hivetune.serve.swap.watch import Watch

MOST_OPEN = 2048  # requests at once, waiting ones included
MOST_PER_CLIENT = 1024
RELEASE_HEADER = "X-Hivetune-Release"
LONGEST_ANSWER_S = 1800.0
BODY_TIMEOUT_S = 60.0
SLOW_CLIENT_S = 60.0

_Answer = TypeVar("_Answer")


@dataclass
class Gateway:
    """What the handlers share. `capture` None: nothing is kept. `find_answer`: answer id -> release, for feedback.
    `failed`: told of a bug that ended the keeper; nothing is loaded any more then, so the server has to end."""

    keeper: Keeper
    watch: Watch
    find_answer: Callable[[str], str]
    capture: Capture | None = None
    metrics: Metrics = field(default_factory=Metrics)
    failed: Callable[[BaseException], None] = lambda error: None
    _open: dict[str, int] = field(default_factory=dict)
    _answering: Answering = field(default_factory=Answering)
    _sessions: Sessions = field(default_factory=Sessions)

    def app(self) -> Starlette:
        """The ASGI application, without the guard (guard.py) and without the page."""
        return Starlette(
            routes=[
                Path("/v1/chat/completions", self.complete, methods=["POST"]),
                Path("/v1/completions", self.complete, methods=["POST"]),
                Path("/v1/feedback", self.feedback, methods=["POST"]),
                Path("/v1/models", self.models),
                Path("/v1/models/{name:path}", self.model),
                Path("/metrics", self.show_metrics),
                Path("/health", self.health),
            ],
            exception_handlers=HANDLERS,
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            if self.capture is not None:
                await asyncio.to_thread(self.capture.close)
            await asyncio.to_thread(self.watch.save)

    async def _keep(self) -> None:
        try:
            await self.keeper.run()
        except Exception as error:  # noqa: BLE001 (it is raised again when the server has ended)
            self.failed(error)

    async def complete(self, request: Request) -> Response:
        """Chat and completions: the body goes on as it is, but for what is the gateway's to say."""
        client = request.scope["client_name"] or ""
        if sum(self._open.values()) >= MOST_OPEN or self._open.get(client, 0) >= MOST_PER_CLIENT:
            raise TooMany("too many requests are open")
        self._open[client] = self._open.get(client, 0) + 1
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._close, client)
            stack.enter_context(self._answering)
            body = await _body(request)
            _one_answer(body)
            _something_said(body)
            exchange = _Exchange(self, request, body)
            try:
                async with asyncio.timeout(LONGEST_ANSWER_S):
                    # A server sends nothing, no header either, before an answer is whole or the first piece of a stream
                    # is there; so from here on somebody looks whether the client is still there.
                    answer = await _unless_gone(request, self._answer(exchange, request.url.path, stack))
            except UsageError:  # the client's mistake, not the release's
                raise
            except HivetuneError:
                exchange.failed()
                raise
            except TimeoutError:
                exchange.failed()
                raise MachineNotFit(f"no answer after {LONGEST_ANSWER_S:.0f} s") from None
            if answer is None:
                self.metrics.vanished(exchange.label)
                return Response(status_code=499)  # nobody reads it
            if isinstance(answer, Upstream):
                return _Stream(exchange.stream(answer), stack.pop_all(), exchange.headers)
            return JSONResponse(answer, headers=exchange.headers)

    async def _answer(
        self, exchange: "_Exchange", path: str, stack: contextlib.AsyncExitStack
    ) -> Upstream | dict[str, Any]:
        """The whole answer, counted and captured, or the beginning of a stream. `stack` holds the slot."""
        body = exchange.body
        choice = chosen(self.keeper, self._sessions, exchange.request.headers, body)
        exchange.reason = choice.reason
        upstream = await stack.enter_async_context(
            ask(self.keeper, path, body, session=exchange.session, pick=choice.model)
        )
        self.metrics.routed(choice)
        exchange.label, exchange.sent_s = upstream.route.label, upstream.sent_s
        if body.get("stream") is True:
            return upstream
        document = exchange.labelled(await upstream.document())
        exchange.ended(document)
        return document

    def _close(self, client: str) -> None:
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    async def feedback(self, request: Request) -> Response:
        """`{"id", "rating": "up|down", "correction"?, "reason"?}` joined to a captured answer."""
        body = await _body(request)
        entry = _feedback(body, request.scope["client_name"] or "")
        if self.capture is None:
            raise UsageError(
                "answers are not captured, so feedback has nothing to join", hint="hivetune serve --capture"
            )
        recent = self.metrics.label_of(entry.id)
        label = recent if recent is not None else await asyncio.to_thread(self.find_answer, entry.id)
        if not self.capture.put(Feedback(entry.id, label, entry.client, entry.rating, entry.correction, entry.reason)):
            raise MachineNotFit("feedback can't be stored now", hint="try again later; /health says what is wrong")
        if entry.rating == "down":
            self.watch.complained(label, entry.id)
        return JSONResponse({"id": entry.id, "release": label}, status_code=202)

    async def models(self, request: Request) -> Response:
        served = [_model(name) for name in served_names(self.keeper.routes)]
        return JSONResponse({"object": "list", "data": served})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in served_names(self.keeper.routes):
            raise NotThere(f"the model {name!r} is not served")
        return JSONResponse(_model(name))

    async def show_metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text, self.keeper, self.capture)  # it may look at the disk
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        """200 when every wanted model answers, else 503. To a client with a token also what is wrong."""
        document: dict[str, Any] = {"status": "ok" if self.keeper.ready else "loading"}
        if request.scope["client_name"] is not None:
            document |= {"champions": dict(self.keeper.routes.champions), "problems": self.keeper.problems}
            if self.capture is not None:
                document["capture"] = {
                    "captured": self.capture.captured,
                    "waiting": self.capture.waiting,
                    "left_out": self.capture.left_out,
                    "problem": self.capture.problem,
                }
        return JSONResponse(document, 200 if self.keeper.ready else 503)


class _Stream(StreamingResponse):
    """A stream that gives its slot back however it ends: read to its end, its client gone before the first byte or in
    the middle, or too slow: who does not read for `SLOW_CLIENT_S` would hold up everybody else's adapter."""

    def __init__(self, content: AsyncGenerator[bytes], stack: contextlib.AsyncExitStack, headers: Mapping[str, str]):
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._stack, self._content = stack, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(SLOW_CLIENT_S):
                await send(message)

        async with self._stack, contextlib.aclosing(self._content):
            with contextlib.suppress(TimeoutError):  # it is told by its connection, which is closed now
                await super().__call__(scope, receive, send_soon)


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, _Answer]) -> _Answer | None:
    """The answer, or None when the client went away first: then the backend is told to stop as well."""
    answering = asyncio.ensure_future(answer)
    going = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answering, going}, return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        for task in (answering, going):
            task.cancel()
        await asyncio.wait({answering, going})  # so that what they hold is given back before anything else is


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _one_answer(body: Mapping[str, Any]) -> None:
    """Several answers to a request would take slots of the backend that nobody gave it."""
    for key in ("n", "n_cmpl"):
        if body.get(key) not in (None, 1):
            raise UsageError(f'"{key}" is 1: one request gets one answer')


def _something_said(body: Mapping[str, Any]) -> None:
    """llama.cpp answers a conversation without turns, whatever its model then makes up."""
    if body.get("messages") == []:
        raise UsageError("'messages' holds no message")


@dataclass
class _Exchange:
    """One request and its answer, for whoever counts, captures and watches."""

    gateway: Gateway
    request: Request
    body: Mapping[str, Any]
    label: str = ""
    reason: str = ""
    session: str = ""
    id: str = ""
    started: float = field(default_factory=time.monotonic)
    sent_s: float = 0.0

    def __post_init__(self) -> None:
        self.id = f"hive-{secrets.token_hex(12)}"
        self.session = _session(self.request, self.body) or self.id

    @property
    def headers(self) -> dict[str, str]:
        """Which release answers, and why that one: a header holds plain ASCII, and a client may have named an agent."""
        return {RELEASE_HEADER: self.label, REASON_HEADER: ascii(self.reason)[1:-1]}

    def labelled(self, document: dict[str, Any]) -> dict[str, Any]:
        """The backend's document under the names that clients know."""
        return {**document, "id": self.id, "model": self.label, "system_fingerprint": self.label}

    async def stream(self, upstream: Upstream) -> AsyncGenerator[bytes]:
        """Server-sent events; an answer that breaks off ends with an error event, never in silence."""
        text: list[str] = []
        calls: list[Any] = []
        usage: dict[str, Any] = {}
        try:
            async for event in upstream.events():
                for choice in event.get("choices", ()):
                    delta = choice.get("delta") or {}
                    text.append(delta.get("content") or choice.get("text") or "")
                    calls += delta.get("tool_calls") or ()
                usage = event.get("usage") or usage
                yield _event(self.labelled(event))
            message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
            if calls:
                message["tool_calls"] = joined_calls(calls)
        except HivetuneError as error:
            self.failed(broken=True)
            yield _event(error_body(502, error.message))
            return
        except (asyncio.CancelledError, GeneratorExit):
            self.gateway.metrics.vanished(self.label)
            raise
        self._count(message, usage)  # before the client is told: whoever saw the end finds it captured
        yield b"data: [DONE]\n\n"

    def ended(self, document: Mapping[str, Any]) -> None:
        choices = document.get("choices") or [{}]
        message = choices[0].get("message") or {"role": "assistant", "content": choices[0].get("text") or ""}
        self._count(message, document.get("usage") or {})

    def failed(self, *, broken: bool = False) -> None:
        self.gateway.metrics.failed(self.label, broken=broken)
        if self.label:
            self.gateway.watch.answered(self.label, error=True)

    def _count(self, message: Mapping[str, Any], usage: Mapping[str, Any]) -> None:
        now = time.monotonic()
        tokens = int(usage.get("completion_tokens") or 0)
        self.gateway.metrics.answered(self.id, self.label, now - self.started, now - self.sent_s, tokens)
        self.gateway.watch.answered(self.label, error=False, seconds=now - self.sent_s, tokens=tokens)
        if self.gateway.capture is None or not self._wants_capture():
            return
        self.gateway.capture.put(
            Captured(
                id=self.id,
                label=self.label,
                messages=self.body["messages"],
                answer=message,
                tools=self.body.get("tools") or (),
                session=_session(self.request, self.body),
                user=plain_text(self.body.get("user")),
                keys=keys_of_request(self.request.headers, self.body),
                seconds=now - self.started,
            )
        )

    def _wants_capture(self) -> bool:
        said = self.request.headers.get("x-hivetune-capture", "").strip().lower()
        return said != "no" and isinstance(self.body.get("messages"), list)


async def _body(request: Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            found = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise UsageError("the body is not JSON") from None
    except ClientDisconnect:
        raise UsageError("the client went away") from None
    except TimeoutError:
        raise UsageError(f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
    if not isinstance(found, dict):
        raise UsageError("the body is not a JSON object")
    return found


def _feedback(body: Mapping[str, Any], client: str) -> Feedback:
    rating, correction, reason = (body.get(key) for key in ("rating", "correction", "reason"))
    if not isinstance(body.get("id"), str) or rating not in ("up", "down", None):
        raise UsageError('feedback needs "id", the id of an answer, and "rating": "up" or "down"')
    if not all(value is None or isinstance(value, str) for value in (correction, reason)):
        raise UsageError('"correction" and "reason" are texts')
    if rating is None and correction is None:
        raise UsageError('feedback needs a "rating" or a "correction"')
    return Feedback(body["id"], "", client, rating, correction, reason)


def _session(request: Request, body: Mapping[str, Any]) -> str | None:
    """What the client calls the session, else OpenAI's user."""
    return session_of(request.headers, body) or plain_text(body.get("user"))


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n\n"


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "hivetune"}

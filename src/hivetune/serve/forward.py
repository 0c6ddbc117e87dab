"""The way of a request to a model server: routed to a release, queued, sent, and sent again if the server is lost.

When a model server is replaced or dies before the first byte of an answer, the request goes to the next server,
unnoticed by the client. After the first byte of a stream there is no retry: an error event reports the loss.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import httpx2

from hivetune.errors import HivetuneError, UsageError
from hivetune.serve.fields import ignored_fields, too_long, upstream_fields
from hivetune.serve.request import CHAT, Block, Request
from hivetune.serve.route import GREEDY
from hivetune.serve.servers import BackendRetired, Keeper, LiveBackend
from hivetune.serve.turns import Ticket

TRIES = 3
# A process that dies closes its sockets before it is seen as dead; this is how long that may take.
DEATH_NOTICED_S = 2.0
_POLL_S = 0.05
# Statuses that speak of the request and not of the server. 501: unsupported, such as images.
_CLIENT_ERRORS = frozenset({400, 404, 405, 413, 415, 422, 501})
# A request of more bytes (about 1,000 tokens) takes seconds on two cores: turns.py.
LONG_BYTES = 4096
# No prompt that fits has more bytes for each token of the context: 16 characters, in a run of spaces, of 6 bytes, as
# JSON may write them. A server needs minutes to split a text of megabytes before it can refuse it, and checking 50,000
# messages took the event loop 0.3 s, in which nobody else was answered.
MAX_BYTES_PER_TOKEN = 96
_JSON = {"Content-Type": "application/json"}

# A piece of an answer as the client may see it, and the blocks that it adds to.
Piece = tuple[dict[str, Any], list[tuple[Block, str]]]


class Broken(HivetuneError):
    """The connection to the model server broke in the middle of an answer, or its answer was invalid."""


class Refused(UsageError):
    """The model server refused the request itself, for example because the prompt is too long."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@contextlib.asynccontextmanager
async def forward(keeper: Keeper, request: Request) -> AsyncIterator[AsyncGenerator[Piece]]:
    """Yield the pieces of an answer that has begun: a whole answer as one piece, or the pieces of a stream. The
    request's `model` selects the release.

    Raises UsageError (a model that is not served, an unsupported field), Refused, MachineNotFit (no model server is
    ready), Broken.
    """
    dialect = request.dialect
    for attempt in range(TRIES):
        label = keeper.routes.find(request.fields.get("model", ""), request.owner, request.declared)
        live = await keeper.server()
        request.label = label
        refuse_larger(dialect.main_field, request.size_bytes, live.context_tokens)
        ignored = ignored_fields(request.fields, live.template)
        request.ignored |= {dialect.names.get(name, name): None for name in ignored}
        sent = _sent(request, live, keeper.wanted.generation.get(label, GREEDY))
        async with contextlib.AsyncExitStack() as stack:
            try:
                turn = live.turn(label, request.owner, client=request.client, long=request.size_bytes > LONG_BYTES)
                ticket = await stack.enter_async_context(turn)
                # What a prompt cache holds was computed in other batches, and rounds otherwise: a seed asks for the
                # same again.
                repeatable = {"cache_prompt": False} if "seed" in request.fields else {}
                content = json.dumps({**sent, **live.pinned(ticket), **repeatable}).encode()
                asking = live.client.stream("POST", CHAT, content=content, headers=_JSON)
                response = await stack.enter_async_context(asking)
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread(), dialect.main_field)
            except (BackendRetired, httpx2.TransportError) as error:
                if attempt == TRIES - 1:
                    raise Broken(f"the model server is lost: {type(error).__name__}") from None
                # One that broke its connection is seen as dead a moment later, or lives on.
                for _ in range(0 if isinstance(error, BackendRetired) else round(DEATH_NOTICED_S / _POLL_S)):
                    if live.dead or live.retired:
                        break
                    await asyncio.sleep(_POLL_S)
                continue
            yield await stack.enter_async_context(contextlib.aclosing(_pieces(request, response, ticket)))
            return


def _sent(request: Request, live: LiveBackend, judged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the request to the model server. `judged`: the generation settings with which the release was
    evaluated.
    """
    # But for its system prompt, which only the chat page sends: a client's conversation without one stays so.
    defaults = {key: value for key, value in judged.items() if key != "system"}
    fields = upstream_fields(request.fields, takes_tools=live.takes_tools, template=live.template)
    thoughts = {"reasoning_format": "auto" if request.dialect.thoughts else "none"}
    return {**defaults, **fields, **thoughts, **request.scores}


async def _pieces(request: Request, response: httpx2.Response, ticket: Ticket) -> AsyncGenerator[Piece]:
    """Yield the whole answer, or a stream piece by piece up to [DONE]. Raises Broken if [DONE] never comes."""
    with _breaking_off():
        if not request.streams:
            yield _read(request, await response.aread())
            return
        async for line in _lines(response):
            kind, _, text = line.partition(b":")
            text = text.strip()
            if kind == b"error":
                raise Broken(f"the model server failed: {text[:500].decode(errors='replace')}")
            if kind != b"data":
                continue
            if text == b"[DONE]":
                return
            piece = _read(request, text)
            ticket.answering = True  # its prompt is computed
            yield piece
    raise Broken("the model server's answer ended early")


def _read(request: Request, raw: bytes) -> Piece:
    """Return a piece, after adding its content to the answer. Log-probabilities that the client did not request are
    removed.
    """
    document: dict[str, Any] = json.loads(raw)
    if "error" in document:
        raise Broken(f"the model server failed: {_message(document['error'])}")
    grown = request.said.add(document)
    if request.scores:
        document["choices"] = [{**choice, "logprobs": None} for choice in document.get("choices", ())]
    return document, grown


@contextlib.contextmanager
def _breaking_off() -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError):
        raise Broken("the model server's answer is not one of the OpenAI API") from None


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    # httpx's `aiter_lines` also ends one at U+2028 or U+0085, which a model may write.
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def num_tokens(live: LiveBackend, fields: Mapping[str, Any]) -> int:
    """Return the number of tokens of a prompt, which is not computed. Raises FieldRefused, Refused, Broken."""
    request = upstream_fields(fields, takes_tools=live.takes_tools, template=live.template)
    with _breaking_off():
        told = await live.client.post("/apply-template", json=request)
        if told.status_code == 200:
            body = {"content": told.json()["prompt"], "add_special": True, "parse_special": True}
            told = await live.client.post("/tokenize", json=body)
        if told.status_code == 200:
            return len(told.json()["tokens"])
    raise _refusal(told.status_code, told.content, "messages")


def refuse_larger(field: str, size_bytes: int, context_tokens: int) -> None:
    """Raise FieldRefused for a request that is too large for a context of `context_tokens`."""
    if size_bytes > MAX_BYTES_PER_TOKEN * context_tokens:
        raise too_long(field, f"{size_bytes:,} bytes", context_tokens)


def _refusal(status: int, raw: bytes, field: str) -> HivetuneError:
    """Return the error for a response that is not 200: Refused for a mistake in the request, Broken for a fault of the
    server. `field`: the field to name in it.
    """
    error: Any = raw[:500].decode(errors="replace")
    # Whoever answers may send something else than JSON.
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
        error = json.loads(raw)["error"]
        if error["type"] == "exceed_context_size_error":
            return too_long(field, f"{int(error['n_prompt_tokens']):,} tokens", int(error["n_ctx"]))
    message = _message(error) or "refused"
    if status in _CLIENT_ERRORS:
        return Refused(status, message)
    return Broken(f"the model server failed ({status}): {message}")


def _message(error: Any) -> str:
    return str(error.get("message", "") if isinstance(error, dict) else error or "")

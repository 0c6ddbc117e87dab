"""The way of one request to a model server: its release is chosen, it waits for its turn, it is sent, and sent again if
lost.

When a model server is replaced or dies before the first byte of an answer, the request goes to the next one, and the
client sees nothing of it. After the first byte of a stream there is no retry, only an error event that reports it.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from hivetune.errors import HivetuneError, UsageError
from hivetune.serve.fields import TooLong, upstream_fields
from hivetune.serve.route import GREEDY
from hivetune.serve.servers import BackendRetired, Keeper, LiveBackend
from hivetune.serve.turns import Ticket

TRIES = 3
# A process that dies closes its sockets before it is seen as dead; this is how long that may take.
DEATH_NOTICED_S = 2.0
_POLL_S = 0.05
# Statuses that speak of the request and not of the server. 501: unsupported, such as images.
_CLIENT_ERRORS = frozenset({400, 404, 405, 413, 415, 422, 501})
# A prompt of more characters (about 1,000 tokens) takes seconds on two cores: turns.py.
LONG_CHARS = 4096
# Only runs of spaces or of one letter make longer tokens. A server needs minutes to split a text of megabytes before it
# can refuse it, so its characters are counted first.
MAX_CHARS_PER_TOKEN = 16
MAX_BYTES_PER_CHAR = 6  # in JSON: "\\u00e9"
_JSON = {"Content-Type": "application/json"}


class Broken(HivetuneError):
    """The model server was lost in the middle of an answer, or answered nonsense."""


class Refused(UsageError):
    """The model server refused the request itself, such as a prompt that is too long."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """A request as every API gives it. `path`: of the model server. `fields`: checked ones of its API (fields.py).
    `main_field`: the client's name of what is asked. `declared`: agent, category and system prompt.
    `thoughts`: apart from the text. Sessions of two clients are different, whatever their names are."""

    path: str
    fields: Mapping[str, Any]
    client: str
    session: str
    main_field: str
    declared: Mapping[str, str] = field(default_factory=dict)
    thoughts: bool = False


@dataclass(frozen=True)
class Upstream:
    """An answer that has begun. `sent_s`: when its turn came, on the monotonic clock."""

    response: httpx2.Response
    live: LiveBackend
    ticket: Ticket
    sent_s: float

    async def document(self) -> dict[str, Any]:
        """Return the whole answer. Raises Broken."""
        with _breaking_off():
            return _checked(json.loads(await self.response.aread()), "message")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer piece by piece, up to [DONE]. Raises Broken when it ends without."""
        with _breaking_off():
            async for line in _lines(self.response):
                kind, _, data = line.partition(b":")
                data = data.strip()
                if kind == b"error":
                    raise Broken(f"the model server failed: {data[:500].decode(errors='replace')}")
                if kind != b"data":
                    continue
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict) and "error" in event:
                    raise Broken(f"the model server failed: {_message(event)}")
                self.ticket.answering = True  # its prompt is computed
                yield _checked(event, "delta")
        raise Broken("the model server's answer ended early")


@contextlib.contextmanager
def _breaking_off() -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, httpx2.StreamError, ValueError, RecursionError) as error:
        raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield lines as a stream of events has them. `aiter_lines` also ends one at U+2028 or U+0085, which a model may
    write."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


@contextlib.asynccontextmanager
async def forward(keeper: Keeper, asked: Asked, routed: Callable[[str], None]) -> AsyncIterator[Upstream]:
    """Yield the beginning of an answer from the release that the request's `model` means. `routed` is told the label of
    that release before it is asked.

    Raises UsageError (a model that is not served, an unsupported field), Refused, MachineNotFit (no model server is
    ready), Broken.
    """
    fields = asked.fields
    num_chars = _num_chars(fields)
    for attempt in range(TRIES):
        model, session = fields.get("model", ""), f"{asked.client}\0{asked.session}"
        chosen = keeper.routes.find(model, session, asked.declared)
        live = await keeper.live(chosen)
        routed(chosen.label)
        if num_chars > MAX_CHARS_PER_TOKEN * live.context_tokens:
            raise TooLong(asked.main_field, f"{num_chars:,} characters", live.context_tokens)
        # The settings that the release was judged with, but for its system prompt, which only the chat page sends: a
        # client's conversation without a system prompt stays one without.
        judged = keeper.wanted.generation.get(chosen.label, GREEDY)
        defaults = {key: value for key, value in judged.items() if key != "system"}
        request = {**defaults, **upstream_fields(fields, takes_tools=live.takes_tools, template=live.template)}
        label = chosen.label if chosen.adapted else None
        async with contextlib.AsyncExitStack() as stack:
            try:
                turn = live.turn(label, session, client=asked.client, long=num_chars > LONG_CHARS)
                ticket = await stack.enter_async_context(turn)
                sent_s = time.monotonic()
                request |= {**live.pinned(ticket), "reasoning_format": "auto" if asked.thoughts else "none"}
                if "seed" in fields:  # what a cache holds was computed in other batches, and rounds otherwise
                    request["cache_prompt"] = False
                content = json.dumps(request).encode()
                sent = live.client.stream("POST", asked.path, content=content, headers=_JSON)
                response = await stack.enter_async_context(sent)
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread(), asked)
            except (BackendRetired, httpx2.TransportError) as error:
                if attempt == TRIES - 1:
                    raise Broken(f"the model server is lost: {type(error).__name__}") from None
                if not isinstance(error, BackendRetired):
                    for _ in range(round(DEATH_NOTICED_S / _POLL_S)):
                        if live.dead or live.retired:
                            break
                        await asyncio.sleep(_POLL_S)
                continue
            yield Upstream(response, live, ticket, sent_s)
            return


async def num_tokens(live: LiveBackend, fields: Mapping[str, Any]) -> int:
    """Return the tokens of a prompt, without computing it. Raises FieldRefused, Refused, Broken."""
    request = upstream_fields(fields, takes_tools=live.takes_tools, template=live.template)
    asked = Asked("/apply-template", fields, "", "", "messages")
    with _breaking_off():
        told = await live.client.post(asked.path, json=request)
        if told.status_code == 200:
            body = {"content": told.json()["prompt"], "add_special": True, "parse_special": True}
            told = await live.client.post("/tokenize", json=body)
        if told.status_code == 200:
            return len(told.json()["tokens"])
    raise _refusal(told.status_code, told.content, asked)


def refuse_larger(keeper: Keeper, field: str, *, size_bytes: int = 0, num_turns: int = 0) -> None:
    """Raise FieldRefused for a body that no loaded model's context holds, before its fields are checked: parsing and
    checking 50,000 messages took the event loop 0.3 s, in which nobody else was answered."""
    context_tokens = max((live.context_tokens for live in keeper.lives.values()), default=0)
    if context_tokens and size_bytes > MAX_BYTES_PER_CHAR * MAX_CHARS_PER_TOKEN * context_tokens:
        raise TooLong(field, f"{size_bytes:,} bytes", context_tokens)
    if context_tokens and num_turns > context_tokens:
        raise TooLong(field, f"{num_turns:,} messages", context_tokens)


def _num_chars(fields: Mapping[str, Any]) -> int:
    """Return about how many characters the prompt has."""
    turns = fields.get("messages", ())
    texts = [fields.get("prompt", ""), *(turn.get("content") or "" for turn in turns)]
    texts += [json.dumps(fields[key], ensure_ascii=False) for key in ("tools", "response_format") if fields.get(key)]
    texts += [json.dumps(turn["tool_calls"], ensure_ascii=False) for turn in turns if turn.get("tool_calls")]
    return sum(map(len, texts))


def joined_calls(deltas: list[Any]) -> list[dict[str, Any]]:
    """Join the pieces of a stream's tool calls in their order. Raises Broken for nonsense."""
    calls: dict[int, dict[str, Any]] = {}
    try:
        for delta in deltas:
            call = calls.setdefault(int(delta.get("index") or 0), {"type": "function", "function": {"arguments": ""}})
            function = delta.get("function") or {}
            call["function"]["arguments"] += function.get("arguments") or ""
            if function.get("name"):
                call["function"]["name"] = function["name"]
            if delta.get("id"):
                call["id"] = delta["id"]
    except (AttributeError, TypeError, ValueError):
        raise Broken("the model server's tool calls are not those of the OpenAI API") from None
    return [calls[index] for index in sorted(calls)]


def _refusal(status: int, raw: bytes, asked: Asked) -> HivetuneError:
    """Return Refused for a mistake in the request, or Broken for a fault of the server."""
    try:
        document = json.loads(raw)
        error = document["error"]
        if error["type"] == "exceed_context_size_error":
            return TooLong(asked.main_field, f"{int(error['n_prompt_tokens']):,} tokens", int(error["n_ctx"]))
    except (ValueError, RecursionError):
        document = {}
    except (KeyError, TypeError):  # another error, or of another server
        pass
    message = _message(document) or raw[:500].decode(errors="replace") or "refused"
    if status in _CLIENT_ERRORS:
        return Refused(status, message)
    return Broken(f"the model server failed ({status}): {message}")


def _checked(document: Any, part: str) -> dict[str, Any]:
    """Return the answer if its choices have the expected types, else raise Broken. `part`: `message` or `delta`."""
    try:
        choices = document.get("choices", [])
        messages = [choice.get(part) or {} for choice in choices]
        checks = [
            (choices, list),
            (document.get("usage"), dict | None),
            *((choice.get("text"), str | None) for choice in choices),
            *((message.get(name), str | None) for message in messages for name in ("content", "reasoning_content")),
            *((message.get("tool_calls"), list | None) for message in messages),
        ]
    except (AttributeError, TypeError):
        checks = []
    if not checks or not all(isinstance(value, kind) for value, kind in checks):
        raise Broken("the model server's answer is not one of the OpenAI API")
    checked: dict[str, Any] = document
    return checked


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(error or "")

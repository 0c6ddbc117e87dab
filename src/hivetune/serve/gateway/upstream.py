"""The way of one request to a model server: its release is chosen, it waits for its turn, it is sent, and sent again if
lost.

When a model server is replaced or dies before the first byte of an answer, the request goes to the next one, and the
client sees nothing of it. After the first byte of a stream there is no retry, only an error event that reports it.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.serve.gateway.fields import FieldRefused, TooLong, upstream_fields
from hivetune.serve.swap.keeper import Keeper
from hivetune.serve.swap.live import BackendRetired, LiveBackend
from hivetune.serve.swap.wanted import GREEDY, Route, route

TRIES = 3
# A process that dies closes its sockets before it is seen as dead; this is how long that may take.
DEATH_NOTICED_S = 2.0
_POLL_S = 0.05
# Statuses that speak of the request and not of the server. 501: unsupported, such as images.
_CLIENT_ERRORS = frozenset({400, 404, 405, 413, 415, 422, 501})
# A prompt of more tokens takes seconds on two cores: it waits behind short ones (swap/turns.py).
LONG_TOKENS = 1024
# Only runs of spaces or of one letter make longer tokens. A server needs minutes to split a text of megabytes before it
# can refuse it, so its characters are counted first.
MAX_CHARS_PER_TOKEN = 16
MAX_BYTES_PER_CHAR = 6  # in JSON: "\\u00e9"
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Asker:
    """The owner of a request. Sessions of two clients are different, whatever their names are."""

    client: str
    session: str


class Broken(HivetuneError):
    """The model server was lost in the middle of an answer, or answered nonsense."""


class Refused(UsageError):
    """The model server refused the request itself, such as a prompt that is too long."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Upstream:
    """An answer that has begun. `sent_s`: when its turn came, on the monotonic clock."""

    response: httpx2.Response
    live: LiveBackend
    sent_s: float

    async def document(self) -> dict[str, Any]:
        """Return the whole answer. Raises Broken."""
        try:
            document = json.loads(await self.response.aread())
        except (httpx2.HTTPError, httpx2.StreamError, ValueError, RecursionError) as error:
            raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None
        return _checked(document, "message")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer piece by piece, up to [DONE]. Raises Broken when it ends without."""
        try:
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
                yield _checked(event, "delta")
        except (httpx2.HTTPError, httpx2.StreamError, ValueError, RecursionError) as error:
            raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None
        raise Broken("the model server's answer ended early")


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield lines as a stream of events has them. `aiter_lines` also ends one at U+2028 or U+0085, which a model may
    write."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


@contextlib.asynccontextmanager
async def ask(
    keeper: Keeper, path: str, body: Mapping[str, Any], asker: Asker, *, pick: str, routed: Callable[[str], None]
) -> AsyncIterator[Upstream]:
    """Yield the beginning of an answer to `body` (checked fields) from the release that `pick`, the request's `model`,
    means. `routed` is told the label of that release before it is asked.

    Raises UsageError (a model that is not served, an unsupported field), Refused, MachineNotFit (no model server is
    ready), Broken.
    """
    for attempt in range(TRIES):
        chosen = _route(keeper, pick, f"{asker.client}\0{asker.session}")
        live = await keeper.live(chosen)
        routed(chosen.label)
        # The settings that the release was judged with, but for its system prompt, which only the chat page sends: a
        # client's conversation without a system prompt stays one without.
        judged = keeper.wanted.generation.get(chosen.label, GREEDY)
        defaults = {key: value for key, value in judged.items() if key != "system"}
        request = {**defaults, **upstream_fields(body, takes_tools=live.takes_tools, template=live.template)}
        async with contextlib.AsyncExitStack() as stack:
            try:
                num_tokens = await _count_prompt(live, body)
                long = num_tokens > LONG_TOKENS
                label = chosen.label if chosen.adapted else None
                pinned = await stack.enter_async_context(live.turn(label, asker, client=asker.client, long=long))
                if "seed" in body:  # what a cache holds was computed in other batches, and rounds otherwise
                    pinned = {**pinned, "cache_prompt": False}
                sent_s = time.monotonic()
                content = json.dumps({**request, **pinned, "reasoning_format": "none"}).encode()
                sent = live.client.stream("POST", path, content=content, headers=_JSON)
                response = await stack.enter_async_context(sent)
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread(), body)
            except (BackendRetired, httpx2.TransportError) as error:
                if attempt == TRIES - 1:
                    raise Broken(f"the model server is lost: {type(error).__name__}") from None
                if not isinstance(error, BackendRetired):
                    for _ in range(round(DEATH_NOTICED_S / _POLL_S)):
                        if live.dead or live.retired:
                            break
                        await asyncio.sleep(_POLL_S)
                continue
            yield Upstream(response, live, sent_s)
            return


def refuse_larger(keeper: Keeper, field: str, *, size_bytes: int = 0, num_turns: int = 0) -> None:
    """Raise FieldRefused for a body that no loaded model's context holds, before its fields are checked: parsing and
    checking 50,000 messages took the event loop 0.3 s, in which nobody else was answered."""
    context_tokens = max((live.context_tokens for live in keeper.lives.values()), default=0)
    if context_tokens and size_bytes > MAX_BYTES_PER_CHAR * MAX_CHARS_PER_TOKEN * context_tokens:
        raise TooLong(field, f"{size_bytes:,} bytes", context_tokens)
    if context_tokens and num_turns > context_tokens:
        raise TooLong(field, f"{num_turns:,} messages", context_tokens)


async def _count_prompt(live: LiveBackend, body: Mapping[str, Any]) -> int:
    """Return about how many tokens the prompt has. A short one has at most as many as bytes; of others the model server
    counts them, outside its slots. Raises FieldRefused for a prompt that no slot holds."""
    turns = body.get("messages", ())
    texts = [body.get("prompt", ""), *(turn.get("content") or "" for turn in turns)]
    texts += [json.dumps(body[key], ensure_ascii=False) for key in ("tools", "response_format") if body.get(key)]
    texts += [json.dumps(turn["tool_calls"], ensure_ascii=False) for turn in turns if turn.get("tool_calls")]
    num_chars = sum(map(len, texts))
    if len(turns) > live.context_tokens or num_chars > MAX_CHARS_PER_TOKEN * live.context_tokens:
        raise TooLong(_asked(body), f"{len(turns):,} messages with {num_chars:,} characters", live.context_tokens)
    text = "\n".join(texts)
    if (num_bytes := len(text.encode())) <= LONG_TOKENS:
        return num_bytes
    response = await live.client.post("/tokenize", json={"content": text}, headers=_JSON)
    try:
        num_tokens = len(json.loads(response.content)["tokens"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Broken("the model server does not count tokens") from None
    if num_tokens > live.context_tokens:
        raise TooLong(_asked(body), f"{num_tokens:,} tokens", live.context_tokens)
    return num_tokens


def _asked(body: Mapping[str, Any]) -> str:
    """Return the field of a request that holds what is asked."""
    return "messages" if "messages" in body else "prompt"


def _route(keeper: Keeper, pick: str, session: str) -> Route:
    """Return the route of a request. Raises MachineNotFit for a model that is wanted and not loaded, UsageError for one
    that is not served at all."""
    routes = keeper.routes
    named = pick.partition("@champion")[0]
    desired = {label for deployment in keeper.wanted.deployments for label in deployment.labels}
    desired |= keeper.wanted.champions.keys()
    loaded = routes.labels.keys() | routes.champions.keys()
    if named in keeper.wanted.unserved.keys() - loaded:
        raise MachineNotFit(f"{pick} can't be served: {keeper.wanted.unserved[named]}")
    if not routes.bases or named in desired - loaded:
        problems = "; ".join(keeper.problems)
        hint = "mend what is named; the gateway tries again by itself" if problems else "try again in a few seconds"
        raise MachineNotFit(f"{pick or 'the model'} is not loaded{problems and ': '}{problems}", hint=hint)
    return route(routes, pick, session)


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


def _refusal(status: int, raw: bytes, body: Mapping[str, Any]) -> HivetuneError:
    """Return Refused for a mistake in the request, or Broken for a fault of the server."""
    try:
        document = json.loads(raw)
        error = document["error"]
        if error["type"] == "exceed_context_size_error":
            return TooLong(_asked(body), f"{int(error['n_prompt_tokens']):,} tokens", int(error["n_ctx"]))
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
            *((message.get("content"), str | None) for message in messages),
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


AGENT_HEADER = "x-hivetune-agent"
MAX_NAME_BYTES = 512


def declared(headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, str]:
    """Return the agent and the category that a request declares: the header X-Hivetune-Agent, else its metadata."""
    metadata = body.get("metadata")
    meta = metadata if isinstance(metadata, dict) else {}
    agent = _header(headers, AGENT_HEADER) or _text(meta.get("agent"))
    pairs = {"agent": agent, "category": _text(meta.get("category"))}
    return {kind: " ".join(value.split()).casefold() for kind, value in pairs.items() if value and value.strip()}


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return X-Session-Id, else OpenAI's metadata.session_id."""
    metadata = body.get("metadata")
    named = metadata.get("session_id") if isinstance(metadata, dict) else None
    return _header(headers, "x-session-id") or _text(named)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header that names something. Names are sent as UTF-8, and read as Latin-1 by the server. Raises
    FieldRefused for one that is too long to remember."""
    value = headers.get(name)
    if value is None:
        return None
    if len(value) > MAX_NAME_BYTES:
        raise FieldRefused(name, f"a header holds at most {MAX_NAME_BYTES} bytes")
    with contextlib.suppress(UnicodeDecodeError):
        return value.encode("latin-1").decode()
    return value

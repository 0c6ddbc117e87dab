"""The way of one request to a model server: its release is chosen, it waits for its turn, it is sent, and sent again if
lost.

When a model server is replaced or dies before the first byte of an answer, the request goes to the next one, and the
client sees nothing of it. After the first byte of a stream there is no retry, only an error event that reports it.
"""

import asyncio
import contextlib
import json
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
# A request of more bytes (about 1,000 tokens) takes seconds on two cores: turns.py.
LONG_BYTES = 4096
# No prompt that fits has more bytes for each token of the context: 16 characters, in a run of spaces, of 6 bytes, as
# JSON may write them. A server needs minutes to split a text of megabytes before it can refuse it, and checking 50,000
# messages took the event loop 0.3 s, in which nobody else was answered.
MAX_BYTES_PER_TOKEN = 96
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
    `main_field`: the client's name of what is asked. `declared`: agent, category and system prompt. `thoughts`: apart
    from the text. `scored`: the log-probabilities of its tokens are wanted, although the client did not ask for them.
    Sessions of two clients are different, whatever their names are."""

    path: str
    fields: Mapping[str, Any]
    client: str
    session: str
    main_field: str
    declared: Mapping[str, str] = field(default_factory=dict)
    thoughts: bool = False
    size_bytes: int = 0
    scored: bool = False

    @property
    def scores(self) -> dict[str, Any]:
        """Return the fields that ask for the log-probability of each token of the answer. llama.cpp refuses them for a
        stream with tools."""
        fields = self.fields
        asks = "logprobs" in fields or "top_logprobs" in fields
        if asks or not self.scored or (fields.get("stream") and fields.get("tools")):
            return {}
        return {"logprobs": True, "top_logprobs": 1}  # with 0 none are told


@dataclass
class Said:
    """What an answer says: its texts, calls and end, and its number of tokens, as its pieces tell them."""

    text: str = ""
    thoughts: str = ""
    finish: str | None = None
    tokens: int = 0
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _logprobs: list[float] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as a message of a chat."""
        parts = {"reasoning_content": self.thoughts, "tool_calls": [self._calls[key] for key in sorted(self._calls)]}
        return {"role": "assistant", "content": self.text, **{name: part for name, part in parts.items() if part}}

    @property
    def logprob(self) -> float | None:
        """Return the mean log-probability of the tokens, None where they were not scored."""
        return sum(self._logprobs) / len(self._logprobs) if self._logprobs else None

    def add(self, document: dict[str, Any]) -> None:
        """Add a piece of a stream, or a whole answer. Raises TypeError, ValueError, AttributeError, LookupError where
        it is not one of the OpenAI API."""
        for choice in document.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or {}
            self.text += said.get("content") or choice.get("text") or ""
            self.thoughts += said.get("reasoning_content") or ""
            self.finish = choice.get("finish_reason") or self.finish
            for number, part in enumerate(said.get("tool_calls") or ()):
                key = int(part.get("index", number))
                call = self._calls.setdefault(key, {"type": "function", "function": {"name": "", "arguments": ""}})
                function = part.get("function") or {}
                call["function"]["arguments"] += function.get("arguments") or ""
                call["function"]["name"] = function.get("name") or call["function"]["name"]
                call |= {"id": part["id"]} if part.get("id") else {}
            scored = (choice.get("logprobs") or {}).get("content") or ()
            self._logprobs += [float(token["logprob"]) for token in scored]
        # A stream has its usage only where the client asks for it.
        told = (document.get("usage") or {}).get("completion_tokens") or (document.get("timings") or {}).get(
            "predicted_n"
        )
        self.tokens = int(told or self.tokens)


@dataclass(frozen=True)
class Upstream:
    """An answer that has begun."""

    response: httpx2.Response
    live: LiveBackend
    ticket: Ticket
    asked: Asked
    said: Said = field(default_factory=Said)

    async def document(self) -> dict[str, Any]:
        """Return the whole answer. Raises Broken."""
        with _breaking_off():
            return self._read(await self.response.aread())

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
                event = self._read(data)
                self.ticket.answering = True  # its prompt is computed
                yield event
        raise Broken("the model server's answer ended early")

    def _read(self, raw: bytes) -> dict[str, Any]:
        """Return a piece as the client may see it, and note what it says."""
        document: dict[str, Any] = json.loads(raw)
        if "error" in document:
            raise Broken(f"the model server failed: {_message(document)}")
        self.said.add(document)
        if self.asked.scores:
            document["choices"] = [{**choice, "logprobs": None} for choice in document.get("choices", ())]
        return document


@contextlib.contextmanager
def _breaking_off() -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError):
        raise Broken("the model server's answer is not one of the OpenAI API") from None


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield lines as a stream of events has them."""
    # httpx's `aiter_lines` also ends one at U+2028 or U+0085, which a model may write.
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
    for attempt in range(TRIES):
        model, session = fields.get("model", ""), f"{asked.client}\0{asked.session}"
        label = keeper.routes.find(model, session, asked.declared)
        live = await keeper.server()
        routed(label)
        refuse_larger(asked.main_field, asked.size_bytes, live.context_tokens)
        # The settings that the release was judged with, but for its system prompt, which only the chat page sends: a
        # client's conversation without a system prompt stays one without.
        judged = keeper.wanted.generation.get(label, GREEDY)
        defaults = {key: value for key, value in judged.items() if key != "system"}
        request = {**defaults, **upstream_fields(fields, takes_tools=live.takes_tools, template=live.template)}
        async with contextlib.AsyncExitStack() as stack:
            try:
                turn = live.turn(label, session, client=asked.client, long=asked.size_bytes > LONG_BYTES)
                ticket = await stack.enter_async_context(turn)
                request |= {**live.pinned(ticket), "reasoning_format": "auto" if asked.thoughts else "none"}
                if "seed" in fields:  # what a cache holds was computed in other batches, and rounds otherwise
                    request["cache_prompt"] = False
                content = json.dumps(request | asked.scores).encode()
                sent = live.client.stream("POST", asked.path, content=content, headers=_JSON)
                response = await stack.enter_async_context(sent)
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread(), asked.main_field)
            except (BackendRetired, httpx2.TransportError) as error:
                if attempt == TRIES - 1:
                    raise Broken(f"the model server is lost: {type(error).__name__}") from None
                if not isinstance(error, BackendRetired):
                    for _ in range(round(DEATH_NOTICED_S / _POLL_S)):
                        if live.dead or live.retired:
                            break
                        await asyncio.sleep(_POLL_S)
                continue
            yield Upstream(response, live, ticket, asked)
            return


async def num_tokens(live: LiveBackend, fields: Mapping[str, Any]) -> int:
    """Return the tokens of a prompt, without computing it. Raises FieldRefused, Refused, Broken."""
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
    """Raise FieldRefused for a request that no context of so many tokens holds."""
    if size_bytes > MAX_BYTES_PER_TOKEN * context_tokens:
        raise TooLong(field, f"{size_bytes:,} bytes", context_tokens)


def _refusal(status: int, raw: bytes, field: str) -> HivetuneError:
    """Return Refused for a mistake in the request, or Broken for a fault of the server. `field`: what was asked."""
    try:
        document = json.loads(raw)
        error = document["error"]
        if error["type"] == "exceed_context_size_error":
            return TooLong(field, f"{int(error['n_prompt_tokens']):,} tokens", int(error["n_ctx"]))
    except (ValueError, RecursionError):
        document = {}
    except (KeyError, TypeError):  # another error, or of another server
        pass
    message = _message(document) or raw[:500].decode(errors="replace") or "refused"
    if status in _CLIENT_ERRORS:
        return Refused(status, message)
    return Broken(f"the model server failed ({status}): {message}")


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(error or "")

"""One timed chat request to any server that speaks OpenAI's API, its answer read as it is written."""

import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hivetune.errors import UsageError

ENDPOINT_KEY = "HIVETUNE_ENDPOINT_KEY"  # the environment variable: a key on a command line is seen by every user
_TIMEOUT_S = 300.0
MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 8 << 20
SHOWN_CHARS = 200
LATER = (408, 425, 429)  # and 500 to 599: a server that may answer the same request later


class Unanswered(Exception):
    """A lost request, or a server that can't answer now: another try may help."""


@dataclass(frozen=True)
class TimedAnswer:
    """A server's answer and its times in seconds since the request. `new_tokens` is None where the server does not
    report it.

    `first_token_s` is None for an answer that came in one piece.
    """

    text: str
    ended: bool
    new_tokens: int | None
    first_token_s: float | None
    seconds: float


@dataclass(frozen=True)
class Endpoint:
    """A server over HTTP. Safe to call from several threads: each request has its own connection."""

    url: str
    model: str
    timeout_s: float = _TIMEOUT_S

    def timed(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> TimedAnswer:
        """Return one greedy answer. Raises Unanswered if a retry may help, else UsageError."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        body = {"model": self.model, "messages": [_as_sent(message) for message in messages]}
        body |= streamed(max_tokens, tools)
        key = os.environ.get(ENDPOINT_KEY, "").strip()
        if not (key.isascii() and key.isprintable()):  # the library's own error would show it
            raise UsageError(f"{ENDPOINT_KEY} contains characters that no key has, such as a line break")
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        path = parts.path.removesuffix("/chat/completions") + "/chat/completions"
        started = time.perf_counter()
        with contextlib.closing(kind(parts.hostname, parts.port, timeout=self.timeout_s)) as connection:
            try:
                connection.request("POST", path, json.dumps(body).encode(), headers)
                return read_timed(connection.getresponse(), started, self.url)
            except (OSError, http.client.HTTPException) as error:
                raise Unanswered(f"{self.url}: {error or type(error).__name__}") from None


def streamed(max_tokens: int, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of a request that asks for one greedy answer, piece by piece, with the number of its tokens."""
    request: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "stream": True}
    request["stream_options"] = {"include_usage": True}
    return {**request, "tools": list(tools)} if tools else request


def read_timed(
    response: http.client.HTTPResponse, started: float, where: str, clock: Callable[[], float] = time.perf_counter
) -> TimedAnswer:
    """Return the answer to a request that was sent at `started` by `clock`. Raises as `Endpoint.timed` does."""
    if response.status != 200:
        raise _refusal(response, where)
    kind = response.headers.get_content_type()
    partial = _PartialAnswer(where, started, clock)
    if kind == "text/event-stream":
        for document in _events(response, where):
            partial.take(document, "delta")
    elif kind == "application/json":
        text = response.read(MAX_ANSWER_BYTES)
        try:
            partial.take(json.loads(text), "message")
        except ValueError:
            raise _other_format(where, text) from None
        partial.first_token_s = None
    else:
        raise _other_format(where, response.read(SHOWN_CHARS), kind)
    return partial.answer()


@dataclass
class _PartialAnswer:
    """The part of an answer that has arrived."""

    where: str
    started: float
    clock: Callable[[], float]
    text: str = ""
    finish: str | None = None
    new_tokens: int | None = None
    first_token_s: float | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)

    def take(self, document: Any, part: str) -> None:
        """Add one document of the stream, or the whole answer."""
        try:
            if "error" in document:
                raise Unanswered(f"{self.where} failed in the middle of an answer: {str(document['error'])[:200]}")
            usage = document.get("usage")
            if usage:
                self.new_tokens = int(usage["completion_tokens"])
            for choice in document.get("choices") or ():
                self._take_piece(choice.get(part) or {})
                self.finish = choice.get("finish_reason") or self.finish
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _other_format(self.where, json.dumps(document).encode()) from None
        if len(self.text) > MAX_ANSWER_BYTES:
            raise UsageError(f"{self.where} wrote an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")

    def _take_piece(self, piece: Mapping[str, Any]) -> None:
        content, calls = piece.get("content"), piece.get("tool_calls") or ()
        if not isinstance(content, str | None):
            raise TypeError
        if self.first_token_s is None and (content or calls or piece.get("reasoning_content")):
            self.first_token_s = self.clock() - self.started
        self.text += content or ""
        for number, call in enumerate(calls):
            call_parts = self.calls.setdefault(int(call.get("index", number)), ["", ""])
            call_parts[0] += call["function"].get("name") or ""
            call_parts[1] += call["function"].get("arguments") or ""

    def answer(self) -> TimedAnswer:
        """Return the whole answer. Raises Unanswered when the stream broke off, UsageError when nothing of it was an
        answer."""
        if self.finish is None:
            if self.first_token_s is None and self.new_tokens is None:
                raise _other_format(self.where, b"no choices")
            raise Unanswered(f"{self.where}: the answer broke off")
        calls = [f'{{"name": {json.dumps(name)}, "arguments": {a or "{}"}}}' for name, a in self.calls.values()]
        text = "\n".join(part for part in (self.text, *calls) if part)
        seconds = self.clock() - self.started
        return TimedAnswer(text, self.finish != "length", self.new_tokens, self.first_token_s, seconds)


def _events(response: http.client.HTTPResponse, where: str) -> Iterator[Any]:
    """Yield the JSON documents of server-sent events."""
    while line := response.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise _other_format(where, line)
        name, _, data = line.strip().partition(b":")
        data = data.strip()
        if name == b"error":
            raise Unanswered(f"{where} failed: {data[:SHOWN_CHARS].decode(errors='replace')}")
        if name != b"data" or data == b"[DONE]":
            continue
        try:
            yield json.loads(data)
        except ValueError:
            raise _other_format(where, data) from None


def _refusal(response: http.client.HTTPResponse, where: str) -> Exception:
    text = response.read(2000).decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = " ".join(text.split())[:SHOWN_CHARS]
    message = f"{where} answered {response.status}: {text}"
    if response.status >= 500 or response.status in LATER:
        return Unanswered(message)
    hints = {401: f"put the key into {ENDPOINT_KEY}", 404: "is the URL the one that ends in /v1, and the model there?"}
    return UsageError(message, hint=hints.get(response.status, "is this the URL of a server with OpenAI's chat API?"))


def _other_format(where: str, shown: bytes, kind: str = "") -> UsageError:
    text = " ".join(shown[:SHOWN_CHARS].decode(errors="replace").split())
    return UsageError(
        f"{where} answers in another format{f' ({kind})' if kind else ''}: {text}",
        hint="it must answer POST .../chat/completions as OpenAI's chat API does",
    )


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as OpenAI's API takes it, with the arguments of a call as text."""
    sent = dict(message)
    if message.get("tool_calls"):
        sent["tool_calls"] = []
        for call in message["tool_calls"]:
            arguments = call["function"].get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            sent["tool_calls"].append({**call, "function": {**call["function"], "arguments": text}})
    return sent

"""Requests to any server that speaks OpenAI's API: one exchange of HTTP, and one timed chat answer as it is written."""

import contextlib
import http.client
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hivetune.errors import HivetuneError, UsageError

ENDPOINT_KEY = "HIVETUNE_ENDPOINT_KEY"  # the environment variable: a key on a command line is seen by every user
_TIMEOUT_S = 300.0
MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 8 << 20
SHOWN_CHARS = 200
LATER = (408, 425, 429)  # and 500 to 599: a server that may answer the same request later
_HINTS = {401: f"put the key into {ENDPOINT_KEY}", 404: "is the URL the one that ends in /v1, and the model there?"}
_NO_FORMAT = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Unanswered(HivetuneError):
    """A lost request, or a server that can't answer now: another try may help."""


@dataclass(frozen=True)
class Answer:
    """A server's answer, whether it ended by itself, and its times in seconds since the request.

    The numbers of tokens are None where the server does not report them, `first_token_s` for an answer in one piece.
    """

    text: str
    ended: bool
    seconds: float
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    first_token_s: float | None = None


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
    ) -> Answer:
        """Return one greedy answer. Raises Unanswered if a retry may help, else UsageError."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        key = os.environ.get(ENDPOINT_KEY, "").strip()
        if not (key.isascii() and key.isprintable()):  # the library's own error would show it
            raise UsageError(f"{ENDPOINT_KEY} contains characters that no key has, such as a line break")
        body = {"model": self.model, "messages": [_as_sent(message) for message in messages]}
        path = parts.path.removesuffix("/chat/completions") + "/chat/completions"
        started = time.perf_counter()
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        with exchange(connection, path, body | streamed(max_tokens, tools), key, self.url) as response:
            return read_answer(response, started, self.url)


@contextlib.contextmanager
def exchange(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None, key: str, where: str
) -> Iterator[http.client.HTTPResponse]:
    """Yield the response to a request, to be read inside; `body` None is a GET.

    Raises Unanswered where another try may help: the server is lost, breaks off or is busy. Raises UsageError for a
    request that it refuses, and for an answer that is none of OpenAI's API.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    with contextlib.closing(connection):
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if data is None else "POST", path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response, where)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(f"{where} does not answer: {error or type(error).__name__}") from None
        except _NO_FORMAT as error:
            raise other_format(where, f"{type(error).__name__}: {error}".encode()) from None


def streamed(max_tokens: int, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the part of a request that asks for one greedy answer, piece by piece, with the number of its tokens."""
    request: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "stream": True}
    request["stream_options"] = {"include_usage": True}
    return {**request, "tools": list(tools)} if tools else request


def read_answer(response: http.client.HTTPResponse, started: float, where: str) -> Answer:
    """Return the answer to a request that was sent at `started` (time.perf_counter). Raises as `exchange` does."""
    kind = response.headers.get_content_type()
    partial = _PartialAnswer(where, started)
    if kind == "text/event-stream":
        for document in read_events(response, where):
            partial.take(document, "delta")
    elif kind == "application/json":
        partial.take(_parsed(response.read(MAX_ANSWER_BYTES), where), "message")
        partial.first_token_s = None
    else:
        raise other_format(where, response.read(SHOWN_CHARS), kind)
    return partial.answer()


def read_events(response: http.client.HTTPResponse, where: str) -> Iterator[Any]:
    """Yield the JSON documents of server-sent events. Raises Unanswered where one is an error."""
    while line := response.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise other_format(where, line)
        name, _, data = line.strip().partition(b":")
        data = data.strip()
        if name == b"error":
            raise Unanswered(f"{where} failed: {data[:SHOWN_CHARS].decode(errors='replace')}")
        if name == b"data" and data != b"[DONE]":
            yield _parsed(data, where)


@dataclass
class _PartialAnswer:
    """The part of an answer that has arrived."""

    where: str
    started: float
    text: str = ""
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)

    def take(self, document: Any, part: str) -> None:
        """Add one document of the stream, or the whole answer."""
        self.usage = document.get("usage") or self.usage
        for choice in document.get("choices") or ():
            self._take_piece(choice.get(part) or {})
            self.finish = choice.get("finish_reason") or self.finish
        if len(self.text) > MAX_ANSWER_BYTES:
            raise UsageError(f"{self.where} wrote an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")

    def _take_piece(self, piece: Mapping[str, Any]) -> None:
        content, calls = piece.get("content"), piece.get("tool_calls") or ()
        if not isinstance(content, str | None):
            raise TypeError(f"the content is {content!r}")
        if self.first_token_s is None and (content or calls or piece.get("reasoning_content")):
            self.first_token_s = time.perf_counter() - self.started
        self.text += content or ""
        for number, call in enumerate(calls):
            call_parts = self.calls.setdefault(int(call.get("index", number)), ["", ""])
            call_parts[0] += call["function"].get("name") or ""
            call_parts[1] += call["function"].get("arguments") or ""

    def answer(self) -> Answer:
        """Return the whole answer. Raises Unanswered when the stream broke off, UsageError when nothing of it was an
        answer."""
        if self.finish is None:
            if self.first_token_s is None and not self.usage:
                raise other_format(self.where, b"no choices")
            raise Unanswered(f"{self.where}: the answer broke off")
        calls = [f'{{"name": {json.dumps(name)}, "arguments": {a or "{}"}}}' for name, a in self.calls.values()]
        text = "\n".join(part for part in (self.text, *calls) if part)
        seconds, first = time.perf_counter() - self.started, self.first_token_s
        asked, new = (self.usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        counts = None if asked is None else int(asked), None if new is None else int(new)
        return Answer(text, self.finish != "length", seconds, *counts, first)


def other_format(where: str, shown: bytes, kind: str = "") -> UsageError:
    """Return the error for an answer that is none of OpenAI's API, with its beginning."""
    text = " ".join(shown[:SHOWN_CHARS].decode(errors="replace").split())
    return UsageError(
        f"{where} answers in another format{f' ({kind})' if kind else ''}: {text}",
        hint="it must answer POST .../chat/completions as OpenAI's chat API does",
    )


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise other_format(where, text) from None
    if not isinstance(document, dict):
        raise other_format(where, text)
    if "error" in document:
        raise Unanswered(f"{where} failed in the middle of an answer: {str(document['error'])[:SHOWN_CHARS]}")
    return document


def _refusal(response: http.client.HTTPResponse, where: str) -> HivetuneError:
    text = response.read(2000).decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except _NO_FORMAT:
        text = " ".join(text.split())[:SHOWN_CHARS]
    message = f"{where} answered {response.status}: {text}"
    if response.status >= 500 or response.status in LATER:
        return Unanswered(message)
    return UsageError(message, hint=_HINTS.get(response.status, "is this a server with OpenAI's chat API?"))


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

"""Requests to any server of OpenAI's chat API: the HTTP exchange, and the answer in it."""

import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hivetune.errors import HivetuneError, UsageError

ENDPOINT_KEY = "HIVETUNE_ENDPOINT_KEY"  # the environment variable: a key on a command line is seen by every user
# For a whole answer: 256 tokens of a 7B model on a processor, eight at a time, take seven minutes.
TIMEOUT_S = 600.0
MAX_ANSWER_BYTES = 8 << 20  # eight are read at a time
SHOWN_CHARS = 200
TRIES = 3
FIRST_PAUSE_S = 2.0  # doubled: a server that restarts or limits requests is often back within seconds
LATER = (408, 425, 429)  # and 500 to 599: a server that may answer the same request later
_HINTS = {401: f"put the key into {ENDPOINT_KEY}", 404: "is the URL the one that ends in /v1, and the model there?"}
_NO_FORMAT = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Unanswered(HivetuneError):
    """Raised for a lost request, or a server that can't answer now. Another try may succeed."""


@dataclass(frozen=True)
class Answer:
    """A server's answer, whether it ended by itself, and its time in seconds. The numbers of tokens are None if the
    server does not report them.
    """

    text: str
    ended: bool
    seconds: float
    prompt_tokens: int | None = None
    new_tokens: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """A server over HTTP. Safe to call from several threads: each request has its own connection."""

    url: str
    model: str
    timeout_s: float = TIMEOUT_S

    def complete(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Answer:
        """Return one greedy answer. Raises Unanswered if a retry may help, else UsageError."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        key = os.environ.get(ENDPOINT_KEY, "").strip()
        if not (key.isascii() and key.isprintable()):  # the library's own error would show it
            raise UsageError(f"{ENDPOINT_KEY} has characters that a key can't have, such as a line break: set it again")
        body = {"model": self.model, **chat_request(messages, max_tokens, tools)}
        path = parts.path.removesuffix("/chat/completions") + "/chat/completions"
        started = time.perf_counter()
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        with exchange(connection, path, body, key, self.url) as response:
            return read_answer(response, started, self.url)


@contextlib.contextmanager
def exchange(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None, key: str, where: str
) -> Iterator[http.client.HTTPResponse]:
    """Yield the response to a request, to be read inside the block; `body` None means GET.

    Raises Unanswered if another try may succeed: the server is lost, breaks off or is busy. Raises UsageError if the
    server refuses the request, or answers in another format than OpenAI's.
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
            raise _other_format(where, f"{type(error).__name__}: {error}".encode()) from None


def chat_request(
    messages: Sequence[Mapping[str, Any]], max_tokens: int, tools: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the body of a request for one greedy answer."""
    request = {"messages": [_as_sent(message) for message in messages], "max_tokens": max_tokens, "temperature": 0.0}
    return {**request, "tools": list(tools)} if tools else request


def read_answer(response: http.client.HTTPResponse, started: float, where: str) -> Answer:
    """Return the answer to a request that was sent at `started` (time.perf_counter), with tool calls appended to its
    text. Raises as `exchange`.
    """
    raw = response.read(MAX_ANSWER_BYTES + 1)
    seconds = time.perf_counter() - started
    if len(raw) > MAX_ANSWER_BYTES:
        raise UsageError(f"the answer of {where} has more than {MAX_ANSWER_BYTES >> 20} MiB: lower eval.tokens")
    try:
        document = json.loads(raw)
        if error := document.get("error"):
            raise Unanswered(f"{where} failed in the middle of an answer: {str(error)[:SHOWN_CHARS]}")
        choice = document["choices"][0]
        message, finish, usage = choice["message"], choice.get("finish_reason"), document.get("usage") or {}
        texts = [message.get("content") or ""]
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments") or "{}"
            texts.append(f'{{"name": {json.dumps(call["function"]["name"])}, "arguments": {arguments}}}')
        asked, new = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        counts = None if asked is None else int(asked), None if new is None else int(new)
        text = "\n".join(filter(None, texts))
    except _NO_FORMAT:
        raise _other_format(where, raw) from None
    if finish is None:
        raise Unanswered(f"{where}: the answer broke off")
    return Answer(text, finish != "length", seconds, *counts)


def ask_with_retries(ask: Callable[[], Answer], pause: Callable[[float], object] = time.sleep) -> Answer:
    """Return the first answer in at most TRIES tries. Raises Unanswered if all fail."""
    for attempt in range(TRIES - 1):
        try:
            return ask()
        except Unanswered:
            pause(FIRST_PAUSE_S * 2**attempt)
    return ask()


def _other_format(where: str, shown: bytes) -> UsageError:
    """Return the error for an answer that is not in OpenAI's format; the error quotes its beginning."""
    return UsageError(
        f"{where} answers in another format: {' '.join(shown[:SHOWN_CHARS].decode(errors='replace').split())}",
        hint="it must answer POST .../chat/completions as OpenAI's chat API does",
    )


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
    """Return a message in the form of OpenAI's API, with the arguments of calls as text."""
    sent = dict(message)
    if message.get("tool_calls"):
        sent["tool_calls"] = []
        for call in message["tool_calls"]:
            text = json.dumps(call["function"].get("arguments") or {}, ensure_ascii=False)
            sent["tool_calls"].append({**call, "function": {**call["function"], "arguments": text}})
    return sent

"""One request and its answer, as every API reads and writes them.

A request is one object that is passed through functions: it is read by its API, routed, waits for its turn, is
forwarded, captured, and answered in the form of its API.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hivetune.serve.fields import CHAT_FIELDS, checked_fields

CHAT = "/v1/chat/completions"


@dataclass
class Block:
    """A part of an answer: a thought, a text or a call. The text of a call is its arguments."""

    kind: Literal["thought", "text", "call"]
    number: int
    text: str = ""
    id: str = ""
    name: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call; {} if a length limit cut them."""
        try:
            arguments = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            return {}
        return arguments if isinstance(arguments, dict) else {}

    @property
    def call(self) -> dict[str, Any]:
        """Return a call in the form of chat completions."""
        named = {"type": "function", "function": {"name": self.name, "arguments": self.text}}
        return {**named, "id": self.id} if self.id else named


@dataclass
class Said:
    """The content of an answer: its blocks in order, the reason why it ended, its number of tokens, and `totals`, the
    usage and timings that the model server reported."""

    blocks: list[Block] = field(default_factory=list)
    finish: str = ""
    tokens: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    _calls: dict[int, Block] = field(default_factory=dict)
    _logprobs: list[float] = field(default_factory=list)

    def add(self, piece: Mapping[str, Any]) -> list[tuple[Block, str]]:
        """Add a piece of a stream, or a whole answer. Returns each block that was begun or continued, with the text
        added to it. Raises TypeError, ValueError, AttributeError, LookupError if the piece does not have the form of
        OpenAI's API.
        """
        grown: list[tuple[Block, str]] = []
        for choice in piece.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or {}
            self.finish = choice.get("finish_reason") or self.finish
            thought, text = said.get("reasoning_content"), said.get("content")
            grown += [(self._last("thought", thought), thought)] if thought else []
            grown += [(self._last("text", text), text)] if text else []
            for number, part in enumerate(said.get("tool_calls") or ()):
                key, function = int(part.get("index", number)), part.get("function") or {}
                if key not in self._calls:
                    self._calls[key] = Block("call", len(self.blocks))
                    self.blocks.append(self._calls[key])
                call, arguments = self._calls[key], function.get("arguments") or ""
                call.id, call.name = part.get("id") or call.id, function.get("name") or call.name
                call.text += arguments
                grown.append((call, arguments))
            scored = (choice.get("logprobs") or {}).get("content") or ()
            self._logprobs += [float(token["logprob"]) for token in scored]
        for name in ("usage", "timings"):
            self.totals |= piece.get(name) or {}
        # A stream has its usage only where the client asks for it; llama.cpp's timings are always there.
        self.tokens = int(self.totals.get("completion_tokens") or self.totals.get("predicted_n") or 0)
        return grown

    def _last(self, kind: Literal["thought", "text"], text: str) -> Block:
        """Append `text` to the last block, or begin a new one if that is of another kind; return the block."""
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind, len(self.blocks)))
        self.blocks[-1].text += text
        return self.blocks[-1]

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as a chat message."""
        texts = {"text": "", "thought": "", "call": ""}
        for block in self.blocks:
            texts[block.kind] += block.text
        thoughts = {"reasoning_content": texts["thought"]} if texts["thought"] else {}
        calls = {"tool_calls": [call.call for call in self._calls.values()]} if self._calls else {}
        return {"role": "assistant", "content": texts["text"], **thoughts, **calls}

    @property
    def logprob(self) -> float | None:
        """Return the mean log-probability of the tokens in nats; None if they were not scored."""
        return sum(self._logprobs) / len(self._logprobs) if self._logprobs else None

    def count(self, name: str) -> int:
        """Return the number of prompt_tokens, completion_tokens or cached_tokens, by its name."""
        return int({**self.totals, **(self.totals.get("prompt_tokens_details") or {})}.get(name) or 0)


@dataclass(eq=False)
class Request:
    """A request with its state: its release, its answer, and whether it was captured."""

    dialect: "Dialect"
    # As it was sent, and checked (fields.py).
    document: Mapping[str, Any]
    fields: Mapping[str, Any]
    # The client's names of what has no effect.
    ignored: dict[str, None]
    size_bytes: int
    client: str  # who holds the token
    session: str | None = None  # as the client names it
    # Its agent, category and system prompt.
    declared: Mapping[str, str] = field(default_factory=dict)
    # Whether its answer is to be stored, and below, yes or no, whether it was.
    captures: bool = False
    id: str = field(default_factory=lambda: f"hive-{secrets.token_hex(12)}")
    started_s: float = field(default_factory=time.monotonic)
    # Of its release, noted before that is asked: an early failure counts against it too.
    label: str = ""
    said: Said = field(default_factory=Said)
    captured: str = ""

    @property
    def streams(self) -> bool:
        return self.fields.get("stream") is True

    @property
    def owner(self) -> str:
        """Return the client and the session of the request as one key."""
        # Those of two clients are different, whatever their names are.
        return f"{self.client}\0{self.session or self.id}"

    @property
    def scores(self) -> dict[str, Any]:
        """Return the fields that request the log-probability of each token; {} if the client requested it itself."""
        fields = self.fields
        asks = "logprobs" in fields or "top_logprobs" in fields
        # llama.cpp refuses them for a stream with tools, and tells none with `top_logprobs: 0`.
        is_scored = self.captures and not asks and not (self.streams and fields.get("tools"))
        return {"logprobs": True, "top_logprobs": 1} if is_scored else {}

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of the answer."""
        told = {"Release": self.label, "Captured": self.captured, "Ignored": ", ".join(self.ignored)}
        return {f"X-Hivetune-{name}": value for name, value in told.items() if value}


class Writer:
    """The writer of an answer in OpenAI's own form, as the model server writes it; only names of models are
    replaced."""

    def __init__(self, request: Request):
        self.request = request

    def whole(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document of an answer, made from that of the model server."""
        request = self.request
        return {**document, "id": request.id, "model": request.label, "system_fingerprint": request.label}

    def event(self, piece: Mapping[str, Any], grown: Sequence[tuple[Block, str]]) -> bytes:
        """Return the events of a piece of a stream as bytes. `grown`: the blocks that it extends, with the
        added text."""
        return data(self.whole(piece))

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, message: str) -> bytes:
        return data(error_body(502, message))


# What a request says: its checked fields, and the client's names of what has no effect.
Read = tuple[dict[str, Any], dict[str, None]]
# Returns the messages of a captured answer of the same client, itself included; raises NotThere.
Recall = Callable[[str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Dialect:
    """An API of the gateway: its path, its reader of requests and its writer of answers."""

    path: str
    # The field that holds what is asked.
    main_field: str
    read: Callable[[Mapping[str, Any], Recall], Read]  # raises FieldRefused
    writer: Callable[[Request], Writer] = Writer
    media_type: str = "text/event-stream"  # of a stream
    names: Mapping[str, str] = field(default_factory=dict)  # the API's own names of checked fields
    # Whether an answer's thoughts stand apart from its text.
    thoughts: bool = True


OPENAI = Dialect(CHAT, "messages", lambda document, recall: (checked_fields(CHAT_FIELDS, document), {}), thoughts=False)

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None, *, path: str = CHAT
) -> dict[str, Any]:
    """Return an error in the form of the API at `path`: Ollama's, Anthropic's, else OpenAI's. `param`: the field of the
    request that caused it.
    """
    if path.startswith("/api/"):
        return {"error": message}
    is_anthropic = path.startswith("/v1/messages")
    loading, failed = ("overloaded_error", "api_error") if is_anthropic else ("service_unavailable", "server_error")
    usual = loading if status == 503 else failed if status >= 500 else "invalid_request_error"
    kind = _KINDS.get(status, usual)
    if is_anthropic:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def data(document: Mapping[str, Any], kind: str = "") -> bytes:
    """Return a document as a server-sent event of the type `kind`."""
    named = f"event: {kind}\n".encode() if kind else b""
    # In ASCII: clients that read lines by Python's rules end one at U+2028 too.
    return named + b"data: " + json.dumps(document).encode() + b"\n\n"

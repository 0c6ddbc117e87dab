"""What an API has to say to be served: how its request is read, and how an answer, a stream and an error look.

Other APIs than OpenAI's are read key by key (`Given`) into checked chat fields, and their answers are written from the
blocks that the pieces of a chat completion add up to.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hivetune.serve.fields import CHAT_FIELDS, TEXT_FIELDS, Api, FieldRefused, checked_fields

CHAT = "/v1/chat/completions"
# Returns the messages of a captured answer of the same client, itself included; raises NotThere.
Recall = Callable[[str], list[dict[str, Any]]]


class Read(NamedTuple):
    """A request: its checked fields, and what has no effect of what the client sent, by the client's names."""

    fields: dict[str, Any]
    ignored: Sequence[str] = ()


@dataclass(frozen=True)
class Named:
    """The names of an answer that clients see: its id, the label of its release, and the checked fields it answers.
    `document`: the request as it was sent."""

    id: str
    label: str
    fields: Mapping[str, Any]
    document: Mapping[str, Any]


class Writer:
    """Writes an answer, whole or as a stream. OpenAI's own APIs, which the model server speaks too, get our names."""

    def __init__(self, named: Named):
        self.named = named

    def whole(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document of an answer, of the chat completion that it is."""
        named = self.named
        return {**document, "id": named.id, "model": named.label, "system_fingerprint": named.label}

    def event(self, piece: Mapping[str, Any]) -> bytes:
        """Return the events of a piece of a chat completion."""
        return data(self.whole(piece))

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, message: str) -> bytes:
        return data(error_body(502, message))


@dataclass(frozen=True)
class Dialect:
    """An API. `path`: here. `upstream`: the model server's API that it is mapped to. `main_field`: the field that holds
    what is asked. `read`: raises FieldRefused. `media_type`: of a stream. `names`: the
    API's own names of checked fields. `thoughts`: whether an answer's thoughts stand apart from its text."""

    path: str
    upstream: str
    main_field: str
    read: Callable[[Mapping[str, Any], Recall], Read]
    writer: Callable[[Named], Writer]
    media_type: str = "text/event-stream"
    names: Mapping[str, str] = field(default_factory=dict)
    thoughts: bool = True


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None, *, path: str = CHAT
) -> dict[str, Any]:
    """Return an error as the clients of `path` read it: Ollama's, Anthropic's, else OpenAI's. `param`: the field of the
    request that caused it."""
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
    """Return an event of the type `kind`. In ASCII: clients that read lines by Python's rules end one at U+2028 too."""
    named = f"event: {kind}\n".encode() if kind else b""
    return named + b"data: " + json.dumps(document).encode() + b"\n\n"


class Given:
    """An object of a request, whose keys are taken one by one; `done` refuses what is left in it or inside it. Values
    are checked where they arrive, in the chat fields. `ignored`: the hints that were sent."""

    def __init__(self, value: Any, path: str = "", root: "Given | None" = None):
        if not isinstance(value, dict):
            raise FieldRefused(path, "an object is expected")
        self._left = {key: item for key, item in value.items() if item is not None}
        self._path, self._root = path, self if root is None else root
        self._objects: dict[str, Given] = {}
        self.ignored: dict[str, None] = {}
        self._root._objects[path] = self

    def peek(self, key: str) -> Any:
        return self._left.get(key)

    def at(self, key: str) -> str:
        return f"{self._path}.{key}".lstrip(".")

    def take(self, key: str, kind: type = object) -> Any:
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, kind):
            raise FieldRefused(self.at(key), f"its type is not {kind.__name__}")
        return value

    def one_of(self, key: str, *values: Any) -> Any:
        """Take a value that is one of `values`, or was not sent."""
        value = self._left.pop(key, None)
        if value is not None and value not in values:
            raise FieldRefused(self.at(key), f"here it is one of: {', '.join(map(str, values))}")
        return value

    def hints(self, *keys: str) -> None:
        self._root.ignored |= {key: None for key in keys if self._left.pop(key, None) is not None}

    def inner(self, key: str) -> "Given":
        known = self._root._objects.get(self.at(key))
        return known or Given(self.take(key) or {}, self.at(key), self._root)

    def fields(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Take chat fields. `names`: what each is called here, `options.stop` inside of an object."""
        places = {name: own.rpartition(".") for name, own in names.items()}
        return {name: (self.inner(at) if at else self).take(key) for name, (at, _, key) in places.items()}

    def each(self, key: str) -> list["Given"]:
        items = enumerate(self.take(key, list) or ())
        return [Given(item, f"{self.at(key)}[{number}]", self._root) for number, item in items]

    def text(self, key: str) -> str:
        """Take a text, or text parts: on lines of their own, as llama.cpp puts them."""
        if not isinstance(self.peek(key), list):
            return self.take(key, str) or ""
        return "\n".join(part.part() for part in self.each(key))

    def part(self) -> str:
        self.one_of("type", "text", "input_text", "output_text", "summary_text", "reasoning_text")
        self.hints("cache_control")
        for empty in ("annotations", "citations", "logprobs"):
            self.one_of(empty, [])
        if self.peek("text") is None:
            raise FieldRefused(self.at("text"), "a part has a text")
        return str(self.take("text", str))

    def tools(self, kind: str, schema: str, inner: str = "") -> list[dict[str, Any]] | None:
        """Take the functions among `tools` as chat completions have them; all tools are of one kind."""
        functions = []
        for tool in self.each("tools"):
            tool.one_of("type", kind)
            tool.one_of("defer_loading", False)
            tool.hints("cache_control", "eager_input_streaming")
            names = {name: name for name in ("name", "description", "strict")} | {"parameters": schema}
            taken = (tool.inner(inner) if inner else tool).fields(names)
            function = {name: value for name, value in taken.items() if value is not None}
            functions.append({"type": "function", "function": function})
        return functions or None

    def done(self) -> None:
        for inside in self._objects.values():
            for key in inside._left:
                raise FieldRefused(inside.at(key), "no field of this API")


def chat_read(given: Given, chat: Mapping[str, Any], turns: Iterable[dict[str, Any]], names: Mapping[str, str]) -> Read:
    """Return the request of checked chat fields: `chat`, without those that were not sent, and `turns`. The usage is
    asked for, since these APIs always tell it. Raises FieldRefused."""
    messages = _in_order(turns)
    given.done()
    sent = {key: value for key, value in chat.items() if value is not None}
    options = {"stream_options": {"include_usage": True}} if sent.get("stream") else {}
    try:
        return Read(checked_fields(CHAT_FIELDS, {**sent, **options, "messages": messages}), tuple(given.ignored))
    except FieldRefused as error:
        first = re.split(r"[.\[]", error.field)[0]
        rest = "" if first == "messages" else error.field.removeprefix(first)  # which are counted otherwise there
        own = names.get(first, first) + rest
        raise FieldRefused(own, error.message.removeprefix(f"{error.field}: ")) from None


_JOINED = ("reasoning_content", "content")


def _in_order(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in an order that templates know: one system prompt, which is the first, and no neighbours of one
    role but tools' results. A later system prompt becomes the user's."""
    ordered: list[dict[str, Any]] = []
    for turn in turns:
        role = turn.get("role")
        if role in ("system", "developer"):
            role = "system" if all(before["role"] == "system" for before in ordered) else "user"
        if not ordered or role == "tool" or role != ordered[-1]["role"]:
            ordered.append({**turn, "role": role, **{key: [turn[key]] for key in _JOINED if turn.get(key)}})
            continue
        last = ordered[-1]
        for key in (key for key in _JOINED if turn.get(key)):
            last[key] = last.get(key) or []
            last[key].append(turn[key])
        if calls := turn.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    for turn in ordered:
        turn |= {key: "\n".join(turn[key]) for key in _JOINED if turn.get(key)}
    return ordered


def call_of(name: Any, arguments: Any, identity: Any) -> dict[str, Any]:
    """Return a call as chat completions have it. `arguments`: an object, or its JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


@dataclass
class Block:
    """A part of an answer. The text of a call is its arguments."""

    kind: str  # thought, text or call
    number: int
    text: str = ""
    id: str = ""
    name: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call: none where a length limit cut them."""
        try:
            arguments = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            return {}
        return arguments if isinstance(arguments, dict) else {}


Stage = Literal["begin", "open", "grow", "close", "end"]
_NO_BLOCK = Block("text", 0)


class BlockWriter(Writer, ABC):
    """Writes an answer of another API from its blocks. A stream begins, opens, grows and closes them, and ends.

    `finish`: why the answer ended. `totals`: its usage and timings. `num_told`: events so far.
    """

    def __init__(self, named: Named):
        super().__init__(named)
        self.blocks: list[Block] = []
        self.finish = ""
        self.totals: dict[str, Any] = {}
        self.num_told = 0
        self._calls: dict[Any, Block] = {}
        self._open: Block | None = None

    @abstractmethod
    def tell(self, stage: Stage, block: Block, text: str) -> list[dict[str, Any]]:
        """Return the events of a stage. Those that begin and end the answer have an empty block."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the document of the blocks so far."""

    @abstractmethod
    def failed(self, message: str) -> dict[str, Any]:
        """Return the last event of an answer that broke off."""

    def whole(self, document: Mapping[str, Any]) -> dict[str, Any]:
        list(self._grow(document))
        return self.answer()

    def event(self, piece: Mapping[str, Any]) -> bytes:
        told = [] if self.num_told else self._tell("begin")
        for block, text in self._grow(piece):
            if block is not self._open:
                told += self._close()
                self._open = block
                told += self._tell("open", block)
            told += self._tell("grow", block, text) if text else []
        return self.written(told)

    def end(self) -> bytes:
        return self.written([*self._close(), *self._tell("end")])

    def error(self, message: str) -> bytes:
        self.num_told += 1
        return self.written([self.failed(message)])

    def written(self, told: list[dict[str, Any]]) -> bytes:
        return b"".join(data(event, event["type"]) for event in told)

    def count(self, name: str) -> int:
        """Return a number of tokens: prompt_tokens, completion_tokens or cached_tokens."""
        return int({**self.totals, **(self.totals.get("prompt_tokens_details") or {})}.get(name) or 0)

    def _grow(self, piece: Mapping[str, Any]) -> Iterator[tuple[Block, str]]:
        """Yield each block that a piece begins or continues, and the text that it adds."""
        for name in ("usage", "timings"):
            self.totals |= piece.get(name) or {}
        for choice in piece.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or {}
            self.finish = choice.get("finish_reason") or self.finish
            for kind, text in (("thought", said.get("reasoning_content")), ("text", said.get("content"))):
                if text:
                    same = bool(self.blocks) and self.blocks[-1].kind == kind
                    block = self.blocks[-1] if same else self._new(Block(kind, len(self.blocks)))
                    block.text += text
                    yield block, text
            for number, call in enumerate(said.get("tool_calls") or ()):
                function, key = call.get("function") or {}, call.get("index", number)
                if key not in self._calls:
                    names = str(call.get("id")), str(function.get("name"))
                    self._calls[key] = self._new(Block("call", len(self.blocks), "", *names))
                text = str(function.get("arguments") or "")
                self._calls[key].text += text
                yield self._calls[key], text

    def _new(self, block: Block) -> Block:
        self.blocks.append(block)
        return block

    def _close(self) -> list[dict[str, Any]]:
        return [] if self._open is None else self._tell("close", self._open)

    def _tell(self, stage: Stage, block: Block = _NO_BLOCK, text: str = "") -> list[dict[str, Any]]:
        events = self.tell(stage, block, text)
        self.num_told += len(events)
        return events


def _of_openai(path: str, main_field: str, fields: Api) -> Dialect:
    def read(document: Mapping[str, Any], recall: Recall) -> Read:
        return Read(checked_fields(fields, document))

    return Dialect(path, path, main_field, read, Writer, thoughts=False)


OPENAI = (_of_openai(CHAT, "messages", CHAT_FIELDS), _of_openai("/v1/completions", "prompt", TEXT_FIELDS))

"""The parts that the APIs other than OpenAI's share: a reader of requests, key by key, and a writer of answers as
blocks."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from hivetune.serve.fields import CHAT_FIELDS, FieldRefused, checked_fields
from hivetune.serve.request import Block, Read, Request, Writer, data, error_body


class Given:
    """An object of a request, from which keys are taken one by one. `done` refuses the request if keys are left in this
    object or in one inside it. Values are checked later, as chat fields. `ignored`: hints that were sent and have no
    effect."""

    def __init__(self, value: Any, path: str = "", root: "Given | None" = None):
        if not isinstance(value, dict):
            raise FieldRefused(path, "must be an object")
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
            raise FieldRefused(self.at(key), f"must be of the type {kind.__name__}")
        return value

    def one_of(self, key: str, *values: Any) -> Any:
        """Return the value of a key, which must be one of `values`; None if it was not sent."""
        value = self._left.pop(key, None)
        if value is not None and value not in values:
            raise FieldRefused(self.at(key), f"must be one of: {', '.join(map(str, values))}")
        return value

    def hints(self, *keys: str) -> None:
        self._root.ignored |= {key: None for key in keys if self._left.pop(key, None) is not None}

    def inner(self, key: str) -> "Given":
        known = self._root._objects.get(self.at(key))
        return known or Given(self.take(key) or {}, self.at(key), self._root)

    def fields(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of this object as chat fields. `names`: chat field -> the API's name; `options.stop` is the
        key `stop` of the object `options`."""
        places = {name: own.rpartition(".") for name, own in names.items()}
        return {name: (self.inner(at) if at else self).take(key) for name, (at, _, key) in places.items()}

    def each(self, key: str) -> list["Given"]:
        items = enumerate(self.take(key, list) or ())
        return [Given(item, f"{self.at(key)}[{number}]", self._root) for number, item in items]

    def text(self, key: str) -> str:
        """Return the value of a key that is a text or text parts."""
        if not isinstance(self.peek(key), list):
            return self.take(key, str) or ""
        # On lines of their own, as llama.cpp puts them.
        return "\n".join(part.part() for part in self.each(key))

    def part(self) -> str:
        self.one_of("type", "text", "input_text", "output_text", "summary_text", "reasoning_text")
        self.hints("cache_control")
        for empty in ("annotations", "citations", "logprobs"):
            self.one_of(empty, [])
        if self.peek("text") is None:
            raise FieldRefused(self.at("text"), "a part must have a text")
        return str(self.take("text", str))

    def tools(self, kind: str, schema: str, inner: str = "") -> list[dict[str, Any]] | None:
        """Return the functions in `tools` in the form of chat completions, or None. All tools must be of one kind."""
        functions = []
        names = {name: name for name in ("name", "description", "strict")} | {"parameters": schema}
        for tool in self.each("tools"):
            tool.one_of("type", kind)
            tool.one_of("defer_loading", False)
            tool.hints("cache_control", "eager_input_streaming")
            taken = (tool.inner(inner) if inner else tool).fields(names)
            functions.append({"type": "function", "function": _sent(taken)})
        return functions or None

    def done(self) -> None:
        for inside in self._objects.values():
            for key in inside._left:
                raise FieldRefused(inside.at(key), "is not a supported field of this API")


def _sent(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def chat_read(given: Given, chat: Mapping[str, Any], turns: Iterable[dict[str, Any]], names: Mapping[str, str]) -> Read:
    """Return the request with the checked chat fields `chat`, of which unsent ones are dropped, and `turns`. `names`:
    the API's names of the fields, used in refusals. Raises FieldRefused.
    """
    messages = _in_order(turns)
    given.done()
    sent = _sent(chat)
    # Which these APIs always tell.
    options = {"stream_options": {"include_usage": True}} if sent.get("stream") else {}
    try:
        return checked_fields(CHAT_FIELDS, {**sent, **options, "messages": messages}), given.ignored
    except FieldRefused as error:
        first = re.split(r"[.\[]", error.field)[0]
        # Blocks and turns are counted otherwise there, so of a message only the field's name is told.
        rest = "" if first == "messages" else error.field.removeprefix(first)
        raise FieldRefused(names.get(first, first) + rest, error.message.removeprefix(f"{error.field}: ")) from None


_JOINED = ("reasoning_content", "content")


def _in_order(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in an order that templates accept: at most one system prompt, at the beginning, and no neighbours of
    one role but tools' results. A later system prompt becomes the user's.
    """
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
    """Return a tool call in the form of chat completions. `arguments`: an object, or its JSON text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


Stage = Literal["begin", "open", "grow", "close", "end"]


class BlockWriter(Writer, ABC):
    """The writer of an answer in the form of another API, made from its blocks. In a stream, blocks are opened,
    extended and closed by events. `num_told`: number of events so far."""

    def __init__(self, request: Request):
        super().__init__(request)
        self.said, self.num_told = request.said, 0
        self._open: Block | None = None

    @abstractmethod
    def tell(self, stage: Stage, block: Block, text: str) -> list[dict[str, Any]]:
        """Return the events of a stage. At the stages that begin and end the answer the block is empty."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the document of the blocks so far."""

    def failed(self, message: str) -> dict[str, Any]:
        """Return the last event of an answer that broke off, with `message` as its error."""
        return error_body(502, message, path=self.request.dialect.path)

    def whole(self, document: Mapping[str, Any]) -> dict[str, Any]:
        return self.answer()

    def event(self, piece: Mapping[str, Any], grown: Sequence[tuple[Block, str]]) -> bytes:
        told = [] if self.num_told else self._tell("begin")
        for block, text in grown:
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

    def _close(self) -> list[dict[str, Any]]:
        return [] if self._open is None else self._tell("close", self._open)

    def _tell(self, stage: Stage, block: Block | None = None, text: str = "") -> list[dict[str, Any]]:
        events = self.tell(stage, block or Block("text", 0), text)
        self.num_told += len(events)
        return events

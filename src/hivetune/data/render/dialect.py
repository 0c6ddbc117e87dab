"""The dialect of a template: the fields and forms of a message that it reads, found by trial."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.records import Message

Messages = Sequence[Message]
Tools = Sequence[Mapping[str, Any]]
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
USER, ANSWER, THOUGHT, CALL, KEY, VALUE = "Xuserprobe", "Xanswerprobe", "Xthought", "Xcall", "Xkey", "Xvalue"
USER_TURN = Message("user", USER)
USUAL_ID, SHORT_ID = "call_0123456789ab", "abcdefghi"
# Mistral's templates raise an error for ids of any other length.
SHORT_ID_CHARS = 9
THOUGHT_BEFORE = re.compile(r"(\s*<think>\n*)(.*?)((?:(?<!\n)\n*)?</think>\n*)(.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of messages for one template.

    `reasoning_key`: the field for an assistant's thoughts, None if the template reads none. `splits_thoughts`:
    `<think>...</think>` in a content is not written as it is. `text_arguments`: arguments of calls are JSON text.
    `null_content`: the content of a message that only calls is None. `short_ids`: ids of calls must have 9 letters or
    digits. `writes_ids`: ids are written. `typed_content`: contents are lists of parts, as for models that see.
    """

    reasoning_key: str | None = None
    splits_thoughts: bool = False
    text_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False
    writes_ids: bool = False
    typed_content: bool = False

    def chat(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages in the form that the template reads."""
        return [self._shown(message) for message in messages]

    def _shown(self, message: Message) -> dict[str, Any]:
        shown = template_message(message)
        thought = shown.pop("reasoning_content", None)
        if thought is not None:
            shown[self.reasoning_key or REASONING_KEYS[0]] = thought
        if message.tool_calls:
            if self.null_content and not message.content.strip():
                shown["content"] = None
            for i, call in enumerate(message.tool_calls if self.text_arguments else ()):
                arguments = json.dumps(call["function"].get("arguments", {}), ensure_ascii=False)
                shown["tool_calls"][i] = {**call, "function": {**call["function"], "arguments": arguments}}
        if self.typed_content and isinstance(shown["content"], str):
            shown["content"] = [{"type": "text", "text": shown["content"]}]
        return shown

    def spoken(self, messages: Messages) -> tuple[tuple[Message, ...], bool]:
        """Return the messages with thoughts in a field of their own, if the template would otherwise remove them from
        the content, and with ids of calls in the form that it requires; and whether any id was changed.
        """
        messages = tuple(map(_split_thought, messages)) if self.splits_thoughts else tuple(messages)
        if not (self.writes_ids or self.short_ids) or not any(m.tool_calls or m.role == "tool" for m in messages):
            return messages, False
        new: list[Message] = []
        waiting: list[tuple[Any, str]] = []
        count = 0
        for message in messages:
            if message.tool_calls:
                ids = [self._id(call.get("id"), count + i) for i, call in enumerate(message.tool_calls)]
                waiting = [(call.get("id"), new_id) for call, new_id in zip(message.tool_calls, ids, strict=True)]
                calls = [{**call, "id": new_id} for call, new_id in zip(message.tool_calls, ids, strict=True)]
                count += len(ids)
                message = replace(message, tool_calls=tuple(calls))
            elif message.role == "tool":
                # A result without an id answers the first call that waits.
                answered = next((pair for pair in waiting if message.tool_call_id in (pair[0], None)), None)
                if answered is not None:
                    waiting.remove(answered)
                    message = replace(message, tool_call_id=answered[1])
            new.append(message)
        return tuple(new), tuple(new) != messages

    def _id(self, row_id: Any, number: int) -> str:
        """Return the row's own id if it is valid; else a short one from its hash."""
        identity = row_id if isinstance(row_id, str) and row_id else f"call_{number:08d}"
        if not self.short_ids or (len(identity) == SHORT_ID_CHARS and identity.isalnum()):
            return identity
        return blake2b(f"{number} {identity}".encode(), digest_size=8).hexdigest()[:SHORT_ID_CHARS]


def template_message(message: Message) -> dict[str, Any]:
    """Return a message as most templates expect it, without empty fields, since templates test `is defined`."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        shown["name"] = message.name
    if message.reasoning is not None:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def request_hash(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the hash of a request's messages and tools, 32 hex digits."""
    request = json.dumps([messages, tools], ensure_ascii=False, sort_keys=True)
    return hashlib.blake2b(request.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def find_dialect(template: ChatTemplate) -> Dialect:
    """Return the dialect of a template, found by trial renderings; it may lack tools or thoughts."""
    # Idefics 3 and SmolVLM write nothing of a content that is a plain text.
    typed = Dialect(typed_content=True)
    if USER not in _try(template, Dialect(), USER_TURN) and USER in _try(template, typed, USER_TURN):
        return typed
    dialect = _find_calls(template)
    # Gemma 4 writes thoughts only in front of calls.
    thinking = Message("assistant", ANSWER, reasoning=THOUGHT), replace(_call(SHORT_ID), reasoning=THOUGHT)
    for key in REASONING_KEYS:
        with_key = replace(dialect, reasoning_key=key)
        if any(THOUGHT in _try(template, with_key, USER_TURN, answer) for answer in thinking):
            return replace(with_key, splits_thoughts=True)
    inline = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    text = _try(template, dialect, USER_TURN, Message("assistant", inline))
    return replace(dialect, splits_thoughts=inline not in text)


def _find_calls(template: ChatTemplate) -> Dialect:
    """Return the dialect of calls: text_arguments, null_content, short_ids and writes_ids."""
    for null_content in (False, True):
        for text_arguments in (False, True):
            dialect = Dialect(text_arguments=text_arguments, null_content=null_content)
            for identity in (USUAL_ID, SHORT_ID):
                text = _try(template, dialect, USER_TURN, _call(identity))
                # Python's form of an object is no JSON: such a template wants a text.
                if all(part in text for part in (CALL, KEY, VALUE)) and repr({KEY: VALUE}) not in text:
                    return replace(dialect, short_ids=identity == SHORT_ID, writes_ids=identity in text)
    return Dialect()


def _call(identity: str) -> Message:
    call = {"type": "function", "id": identity, "function": {"name": CALL, "arguments": {KEY: VALUE}}}
    return Message("assistant", "", tool_calls=(call,))


def _try(template: ChatTemplate, dialect: Dialect, *messages: Message) -> str:
    """Return the rendered text; "" if the template fails. Raise RenderError if it exceeds its limits."""
    try:
        return template.apply(dialect.chat(messages), None, False)
    except RenderError as error:
        if error.reason == "too-costly":
            raise
        return ""


def _split_thought(message: Message) -> Message:
    if message.role != "assistant" or message.reasoning is not None or "</think>" not in message.content:
        return message
    match = THOUGHT_BEFORE.match(message.content)
    if match is None:
        return message
    thought, answer = match.group(2), match.group(4)
    return replace(message, content=answer, reasoning=thought if thought.strip() else None)

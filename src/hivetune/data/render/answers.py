"""The answer that a template makes a model write: the text between the prompt that a server sends and the end token.

The template is rendered twice for each answer: its prompt, and the conversation with the answer. What follows the
prompt is the answer. Some templates do not write the answer behind its own prompt, because they drop the thought of an
answer or move the system prompt into the newest question. There the answer is what follows its header.

What a template leaves out is found on a skeleton of the conversation, which has a mark in place of each text. Rows of
one shape share it.
"""

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hivetune.data.render.dialect import CLOSED_THOUGHT, EMPTY_THOUGHT, OPEN_THOUGHT, THOUGHT_BEFORE, find_dialect
from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.records import Message

MARK = re.compile(r"Xq(\d{5})Xq")
PROBE = 90_000  # the first mark of texts that stand in the place of a row's own
MAX_SHAPES = 1024
_SHOWN_CHARS = 40
# Small models whose templates write what others leave out.
_WRITTEN_BY = {
    "tool call": "Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B",
    "tool": "Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B",
    "reasoning": "Qwen/Qwen3-0.6B",
}


class Answer(NamedTuple):
    """Message `message` as it is trained: the `prompt` that a server sends, the `text` that the model writes, with its
    end token, and what the template writes `behind` it. `empty_thought`: the text has a thought that the row has not.
    """

    message: int
    prompt: str
    text: str
    behind: str
    empty_thought: bool


class Part(NamedTuple):
    """One text of a row: the number of its message (-1 for the tools), its name in words, and the text."""

    message: int
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Messages and tools with the mark of part i in place of its text."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    parts: tuple[Part, ...]


class Frame(NamedTuple):
    """What a template writes around the last answer of conversations of one shape.

    The answer ends `behind` characters before the end of the conversation, and then with `end`, which the template
    writes only before a next turn. `header`: None if the answer follows its own prompt, else the text in front of it.
    """

    behind: int
    end: str
    header: str | None


class SpokenTemplate:
    """One template with its dialect. `ends` are the model's end tokens, `controls` all its control tokens."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str], controls: Sequence[str]):
        self._template = template
        self.dialect = find_dialect(template)
        self._ends = tuple(ends)
        self._controls = tuple(controls)
        self._frames: dict[tuple[Any, ...], Frame] = {}

    def apply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], for_answer: bool) -> str:
        """Return the text of the messages, with the header of the next answer if `for_answer`. Raise RenderError."""
        return self._template.apply(self.dialect.chat(messages), list(tools) or None, for_answer)

    def answers(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Return each answer of the conversation that is trained. Raise RenderError: not-in-template, end-not-trained,
        or an error of the template itself."""
        found: list[Answer] = []
        for i, message in enumerate(messages):
            if message.role == "assistant" and message.weight:
                is_new = found[-1].message + 1 if found else -1
                found.append(self._answer(messages[: i + 1], tools, is_new))
        return found

    def _answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], first_new: int) -> Answer:
        """Return the last message as it is trained. The texts of messages before `first_new` have been looked for."""
        key, skeleton = _plain_shape(messages, tools), None
        parts: Sequence[Part] = _plain_parts(messages)
        if key is None:
            skeleton = make_skeleton(messages, tools)
            key, parts = (repr((skeleton.messages, skeleton.tools)),), skeleton.parts
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frame(skeleton or make_skeleton(messages, tools))
            if len(self._frames) < MAX_SHAPES:
                self._frames[key] = frame
        prompt, text, behind = self._written(messages, tools, frame)
        for part in parts:
            if part.message >= first_new and _is_needed(part, messages):
                _check_written(part, text if part.message == len(messages) - 1 else prompt)
        opened = OPEN_THOUGHT.search(prompt)
        begun = (f"<{opened[1]}>" if opened else "") + text
        is_empty = messages[-1].reasoning is None and EMPTY_THOUGHT.match(begun.lstrip()) is not None
        return Answer(len(messages) - 1, prompt, text, behind, is_empty)

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], frame: Frame
    ) -> tuple[str, str, str]:
        """Return the prompt of the last message, the message as it is trained, and the text behind it."""
        prompt, whole = self._template.prompt_and_whole(self.dialect.chat(messages), list(tools) or None)
        if frame.header is not None:
            return prompt, self._behind_header(messages, tools, prompt, whole, frame) + frame.end, ""
        if not whole.startswith(prompt):
            raise RenderError("not-in-template", "the text begins otherwise than that of other rows of this shape")
        end = len(whole) - frame.behind
        return prompt, whole[len(prompt) : end] + frame.end, "" if frame.end else whole[end:]

    def _behind_header(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt: str, whole: str, frame: Frame
    ) -> str:
        """Return an answer that the template does not write behind its own prompt, as the model has to write it."""
        *before, own = messages
        if own.reasoning is None and self.dialect.reasoning_key:
            probed = self.apply((*before, replace(own, reasoning=mark_of(PROBE))), tools, False)
            if probed.startswith(prompt + mark_of(PROBE)):  # with a thought it would stand there
                return probed[len(prompt) + len(mark_of(PROBE)) : len(probed) - frame.behind]
        marked = self.apply((*before, *make_skeleton([own], (), PROBE).messages), tools, False)
        in_front = re.split(rf"Xq{PROBE // 1000}\d{{3}}Xq", marked, maxsplit=1)[0]
        header = in_front.rfind(frame.header or "")
        if not frame.header or header < 0 or not whole.startswith(in_front):
            raise RenderError("not-in-template", "the template does not write this answer behind its prompt")
        text = whole[header + len(frame.header) : len(whole) - frame.behind]
        if opened := OPEN_THOUGHT.search(prompt):
            closing = f"</{opened[1]}>"
            text = re.sub(rf"\A(?:<{opened[1]}>\s*)+", "", text)
            if own.reasoning is not None:  # some templates drop it from messages; yet their prompt asks for it
                return text if mark_of(PROBE) in marked else f"{own.reasoning.strip()}\n{closing}\n\n{text}"
            has_own = closing in text and not text.lstrip().startswith(closing)
            return text if has_own else f"\n{closing}\n\n{_without_closing(text)}"
        if CLOSED_THOUGHT.search(prompt) and own.reasoning is not None:
            raise RenderError(
                "not-in-template",
                f"the prompt of the template has no place for the reasoning of message {len(messages)}: "
                "take a model whose template has one",
            )
        return _without_closing(text) if CLOSED_THOUGHT.search(prompt) else text

    def _frame(self, skeleton: Skeleton) -> Frame:
        """Return the frame of a skeleton that ends with an answer, after the check that all its parts are written."""
        messages, tools, last = skeleton.messages, skeleton.tools, len(skeleton.messages) - 1
        own = {n for n, part in enumerate(skeleton.parts) if part.message == last}
        prompt, whole = self.apply(messages[:-1], tools, True), self.apply(messages, tools, False)
        own_end = _last_end(whole, own) or len(prompt)
        end = self._end_of(whole, own_end)
        frame = Frame(len(whole) - end, "", None)
        if not end:
            frame = Frame(len(whole) - own_end, self._next_end(skeleton, own), None)
        opened = OPEN_THOUGHT.search(prompt) if messages[-1].reasoning is None else None
        # An answer without a thought may be written into the thought that its prompt opens.
        follows = opened is None or f"</{opened[1]}>" in MARK.split(whole[len(prompt) :], maxsplit=1)[0]
        if not whole.startswith(prompt) or not follows:
            header = OPEN_THOUGHT.sub("", CLOSED_THOUGHT.sub("", MARK.split(prompt)[-1]))
            frame = frame._replace(header=header)
        self._check_parts(skeleton, *self._written(messages, tools, frame)[:2])
        return frame

    def _check_parts(self, skeleton: Skeleton, prompt: str, text: str) -> None:
        """Raise RenderError unless the prompt and the answer have all parts of the skeleton."""
        last = len(skeleton.messages) - 1
        ends = [match.end() for match in MARK.finditer(text)]
        if ends and any(token in text[: ends[-1]] for token in self._ends):
            raise RenderError("not-in-template", "the template writes an end token in the middle of the answer")
        in_prompt, in_text = ({int(number) for number in MARK.findall(written)} for written in (prompt, text))
        for n, part in enumerate(skeleton.parts):
            is_written = n in (in_text if part.message == last else in_prompt)
            if not is_written and _is_needed(part, skeleton.messages):
                raise RenderError("not-in-template", _left_out(part))
        calls = skeleton.messages[last].tool_calls
        keys = {key for call in calls for key in _keys(call["function"].get("arguments", {}))}
        unescaped = text.encode("utf-8", "surrogatepass").decode("unicode_escape", "replace") if keys else ""
        for key in sorted(keys):
            if key not in text and key not in unescaped:
                raise RenderError("not-in-template", f"the template leaves out the argument {key[:_SHOWN_CHARS]!r}")

    def _end_of(self, text: str, start: int) -> int:
        """Return the end of the first end token from `start` on, else of the last control token, else 0."""
        ends = [(place, -len(token)) for token in self._ends if (place := text.find(token, start)) >= 0]
        if ends:
            return min(ends)[0] - min(ends)[1]
        return max(
            (place + len(token) for token in self._controls if (place := text.rfind(token, start)) >= 0), default=0
        )

    def _next_end(self, skeleton: Skeleton, own: set[int]) -> str:
        """Return the text up to the end token that the template writes only before a next message. Raise
        end-not-trained."""
        message, coming = skeleton.messages[-1], mark_of(PROBE)
        following = Message("user", coming)
        if message.tool_calls:
            call = message.tool_calls[0]
            following = Message("tool", coming, name=call["function"]["name"], tool_call_id=call.get("id"))
        text = self.apply((*skeleton.messages, following), skeleton.tools, False)
        between = text[_last_end(text, own) : text.rfind(coming)]
        ends = [(place, -len(token), token) for token in self._ends if (place := between.find(token)) >= 0]
        if not ends:
            raise RenderError("end-not-trained")
        return between[: min(ends)[0]] + min(ends)[2]


def mark_of(number: int) -> str:
    return f"Xq{number:05d}Xq"


def make_skeleton(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], first: int = 0) -> Skeleton:
    """Mark contents, thoughts, function names, texts in arguments, and names and descriptions of tools, from mark
    `first` on.

    Keys, numbers and ids stay as they are, and so does white space alone, which templates drop.
    """
    parts: list[Part] = []

    def mark(message: int, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: mark(message, name, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [mark(message, name, item) for item in value]
        if not isinstance(value, str) or not value.strip():
            return value
        parts.append(Part(message, name, value))
        return mark_of(first + len(parts) - 1)

    marked = []
    for i, m in enumerate(messages):
        calls = []
        for call in m.tool_calls:
            function = {**call["function"], "name": mark(i, "tool call", call["function"]["name"])}
            function["arguments"] = mark(i, "argument of a tool call", function.get("arguments", {}))
            calls.append({**call, "function": function})
        reasoning, content = mark(i, "reasoning", m.reasoning), mark(i, "content", m.content)
        marked.append(replace(m, content=content, reasoning=reasoning, tool_calls=tuple(calls)))
    marked_tools = []
    for tool in tools:
        inner = tool.get("function", tool)
        texts = {key: mark(-1, "tool", inner[key]) for key in ("name", "description") if key in inner}
        marked_tools.append({**tool, "function": {**inner, **texts}} if "function" in tool else {**tool, **texts})
    return Skeleton(tuple(marked), tuple(marked_tools), tuple(parts))


def _plain_shape(messages: Sequence[Message], tools: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the shape of a conversation that has only contents, without the work of a skeleton; None for any other."""
    if tools or any(m.tool_calls or m.reasoning is not None for m in messages):
        return None
    return tuple(
        (m.role, bool(m.weight), m.name, m.tool_call_id, m.content.isspace(), m.content == "") for m in messages
    )


def _plain_parts(messages: Sequence[Message]) -> list[Part]:
    return [Part(i, "content", m.content) for i, m in enumerate(messages)]


def _is_needed(part: Part, messages: Sequence[Message]) -> bool:
    """Return whether a part must be written: one of the last answer, or one that it answers. Templates drop thoughts of
    earlier answers, and some drop more of them, which is trained where they are new."""
    message = messages[part.message] if part.message >= 0 else None
    if message is None or message.role != "assistant" or part.message == len(messages) - 1:
        return True
    return not message.weight and part.name != "reasoning"


def _check_written(part: Part, text: str) -> None:
    """Raise RenderError unless the text of a row stands in what the template wrote."""
    thought = THOUGHT_BEFORE.match(part.value)  # templates drop a thought that stands in a content
    value = (thought[4] if thought else part.value).strip()
    if value not in text and not any(form in text for form in _forms(value)):
        raise RenderError("not-in-template", _left_out(part))


def _forms(value: str) -> Iterator[str]:
    """Yield a text as templates write it inside of JSON, a Python text, HTML or quotes."""
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield json.dumps(value)[1:-1]
    yield repr(value)[1:-1]
    yield html.escape(value)
    yield value.replace("'", "\\'")


def _last_end(text: str, numbers: set[int]) -> int:
    """Return the end of the last mark with one of these numbers, or 0."""
    return max((mark.end() for mark in MARK.finditer(text) if int(mark[1]) in numbers), default=0)


def _left_out(part: Part) -> str:
    shown = repr(part.value.strip()[:_SHOWN_CHARS])
    hint = f"the template leaves out the {part.name} of message {part.message + 1} ({shown})"
    if part.message < 0:
        hint = f"the template does not write the tools ({shown})"
    if part.name in _WRITTEN_BY:
        hint += f"; take a model whose template has it (--model), such as {_WRITTEN_BY[part.name]}"
    return hint


def _keys(value: Any) -> Iterable[str]:
    """Yield every key inside of arguments."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)


def _without_closing(text: str) -> str:
    """Return an answer without the end of an empty thought in front of it."""
    return re.sub(r"\A\s*</(?>[a-z_:]*?think)[a-z_:]*+>\s*", "", text)

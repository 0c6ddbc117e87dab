"""The answer that a model has to write according to a template: the text from the end of the prompt to the end token.

The template is rendered twice for each answer: as the prompt that a server sends, and as the conversation with the
answer. Their common beginning is the prompt, the rest is the answer. Each part of the row must appear in one of the two
texts, and an end token has to close the answer.
"""

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.data.render.dialect import THOUGHT_BEFORE, Messages, Tools, find_dialect
from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.records import Message

MARK = re.compile(r"Xq\d{5}Xq")
# A mark that no skeleton has: it would need 90,000 texts.
_PROBE = "Xq90000Xq"
# Rows of tools have as many shapes as tools, so that a set without end would fill the memory.
MAX_SHAPES = 1024
_SHOWN_CHARS = 40
# <think>, and with a prefix <seed:think> (Seed) and <mm:think> (MiniMax M3).
_THOUGHT_TAG = r"<((?>[a-z_:]*?think)[a-z_:]*+)>"
OPEN_THOUGHT = re.compile(rf"{_THOUGHT_TAG}\s*\Z")
EMPTY_THOUGHT = re.compile(rf"{_THOUGHT_TAG}\s*</\1>")
# Empty thoughts that a prompt closes before the answer: Qwen and DeepSeek, Cohere, Gemma 4.
CLOSED_THOUGHT = re.compile(
    rf"(?:{EMPTY_THOUGHT.pattern}|<\|START_THINKING\|><\|END_THINKING\|>|<\|channel>thought\n<channel\|>)\s*\Z"
)
# The end of an empty thought in front of an answer.
_CLOSING = re.compile(r"\A\s*</(?>[a-z_:]*?think)[a-z_:]*+>\s*")
# Small models whose templates write what others leave out.
_WRITTEN_BY = {
    "tool call": ("tool calls", "Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B"),
    "tool": ("tools", "Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B"),
    "reasoning": ("reasoning", "Qwen/Qwen3-0.6B"),
}


class Answer(NamedTuple):
    """Message number `message` as it is trained: the `prompt` that a server sends, the `text` that the model writes,
    with its end token, and the text that the template writes `behind` it. `empty_thought`: the text has an empty
    thought, although the row has none."""

    message: int
    prompt: str
    text: str
    behind: str
    empty_thought: bool


class Part(NamedTuple):
    """One text of a row: the number of its message (-1 for the tools), its name for error messages, the text, and the
    marker that replaces it in the skeleton."""

    message: int
    name: str
    value: str
    mark: str


class Frame(NamedTuple):
    """The text that a template writes around the last answer of all conversations of one shape.

    The answer ends `behind` characters before the end of the conversation; then `end` follows, which the template
    writes only before a next turn. `header`: the text before an answer that the template does not write after its own
    prompt, else None.
    """

    behind: int
    end: str
    header: str | None


class DialectTemplate:
    """A chat template with the form of messages that it reads. `ends`: the model's end tokens. `controls`: control
    tokens."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str], controls: Sequence[str]):
        self._template = template
        self.dialect = find_dialect(template)
        self._ends = tuple(ends)
        self._controls = tuple(controls)
        self._frames: dict[tuple[Any, ...], Frame] = {}

    def apply(self, messages: Messages, tools: Tools, for_answer: bool) -> str:
        """Return the text of the messages, with the header of the next answer if `for_answer`. Raise RenderError."""
        return self._template.apply(self.dialect.chat(messages), list(tools) or None, for_answer)

    def answers(self, messages: Messages, tools: Tools) -> list[Answer]:
        """Return each trained answer of the conversation. Raise RenderError: not-in-template, end-not-trained, or an
        error of the template itself."""
        found: list[Answer] = []
        for i, message in enumerate(messages):
            if message.role == "assistant" and message.weight:
                first_new = found[-1].message + 1 if found else -1
                found.append(self._answer(messages[: i + 1], tools, first_new))
        return found

    def _answer(self, messages: Messages, tools: Tools, first_new: int) -> Answer:
        """Return the last message as it is trained. The parts of messages before `first_new` have been looked for."""
        if tools or any(message.tool_calls or message.reasoning is not None for message in messages):
            skeleton = make_skeleton(messages, tools)
            shape: tuple[object, ...] = (repr(skeleton[:2]),)
            parts = skeleton[2]
        else:
            # Most rows have contents alone: this shape takes 0.25 us a message, a skeleton 5.6 us.
            shape = tuple((m.role, bool(m.weight), m.name, m.tool_call_id, m.content.strip() == "") for m in messages)
            parts, skeleton = [Part(i, "content", m.content, "") for i, m in enumerate(messages)], None
        frame = self._frames.get(shape)
        if frame is None:
            frame = self._frame(*(skeleton or make_skeleton(messages, tools)))
            if len(self._frames) < MAX_SHAPES:
                self._frames[shape] = frame
        prompt, text, behind = self._written(messages, tools, frame)
        for part in parts:
            if part.message >= first_new:
                thought = THOUGHT_BEFORE.match(part.value)  # templates drop a thought that stands in a content
                forms = _forms((thought[4] if thought else part.value).strip())
                _refuse_left_out(part, forms, messages, prompt, text)
        opened = OPEN_THOUGHT.search(prompt)
        begun = (f"<{opened[1]}>" if opened else "") + text
        is_empty = messages[-1].reasoning is None and EMPTY_THOUGHT.match(begun.lstrip()) is not None
        return Answer(len(messages) - 1, prompt, text, behind, is_empty)

    def _written(self, messages: Messages, tools: Tools, frame: Frame) -> tuple[str, str, str]:
        """Return the prompt of the last message, the message as it is trained, and the text after it."""
        chat = self.dialect.chat(messages)
        prompt, whole = self._template.texts(list(tools) or None, (chat[:-1], True), (chat, False))
        end = len(whole) - frame.behind
        if frame.header is not None:
            return prompt, self._behind_header(messages, tools, prompt, whole[:end], frame) + frame.end, ""
        if not whole.startswith(prompt):
            raise RenderError("not-in-template", "the template renders similar rows in another way: use another model")
        return prompt, whole[len(prompt) : end] + frame.end, "" if frame.end else whole[end:]

    def _behind_header(self, messages: Messages, tools: Tools, prompt: str, whole: str, frame: Frame) -> str:
        """Return an answer that the template does not write after its own prompt, as the model has to write it: the
        thought that the prompt leaves open comes first, and one that it has closed does not come again."""
        *before, own = messages
        if own.reasoning is None and self.dialect.reasoning_key:
            # GLM 4.7 and Nemotron 3 write no empty thought as their prompts open one, but a full one.
            probed = self.apply((*before, replace(own, reasoning=_PROBE)), tools, False)
            if probed.startswith(prompt + _PROBE):
                return probed[len(prompt + _PROBE) : len(probed) - frame.behind]
        # A text that itself holds the header is cut, so that its part is missed, and the row is refused.
        header = whole.rfind(frame.header) if frame.header else -1
        if not frame.header or header < 0:
            raise RenderError(
                "not-in-template",
                "the template changes the prompt of this answer once the answer is there: use another model",
            )
        text = whole[header + len(frame.header) :]
        if opened := OPEN_THOUGHT.search(prompt):
            text = re.sub(rf"\A(?:<{opened[1]}>\s*)+", "", text)
            closing = f"</{opened[1]}>"
            has_thought = closing in text and not text.lstrip().startswith(closing)
            # DeepSeek R1 drops the thoughts of all messages, yet its prompt asks for one. Whether one comes before a
            # call its template does not say: such a row is refused, since its thought is missed.
            if has_thought or (own.reasoning is not None and own.tool_calls):
                return text
            return f"{(own.reasoning or '').strip()}\n{closing}\n\n{_CLOSING.sub('', text)}"
        if not CLOSED_THOUGHT.search(prompt):
            return text
        if own.reasoning is not None:
            raise RenderError(
                "not-in-template",
                f"the template does not write the reasoning of message {len(messages)}: "
                "choose a model whose template does",
            )
        return _CLOSING.sub("", text)

    def _frame(self, messages: Messages, tools: Tools, parts: Sequence[Part]) -> Frame:
        """Return the frame of a skeleton that ends with an answer, after the check that all its parts are written."""
        own = [part.mark for part in parts if part.message == len(messages) - 1 and MARK.fullmatch(part.mark)]
        prompt, whole = self.apply(messages[:-1], tools, True), self.apply(messages, tools, False)
        start = _last_end(whole, own) or len(prompt)
        end = self._first_end(whole, start, len(whole)) or _last_end(whole, self._controls, start)
        frame = Frame(len(whole) - end, "", None)
        if not end:
            frame = Frame(len(whole) - start, self._next_end(messages, tools, own), None)
        opened = OPEN_THOUGHT.search(prompt) if messages[-1].reasoning is None else None
        # An answer without a thought may be written into the thought that its prompt opens.
        follows = opened is None or f"</{opened[1]}>" in MARK.split(whole[len(prompt) :], maxsplit=1)[0]
        if not whole.startswith(prompt) or not follows:
            header = OPEN_THOUGHT.sub("", CLOSED_THOUGHT.sub("", MARK.split(prompt)[-1]))
            frame = frame._replace(header=header)
        prompt, text, _ = self._written(messages, tools, frame)
        if self._first_end(text, 0, _last_end(text, MARK.findall(text))):
            raise RenderError(
                "not-in-template", "the template writes an end token inside the answer: use another model"
            )
        if set(MARK.findall(text)) - set(own):  # Gemma 4 and Apertus join two answers whose prompts they write apart
            raise RenderError("not-in-template", "the template writes an earlier message into the answer again")
        for part in parts:
            if MARK.fullmatch(part.mark):
                _refuse_left_out(part, (part.mark,), messages, prompt, text)
        return frame

    def _first_end(self, text: str, start: int, stop: int) -> int:
        """Return the offset just after the first end token between two offsets, or 0 if there is none."""
        # Of two that begin at one place the longer.
        found = [(place, -len(token)) for token in self._ends if (place := text.find(token, start, stop)) >= 0]
        return min(found)[0] - min(found)[1] if found else 0

    def _next_end(self, messages: Messages, tools: Tools, own: Sequence[str]) -> str:
        """Return the text up to the end token that the template writes only before a next message. Raise
        end-not-trained."""
        following, calls = Message("user", _PROBE), messages[-1].tool_calls
        if calls:
            following = Message("tool", _PROBE, name=calls[0]["function"]["name"], tool_call_id=calls[0].get("id"))
        text = self.apply((*messages, following), tools, False)
        start = _last_end(text, own)
        end = self._first_end(text, start, max(text.rfind(_PROBE), start))
        if not end:
            raise RenderError("end-not-trained")
        return text[start:end]


def make_skeleton(
    messages: Messages, tools: Tools
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...], Sequence[Part]]:
    """Return messages and tools with markers in place of contents, thoughts, function names, texts in arguments, and
    names and descriptions of tools; and the parts that these stand for. Rows of one shape have equal skeletons.

    Keys, numbers and ids are kept, and so is a text of white space alone, which templates drop. A key of arguments is
    its own marker.
    """
    parts: list[Part] = []

    def mark(message: int, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            parts.extend(Part(message, f"argument {str(key)[:_SHOWN_CHARS]!r}", str(key), str(key)) for key in value)
            return {key: mark(message, name, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [mark(message, name, item) for item in value]
        if not isinstance(value, str) or not value.strip():
            return value
        parts.append(Part(message, name, value, f"Xq{len(parts):05d}Xq"))
        return parts[-1].mark

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
    return tuple(marked), tuple(marked_tools), parts


def _refuse_left_out(part: Part, forms: Iterable[str], messages: Messages, prompt: str, text: str) -> None:
    """Raise RenderError if a part is in none of its forms where the template must write it: in the `text` of the last
    answer, or in its `prompt`.
    """
    is_own, message = part.message == len(messages) - 1, messages[part.message] if part.message >= 0 else None
    # Templates drop thoughts of earlier answers, and some drop more of them, which is trained where it is new.
    is_earlier = message is not None and message.role == "assistant" and not is_own
    if is_earlier and (messages[part.message].weight or part.name == "reasoning"):
        return
    written = text if is_own else prompt
    if not any(form in written for form in forms):
        raise RenderError("not-in-template", _left_out(part))


def _forms(value: str) -> Iterator[str]:
    """Yield a text unchanged, and as templates write it inside JSON, a Python text, HTML or quotes."""
    yield value
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield json.dumps(value)[1:-1]
    yield repr(value)[1:-1]
    yield html.escape(value)
    yield value.replace("'", "\\'")


def _last_end(text: str, tokens: Sequence[str], start: int = 0) -> int:
    """Return the offset just after the last of these tokens at or after `start`, or 0 if there is none."""
    return max((place + len(token) for token in tokens if (place := text.rfind(token, start)) >= 0), default=0)


def _left_out(part: Part) -> str:
    shown = repr(part.value.strip()[:_SHOWN_CHARS])
    if part.name in _WRITTEN_BY:
        # Without the place in the row, so that all rows with this remedy are one line of the report.
        name, models = _WRITTEN_BY[part.name]
        return f"the template has no place for {name}; take a model whose template has one (--model), such as {models}"
    return f"the template leaves out the {part.name} of message {part.message + 1} ({shown})"

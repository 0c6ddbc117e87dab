"""The views of a conversation: what is trained, and after which prompt, found once per shape on its skeleton.

A view is one sequence: the prompt of an answer as a server would render it, the answer, and its end token. If the
template leaves earlier turns unchanged, one view trains all answers. If it rewrites them (dropped thoughts, a moved
system prompt), each answer gets its own view.
"""

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hivetune.data.render.dialect import (
    CLOSED_THOUGHT,
    EMPTY_THOUGHT,
    OPEN_THOUGHT,
    THOUGHT_BEFORE,
    USER,
    find_dialect,
)
from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.records import Message

MARK = re.compile(r"Xq(\d{5})Xq")


# The skeleton of a conversation: the messages with a mark in place of each text, to see what a template does. If a mark
# is missing in the output, the template leaves out that part. Otherwise the row's text must be the skeleton's text with
# the parts in place of the marks; everything else comes from the template.


class Part(NamedTuple):
    """One text of a row: the number of its message (-1 for the tools), its name in words, and the text."""

    message: int
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Messages and tools with the mark of part i (see `mark_of`) in place of each text."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    parts: tuple[Part, ...]


def plain_shape(
    messages: Sequence[Message], tools: Sequence[Any]
) -> tuple[tuple[tuple[Any, ...], ...], tuple[Part, ...]] | None:
    """Return the shape of a row that has only texts, and its parts as `make_skeleton` numbers them; else None."""
    if tools:
        return None
    shape, parts = [], []
    for i, m in enumerate(messages):
        if m.tool_calls or m.reasoning is not None or (m.role == "assistant" and "</think>" in m.content):
            return None
        has_text = bool(m.content.strip())
        shape.append((m.role, m.weight, m.name, m.tool_call_id, None if has_text else m.content))
        if has_text:
            parts.append(Part(i, "content", m.content))
    return tuple(shape), tuple(parts)


def mark_of(number: int) -> str:
    return f"Xq{number:05d}Xq"


def make_skeleton(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Skeleton:
    """Mark contents, thoughts, function names, texts in arguments, and names and descriptions of tools.

    Keys, numbers and ids stay as they are, and so does white space alone, which templates drop.
    """
    parts: list[Part] = []

    def mark(message: int, name: str, value: str) -> str:
        if not value.strip():
            return value
        parts.append(Part(message, name, value))
        return mark_of(len(parts) - 1)

    def content(message: int, m: Message) -> str:
        thought_match = THOUGHT_BEFORE.match(m.content) if m.role == "assistant" and "</think>" in m.content else None
        if thought_match is None:
            return mark(message, "content", m.content)
        opening, thought, closing, answer = thought_match.groups()
        return opening + mark(message, "reasoning", thought) + closing + mark(message, "content", answer)

    def within(message: int, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return mark(message, name, value)
        if isinstance(value, Mapping):
            return {key: within(message, name, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [within(message, name, item) for item in value]
        return value

    new = []
    for i, m in enumerate(messages):
        calls = []
        for call in m.tool_calls:
            function = {**call["function"], "name": mark(i, "tool call", call["function"]["name"])}
            function["arguments"] = within(i, "argument of a tool call", function.get("arguments", {}))
            calls.append({**call, "function": function})
        new.append(
            replace(
                m,
                content=content(i, m),
                reasoning=None if m.reasoning is None else mark(i, "reasoning", m.reasoning),
                tool_calls=tuple(calls),
            )
        )
    marked_tools = []
    for tool in tools:
        inner = tool.get("function", tool)
        names = [key for key in ("name", "description") if isinstance(inner.get(key), str)]
        texts = {key: mark(-1, "tool", inner[key]) for key in names}
        marked_tools.append({**tool, "function": {**inner, **texts}} if "function" in tool else {**tool, **texts})
    return Skeleton(tuple(new), tuple(marked_tools), tuple(parts))


def marks_in(text: str) -> set[int]:
    return {int(number) for number in MARK.findall(text)}


def argument_keys(value: Any) -> Iterable[str]:
    """Yield every key inside of arguments."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from argument_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from argument_keys(item)


class Pattern:
    """The text of a skeleton, split at its marks: literal, part, literal, ..., literal."""

    def __init__(self, text: str):
        self.text = text
        self.literals: list[str] = []
        self.numbers: list[int] = []
        self.starts: list[int] = []  # of each literal in `text`
        position = 0
        for mark in MARK.finditer(text):
            self.literals.append(text[position : mark.start()])
            self.starts.append(position)
            self.numbers.append(int(mark.group(1)))
            position = mark.end()
        self.literals.append(text[position:])
        self.starts.append(position)

    def match(self, text: str, parts: Sequence[Part]) -> "Match | None":
        """Match `text` with this pattern and `parts` in their places, as they are or as templates write them."""
        if not text.startswith(self.literals[0]):
            return None
        position = len(self.literals[0])
        starts, forms = [0], list[str]()
        for i, number in enumerate(self.numbers):
            following = self.literals[i + 1]
            last = i + 1 == len(self.numbers)
            for form in _forms(parts[number].value if number < len(parts) else mark_of(number)):
                end = position + len(form)
                if not text.startswith(form, position) or not text.startswith(following, end):
                    continue
                if not last or end + len(following) == len(text):
                    break
            else:
                return Match(self, tuple(starts), tuple(forms), number)
            forms.append(form)
            starts.append(end)
            position = end + len(following)
        complete = position == len(text)
        return Match(self, tuple(starts), tuple(forms), None if complete else -1)


@dataclass(frozen=True, slots=True)
class Match:
    """A match: the start of each literal in the real text, and the form of each part there.

    `broken` is None, or the part after which the text differs from the skeleton's (-1: after the last one).
    """

    pattern: Pattern
    starts: tuple[int, ...]
    forms: tuple[str, ...]
    broken: int | None

    def place(self, position: int) -> int:
        """Return the place in the real text for a position in a literal of the skeleton."""
        literal = max(i for i, start in enumerate(self.pattern.starts) if start <= position)
        return self.starts[literal] + position - self.pattern.starts[literal]

    def fill(self, text: str, parts: Sequence[Part]) -> str:
        """Return another text with its marks replaced by the parts, as they are written here or in the row."""
        forms = dict(zip(self.pattern.numbers, self.forms, strict=True))

        def form(match: re.Match[str]) -> str:
            number = int(match.group(1))
            return forms[number] if number in forms else parts[number].value.strip("\n")

        return MARK.sub(form, text)


def _forms(value: str) -> Iterable[str]:
    """Yield the forms of a text in templates: unchanged, stripped, or inside of a JSON or Python string."""
    yield value
    for signs in (None, "\n"):
        yield from (value.strip(signs), value.lstrip(signs), value.rstrip(signs))
    for form in (value, value.strip()):
        yield json.dumps(form, ensure_ascii=False)[1:-1]
        yield json.dumps(form)[1:-1]
        yield repr(form)[1:-1]
        yield html.escape(form)
        yield form.replace("'", "\\'")


PROBED_THOUGHT = 99_999  # the mark of a thought that the row does not have
MAX_SHAPES = 1024  # of conversations, whose views are remembered
COMING = 99_998  # the mark of a message that would come next
_SHOWN_CHARS = 40
# Small models whose templates write what others leave out, and what to leave out with others.
_WRITTEN_BY = {
    "tool call": "Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B",
    "tool": "Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B",
    "reasoning": "Qwen/Qwen3-0.6B",
}


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """The characters [start, end) of an answer in a text of the skeleton, with its end token."""

    message: int
    start: int
    end: int


@dataclass(frozen=True)
class View:
    """One sequence, up to message `last`, an answer, with the `answers` that it trains.

    `rendered` is the text of messages[:last + 1]. If it begins with the prompt (`whole`), it is trained itself,
    followed by `tail` if the template writes no end token. Otherwise the prompt and `tail` are trained, with the answer
    as in `rendered`. `thought`: `rendered` has a thought that the row lacks and `tail` leaves out. `empty_thought`: the
    answer begins with an empty thought.
    """

    last: int
    answers: tuple[AnswerSpan, ...]
    prompt: Pattern
    rendered: Pattern
    whole: bool
    tail: str = ""
    thought: bool = False
    empty_thought: bool = False

    @property
    def cut(self) -> bool:
        """Return whether the template, not the row, writes the text at the border of prompt and last answer."""
        text, start = (self.rendered.text, self.answers[-1].start) if self.whole else (self.tail, 0)
        return MARK.match(text, start) is None


class SpokenTemplate:
    """One template with its dialect, and the views of the shapes of conversations that were seen.

    `ends` are the model's end tokens, `controls` all its control tokens. `melts(text, place)` returns whether one token
    has characters on both sides of a place.
    """

    def __init__(
        self,
        template: ChatTemplate,
        ends: Sequence[str],
        controls: Sequence[str],
        melts: Callable[[str, int], bool],
    ):
        self._template = template
        self._melts = melts
        self.dialect = find_dialect(template)
        self._ends = tuple(ends)
        self._controls = tuple(controls)
        self._views: dict[Any, tuple[View, ...]] = {}
        self.header = self.apply([Message("user", USER)], (), True).rpartition(USER)[2].strip()

    def apply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], for_answer: bool) -> str:
        return self._template.apply(self.dialect.chat(messages), list(tools) or None, for_answer)

    def prompt_and_whole(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Return the prompt of the last message, and the text of all messages."""
        return self._template.prompt_and_whole(self.dialect.chat(messages), list(tools) or None)

    def views(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[View, ...], tuple[Part, ...]]:
        """Return the views of a conversation, and its parts."""
        plain = plain_shape(messages, tools)
        if plain is not None and plain[0] in self._views:
            return self._views[plain[0]], plain[1]
        skeleton = make_skeleton(messages, tools)
        key = repr((skeleton.messages, skeleton.tools)) if plain is None else plain[0]
        views = self._views.get(key)
        if views is None:
            views = self._find(skeleton)
            if len(self._views) < MAX_SHAPES:
                self._views[key] = views
        return views, skeleton.parts

    def _find(self, skeleton: Skeleton) -> tuple[View, ...]:
        """Return the views in the order of their answers.

        Raise RenderError: not-in-template, end-not-trained, mask-disagreement, or an error of the template.
        """
        trained = [i for i, m in enumerate(skeleton.messages) if m.role == "assistant" and m.weight]
        views: list[View] = []
        view_of = {i: self._view(skeleton, i) for i in trained}
        waiting = list(trained)
        while waiting:
            view = view_of[waiting[-1]]
            text = view.prompt.text
            covered = tuple(a for i in waiting[:-1] for a in view_of[i].answers if self._fits(view_of[i], text))
            views.append(replace(view, answers=(*covered, *view.answers)))
            answered = {answer.message for answer in views[-1].answers}
            waiting = [i for i in waiting if i not in answered]
        for i, message in enumerate(skeleton.messages[: trained[-1]] if trained else ()):
            if message.role == "assistant" and i not in trained:  # it must be written too, except for its thoughts
                own_parts = {n for n, p in enumerate(skeleton.parts) if p.message == i and p.name != "reasoning"}
                text = self.apply(skeleton.messages[: i + 1], skeleton.tools, False)
                _raise_missing(skeleton, own_parts - marks_in(text))
        return tuple(reversed(views))

    def _fits(self, view: View, text: str) -> bool:
        """Return whether an answer is the same in a longer text as in its own view, and begins with a token."""
        answer = view.answers[-1]
        own_text = view.rendered.text[: answer.end] if view.whole else view.prompt.text + view.tail
        return text.startswith(own_text) and not (view.cut and self._melts(text, answer.start))

    def _view(self, skeleton: Skeleton, last: int) -> View:
        """Return the view of one answer."""
        own_parts = {n for n, part in enumerate(skeleton.parts) if part.message == last}
        prompt = self.apply(skeleton.messages[:last], skeleton.tools, True)
        new = self.apply(skeleton.messages[: last + 1], skeleton.tools, False)
        if marks_in(prompt) & own_parts:
            raise RenderError("mask-disagreement", "the prompt holds the answer")
        # An answer without a thought may be written into the thought that its prompt opens.
        opened = OPEN_THOUGHT.search(prompt) if skeleton.messages[last].reasoning is None else None
        begun = MARK.split(new[len(prompt) :], maxsplit=1)[0]
        if new.startswith(prompt) and (opened is None or f"</{opened.group(1)}>" in begun):
            end = self._end_in(new, _last_end(new, own_parts, len(prompt)))
            tail = ""
            if end is None:
                tail = self._next_end(skeleton, last, own_parts)
                new = (new.rstrip("\n") if tail else new) + tail
                end = len(new)
            empty = _opens_thought(new[len(prompt) : end], prompt) and skeleton.messages[last].reasoning is None
            answer = AnswerSpan(last, len(prompt), end)
            view = View(last, (answer,), Pattern(prompt), Pattern(new), True, tail, False, empty)
        else:
            view = self._composed(skeleton, last, prompt, new, own_parts)
        self._check_parts(skeleton, view, own_parts)
        return view

    def _composed(self, skeleton: Skeleton, last: int, prompt: str, new: str, own_parts: set[int]) -> View:
        """Return the view of an answer that the template does not write after its own prompt."""
        message = skeleton.messages[last]
        if message.reasoning is None and self.dialect.reasoning_key:
            thinking = (*skeleton.messages[:last], replace(message, reasoning=mark_of(PROBED_THOUGHT)))
            thought = self.apply(thinking, skeleton.tools, False)
            if thought.startswith(prompt + mark_of(PROBED_THOUGHT)):
                tail = thought[len(prompt) :].replace(mark_of(PROBED_THOUGHT), "")
                return self._behind(skeleton, last, prompt, thought, tail, thought=True, empty_thought=True)
        opened = OPEN_THOUGHT.search(prompt)
        if opened and new.startswith(prompt[: opened.start()]):
            body = re.sub(r"\A<([a-z_:]+)>\s*(</\1>\s*)?", "", new[opened.start() :])
            mark = next((mark_of(n) for n in own_parts if skeleton.parts[n].name == "reasoning"), "")
            tail = f"{mark}\n</{opened.group(1)}>\n\n{body.removeprefix(mark)}"
            return self._behind(skeleton, last, prompt, new, tail, empty_thought=not mark)
        closed = CLOSED_THOUGHT.search(prompt)
        if closed and new.startswith(prompt[: closed.start()]) and message.reasoning is None:
            return self._behind(skeleton, last, prompt, new, new[closed.start() :])
        if closed and message.reasoning is not None:
            raise RenderError(
                "not-in-template",
                f"the prompt of the template has no place for the reasoning of message {last + 1}: "
                "take a model whose template has one",
            )
        header, before = MARK.split(prompt)[-1], _literal_before(new, own_parts)
        if header and before is not None and before[1].startswith(header):
            return self._behind(skeleton, last, prompt, new, new[before[0] + len(header) :])
        raise RenderError("mask-disagreement", "the prompt that the template makes does not lead to this answer")

    def _behind(self, skeleton: Skeleton, last: int, prompt: str, rendered: str, tail: str, **thoughts: bool) -> View:
        own_parts = {n for n, part in enumerate(skeleton.parts) if part.message == last}
        end = self._end_in(tail, _last_end(tail, own_parts, 0))
        tail = tail[:end] if end is not None else tail.rstrip("\n") + self._next_end(skeleton, last, own_parts)
        answer = AnswerSpan(last, len(prompt), len(prompt) + len(tail))
        return View(last, (answer,), Pattern(prompt), Pattern(rendered), False, tail, **thoughts)

    def _end_in(self, text: str, start: int) -> int | None:
        """Return the end of the first end token from `start` on, else of the first control token, or None."""
        for tokens in (self._ends, self._controls):
            ends = [(start_of_end, -len(token)) for token in tokens if (start_of_end := text.find(token, start)) >= 0]
            if ends:
                start_of_end, negative = min(ends)
                return start_of_end - negative
        return None

    def _next_end(self, skeleton: Skeleton, last: int, own_parts: set[int]) -> str:
        """Return the end token that the template writes only before a next message. Raise end-not-trained."""
        message = skeleton.messages[last]
        if message.tool_calls:
            call = message.tool_calls[0]
            following = Message("tool", mark_of(COMING), name=call["function"]["name"], tool_call_id=call.get("id"))
        else:
            following = Message("user", mark_of(COMING))
        text = self.apply((*skeleton.messages[: last + 1], following), skeleton.tools, False)
        between = text[_last_end(text, own_parts, 0) : text.rfind(mark_of(COMING))]
        ends = [(position, -len(t), t) for t in self._ends if (position := between.find(t)) >= 0]
        if not ends:
            raise RenderError("end-not-trained")
        return min(ends)[2]

    def _check_parts(self, skeleton: Skeleton, view: View, own_parts: set[int]) -> None:
        """Check that the view has all parts of the answer and of what it answers. Raise not-in-template."""
        answer = view.rendered.text[view.answers[-1].start :] if view.whole else view.tail
        if any(0 <= answer.find(end) < _last_end(answer, own_parts, 0) for end in self._ends):
            raise RenderError("mask-disagreement", "the template writes an end token in the middle of the answer")
        missing = own_parts - marks_in(answer)
        in_prompt = marks_in(view.prompt.text)
        for n, part in enumerate(skeleton.parts):
            is_needed = part.message < view.last and (
                part.message < 0 or skeleton.messages[part.message].role != "assistant"
            )
            if is_needed and n not in in_prompt:
                missing.add(n)
        _raise_missing(skeleton, missing)
        calls = skeleton.messages[view.last].tool_calls
        keys = {key for call in calls for key in argument_keys(call["function"].get("arguments", {}))}
        unescaped = answer.encode("utf-8", "surrogatepass").decode("unicode_escape", "replace") if keys else ""
        lost = sorted(key for key in keys if key not in answer and key not in unescaped)
        if lost:
            raise RenderError("not-in-template", f"the template leaves out the argument {lost[0][:_SHOWN_CHARS]!r}")


def _raise_missing(skeleton: Skeleton, missing: set[int]) -> None:
    if not missing:
        return
    part = skeleton.parts[min(missing)]
    shown = repr(part.value.strip()[:_SHOWN_CHARS])
    if part.message < 0:
        hint = f"the template does not write the tools ({shown})"
    else:
        hint = f"the template leaves out the {part.name} of message {part.message + 1} ({shown})"
    if part.name in _WRITTEN_BY:
        hint += f"; take a model whose template has it (--model), such as {_WRITTEN_BY[part.name]}"
    raise RenderError("not-in-template", hint)


def _last_end(text: str, own_parts: set[int], start: int) -> int:
    """Return the end of the last mark of `own_parts` in `text`, at least `start`."""
    return max([start, *[mark.end() for mark in MARK.finditer(text) if int(mark.group(1)) in own_parts]])


def _literal_before(text: str, own_parts: set[int]) -> tuple[int, str] | None:
    """Return start and text of the part between the last foreign mark and the first mark of `own_parts`."""
    begin = 0
    for mark in MARK.finditer(text):
        if int(mark.group(1)) in own_parts:
            return begin, text[begin : mark.start()]
        begin = mark.end()
    return None


def _opens_thought(answer: str, prompt: str) -> bool:
    """Return whether the template put an empty thought before the answer."""
    begun = OPEN_THOUGHT.search(prompt)
    opening = f"<{begun.group(1)}>" if begun else ""
    return EMPTY_THOUGHT.match((opening + answer).lstrip()) is not None

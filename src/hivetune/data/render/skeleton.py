"""The skeleton of a conversation: the messages with a mark in place of each text, to see what a template does.

If a mark is missing in the output, the template leaves out that part. Otherwise the row's text must be the skeleton's
text with the parts in place of the marks; everything else comes from the template.
"""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hivetune.data.render.dialect import THOUGHT_BEFORE
from hivetune.records import Message

MARK = re.compile(r"Xq(\d{5})Xq")


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

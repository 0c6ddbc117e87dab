"""One question and its answer that a template wrote into one text, each below a header (`### Instruction:` and
`### Response:`, or `Question:` and `Answer:` in lines of their own or in one) or in a tag (`<question>..</question>`).
What was thought may stand between the two, or take the place of the answer.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from hivetune.data.pieces.rendered import is_marked, without_end
from hivetune.data.pieces.said import names
from hivetune.data.pieces.speakers import part_of, role_of

_Side = Literal["user", "assistant", "system", "thoughts"]

_Header = tuple[re.Match[str], _Side]

_NAME = r"([^\W\d_]+(?: [^\W\d_]+){0,2})"
_MARKED = re.compile(rf"(?:^|(?<=[\s>]))#{{2,4}} ?{_NAME} ?(?:[:\uff1a][ \t]*|[ \t]*$)", re.M)
_PLAIN = re.compile(rf"^[ \t]*{_NAME} ?[:\uff1a][ \t]*", re.M)
_INLINE = re.compile(rf"(?:\A[ \t]*|(?<=[.?!)\"'] )){_NAME} ?[:\uff1a][ \t]*")  # behind a sentence
_TAGGED = re.compile(r"\s*<(?:START_|BEGIN_)?([A-Za-z]{1,20})>(.*?)<(?:/|END_)\1>\s*", re.S)
_BEGIN = re.compile(r"\A(?:\s|<s>|<bos>|<\|begin_of_text\|>)+")
_END = re.compile(r"### ?End\s*\Z", re.I)
# What Alpaca's template says to every model.
_TO_EVERY_MODEL = re.compile(r"Below is an? (?:instruction|question)\b[^#]*", re.I)
_GIVEN = ("input", "table")  # what a question is about
_THOUGHT = names("thought thoughts reasoning rationale explanation analysis justification")
_KINDS: dict[str, _Side] = {"asked": "user", "given": "user", "answered": "assistant", "system": "system"}


def headed_turns(text: str) -> list[dict[str, Any]] | None:
    """The turns of a text in which one question and one answer stand below their headers; None for any other text."""
    text = _BEGIN.sub("", text)
    if text.startswith("<"):
        return _in_tags(text)
    marked = "##" in text and _MARKED.search(text) is not None
    if not marked and not _PLAIN.match(text):
        return None
    pattern = _MARKED if marked else _PLAIN if "\n" in text.strip() else _INLINE
    found = [(match, kind) for match in pattern.finditer(text) if (kind := _kind(match.group(1), marked)) is not None]
    found = _with_thoughts(found)
    if not _are_one_pair([(match.group(1), kind) for match, kind in found]):
        return None
    before = text[: found[0][0].start()].strip()
    if before and (not marked or before.startswith("#")):
        return None  # a document that has a question in it
    ends = [match.start() for match, _ in found[1:]] + [len(text)]
    begins = [_begin(match, kind, marked) for match, kind in found]
    said = [(kind, text[i:end].strip()) for (_, kind), i, end in zip(found, begins, ends, strict=True)]
    told = [] if _TO_EVERY_MODEL.fullmatch(before) else [before]
    return _turns([*(("system", piece) for piece in told), *said])


def _in_tags(text: str) -> list[dict[str, Any]] | None:
    """The turns of a text that is nothing but tags with a question and its answer in them."""
    named: list[tuple[str, _Side]] = []
    said: list[tuple[_Side, str]] = []
    end = 0
    while end < len(text):
        match = _TAGGED.match(text, end)
        kind = _kind(match.group(1), True) if match is not None else None
        if match is None or kind is None:
            return None
        named.append((match.group(1), kind))
        said.append((kind, match.group(2).strip()))
        end = match.end()
    return _turns(said) if _are_one_pair(named) else None


def _turns(said: Sequence[tuple[_Side, str]]) -> list[dict[str, Any]] | None:
    system = _joined([piece for kind, piece in said if kind == "system"])
    asked = _joined([piece for kind, piece in said if kind == "user"])
    answer = without_end(_END.sub("", said[-1][1]).rstrip(), asked).strip()
    turns = [("system", system)] if system else []
    turns += [("user", asked), ("assistant", answer)]
    if any(not piece or is_marked(piece) for _, piece in turns):
        return None
    thoughts = _joined([piece for kind, piece in said if kind == "thoughts"])
    told = [{"role": role, "content": piece} for role, piece in turns]
    return [*told[:-1], {**told[-1], "reasoning_content": thoughts}] if thoughts else told


def _with_thoughts(headers: Sequence[_Header]) -> list[_Header]:
    """The headers of a question and its answer, with the only one of thoughts between the two; where an answer has no
    header of its own, or thinks several times, it begins with the first of those behind the question.
    """
    others = [header for header in headers if header[1] != "thoughts"]
    thought = [i for i, (_, kind) in enumerate(headers) if kind == "thoughts"]
    asked = [i for i, (_, kind) in enumerate(headers) if kind == "user"]
    answered = [i for i, (_, kind) in enumerate(headers) if kind == "assistant"]
    if not thought or not asked or thought[0] < asked[-1] or (answered and answered[0] < thought[0]):
        return others
    if len(thought) == len(answered) == 1:
        return list(headers)
    return [*headers[: thought[0]], (headers[thought[0]][0], "assistant")]


def _begin(match: re.Match[str], kind: _Side, marked: bool) -> int:
    """Where the words below a header begin: `table:` in front of what a question is about is one of them, and
    `Reasoning:` at the beginning of an answer.
    """
    name = match.group(1)
    given = not marked and (name.lower() == "table" or part_of(name) == "given")
    return match.start() if given or (kind == "assistant" and _thinks(name)) else match.end()


def _are_one_pair(headers: Sequence[tuple[str, _Side]]) -> bool:
    """Whether headers of these names and kinds are those of one question and, at the end, of its answer."""
    kinds = [kind for _, kind in headers]
    alike = len({name.lower() for name, _ in headers}) < len(headers)
    return kinds.count("assistant") == 1 and kinds[-1] == "assistant" and "user" in kinds and not alike


def _joined(pieces: Sequence[str]) -> str:
    return "\n".join(piece for piece in pieces if piece)


def _thinks(name: str) -> bool:
    return name.strip().lower() in _THOUGHT


def _kind(name: str, marked: bool) -> _Side | None:
    """Whose words stand below a header of this name. Without marks a party's name begins what it said in a talk."""
    if _thinks(name):
        return "thoughts"
    role = None if name.lower() == "response" else role_of(name)  # a header of Alpaca's template, and no speaker
    if role is not None:
        return role if marked and role != "tool" else None
    return "user" if name.lower() in _GIVEN else _KINDS.get(part_of(name))

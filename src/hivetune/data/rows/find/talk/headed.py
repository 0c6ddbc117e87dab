"""One question and its answer that a template wrote into one text, each below a header: `### Instruction:` and
`### Response:`, or `Question:` and `Answer:` at the beginning of a line.
"""

import re
from typing import Any, Literal

from hivetune.data.rows.find.names import part_of, role_of
from hivetune.data.rows.sessions.rendered import is_marked, without_end

Kind = Literal["user", "assistant", "system"]

_NAME = r"([^\W\d_]+(?: [^\W\d_]+){0,2})"
_MARKED = re.compile(rf"(?:^|(?<=[\s>]))#{{2,4}} ?{_NAME} ?(?:[:\uff1a][ \t]*|[ \t]*$)", re.M)
_PLAIN = re.compile(rf"^[ \t]*{_NAME} ?[:\uff1a][ \t]*", re.M)
_BEGIN = re.compile(r"\A(?:\s|<s>|<bos>|<\|begin_of_text\|>)+")
_END = re.compile(r"\s*### ?End\s*\Z", re.I)
# What Alpaca's template says to every model.
_TO_EVERY_MODEL = re.compile(r"Below is an? (?:instruction|question)\b[^#]*", re.I)
_KINDS: dict[str, Kind] = {"asked": "user", "given": "user", "answered": "assistant", "system": "system"}


def headed_turns(text: str) -> list[dict[str, Any]] | None:
    """The turns of a text in which one question and one answer stand below their headers; None for any other text."""
    text = _BEGIN.sub("", text)
    marked = _MARKED.search(text) is not None
    pattern = _MARKED if marked else _PLAIN
    found = [(match, kind) for match in pattern.finditer(text) if (kind := _kind(match.group(1), marked)) is not None]
    kinds = [kind for _, kind in found]
    if kinds.count("assistant") != 1 or kinds[-1] != "assistant" or "user" not in kinds:
        return None
    if len({match.group(1).lower() for match, _ in found}) < len(found):
        return None  # two questions
    before = text[: found[0][0].start()].strip()
    if before and (not marked or before.startswith("#")):
        return None  # a document that has a question in it
    ends = [match.start() for match, _ in found[1:]] + [len(text)]
    said = [(kind, text[match.end() : end].strip()) for (match, kind), end in zip(found, ends, strict=True)]
    told = [before] if before and not _TO_EVERY_MODEL.fullmatch(before) else []
    system = "\n".join([*told, *(piece for kind, piece in said if kind == "system")])
    asked = "\n".join(piece for kind, piece in said if kind == "user" and piece)
    answer = without_end(_END.sub("", said[-1][1]), asked).strip()
    if not asked or not answer or any(map(is_marked, (system, asked, answer))):
        return None
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _kind(name: str, marked: bool) -> Kind | None:
    """Whose words stand below a header of this name. Without marks a party's name begins what it said in a talk."""
    role = role_of(name)
    if role is not None:
        return role if marked and role != "tool" else None
    return "user" if name.lower() == "input" else _KINDS.get(part_of(name))

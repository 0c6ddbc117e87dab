"""A conversation that was written as one text: lines that begin with who speaks (`Customer: ..`, `[Agent]: ..`)."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from hivetune.data.columns import ANSWERED, CONTENT, CONTEXT, QUESTIONS, SPEAKERS, SYSTEM, THOUGHTS, TRUE_ANSWERS
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.rendered import is_marked, spoken_turns, turns_of, without_end
from hivetune.data.pieces.said import names, parsed
from hivetune.data.pieces.turns import ROLES
from hivetune.records import Role

Turns = list[dict[str, Any]]

_SPEAKER = re.compile(
    r"^[ \t]*[\[(<*#]{0,3} ?([^\W\d][\w .-]{0,24}?)[\])>*]{0,3}[ \t]?[:\uff1a][\])>*]{0,3}[ \t]*", re.M
)
# Between the turns of two people, in sets of dialogues that name nobody.
_END_OF_UTTERANCE = re.compile(r"__eou__|__eot__|<eou>|<EOS>|\[EOU\]|<\|eou\|>|\[EOT\]")
# As trainers of DialoGPT write a conversation: the weight of each turn, maybe with who speaks and its number.
_WEIGHTED = re.compile(r"\s*([01])\.\d+ (?:([01]) \d+ )?")
_END_OF_WEIGHTED = re.compile(r" EOS\b|\t")
_ROLE_LINE = re.compile(r"^(?:Human|User|USER) ?:", re.M)
_TO_A_MODEL = re.compile(r"you(?:'re| are| act| will)\b|act as\b", re.I)
_SPEAK = ("user", "assistant", "system")
_MIN_SPOKEN = 2


def turns_in_text(text: str) -> Turns | None:
    """Return the turns of a text that begins with a speaker, or has a question and its answer below headers; None for
    any other text.
    """
    rounds = ended_rounds(text) if END in text else None
    if rounds or (END in text and GAVE_BACK in text):
        return rounds  # what a function gave back is nobody's words
    rendered = turns_of(text, whole=True) if is_marked(text) else None
    return rendered or _spoken_lines(text) or _headed_turns(text)


def _spoken_lines(text: str) -> Turns | None:
    """Return the turns of a text that begins with a speaker; None for any other text, and where a line may be
    somebody's words and no speaker: two sides have to take turns, unless every line names its speaker.
    """
    if _WEIGHTED.match(text):
        return _weighted(text)
    if _END_OF_UTTERANCE.search(text):
        texts = [texts for piece in _END_OF_UTTERANCE.split(text) if (texts := piece.strip())]
        turns = [{"role": ("user", "assistant")[i % 2], "content": piece} for i, piece in enumerate(texts)]
        return turns if len(texts) >= _MIN_SPOKEN else None  # who begins is the one who asks
    lines = [(match, role_of(match.group(1))) for match in _SPEAKER.finditer(text)]
    speakers = [(match, role) for match, role in lines if role in _SPEAK]
    others = Counter(match.group(1) for match, role in lines if role not in _SPEAK)
    if any(count > 1 or role_of(name) == "tool" for name, count in others.items()):
        return None  # somebody else may speak too
    if len(speakers) < _MIN_SPOKEN or text[: speakers[0][0].start()].strip():
        return spoken_turns(text) or None
    ends = [match.start() for match, _ in speakers[1:]] + [len(text)]
    texts = [without_end(text[m.end() : end].strip(), "").strip() for (m, _), end in zip(speakers, ends, strict=True)]
    roles = [role for _, role in speakers]
    talk = roles[1:] if roles[0] == "system" else roles
    each_line_speaks = sum(bool(line.strip()) for line in text.splitlines()) == len(speakers)
    in_turn = each_line_speaks or all(first != second for first, second in pairwise(talk))
    if not all(texts) or set(talk) != {"user", "assistant"} or not in_turn:
        return None
    return [{"role": role, "content": piece} for role, piece in zip(roles, texts, strict=True)]


def turns_behind_system(text: str) -> Turns | None:
    """Return the turns of a text that begins with a system prompt: one paragraph, or words to a model."""
    first = _ROLE_LINE.search(text)
    lead = text[: first.start()].strip() if first is not None else ""
    turns = spoken_turns(text[first.start() :]) if first is not None and lead else None
    if not turns or turns[-1]["role"] != "assistant" or not turns[-1]["content"]:
        return None
    return [{"role": "system", "content": lead}, *turns] if "\n\n" not in lead or _TO_A_MODEL.match(lead) else None


def _weighted(text: str) -> Turns | None:
    """Return the turns of a text with a weight for each turn. The last speaker is the assistant. Of consecutive turns
    the last weight counts. None for other texts.
    """
    pieces = [piece for piece in _END_OF_WEIGHTED.split(text) if piece.strip()]
    marks = [mark for piece in pieces if (mark := _WEIGHTED.match(piece)) is not None]
    if len(marks) < len(pieces) or len(pieces) < _MIN_SPOKEN or len({mark.group(2) is None for mark in marks}) > 1:
        return None
    sides = [mark.group(2) or str((len(marks) - i) % 2) for i, mark in enumerate(marks)]
    turns: Turns = []
    for side, piece, mark in zip(sides, pieces, marks, strict=True):
        turn: dict[str, Any] = {"role": "user", "content": piece[mark.end() :].strip()}
        if side == sides[-1]:
            turn |= {"role": "assistant", "weight": int(mark.group(1))}
        if turns and turns[-1]["role"] == turn["role"]:  # a template has no place for two answers
            turn["content"] = f"{turns.pop()['content']}\n\n{turn['content']}"
        turns.append(turn)
    return turns


# One question and its answer that a template wrote into one text, each below a header (`### Instruction:` and
# `### Response:`, or `Question:` and `Answer:` in lines of their own or in one) or in a tag
# (`<question>..</question>`).
# What was thought may stand between the two, or take the place of the answer.

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
_CONTEXT_NAMES = ("input", "table")  # what a question is about
_THOUGHT = names("thought thoughts reasoning rationale explanation analysis justification")
_KINDS: dict[str, _Side] = {"asked": "user", "given": "user", "answered": "assistant", "system": "system"}


def _headed_turns(text: str) -> Turns | None:
    """Return the turns of a text in which one question and one answer stand below their headers; None for any other
    text.
    """
    text = _BEGIN.sub("", text)
    if text.startswith("<"):
        return _in_tags(text)
    marked = "##" in text and _MARKED.search(text) is not None
    if not marked and not _PLAIN.match(text):
        return None
    pattern = _MARKED if marked else _PLAIN if "\n" in text.strip() else _INLINE
    headers = [(match, kind) for match in pattern.finditer(text) if (kind := _kind(match.group(1), marked)) is not None]
    headers = _with_thoughts(headers)
    if not _are_one_pair([(match.group(1), kind) for match, kind in headers]):
        return None
    before = text[: headers[0][0].start()].strip()
    if before and (not marked or before.startswith("#")):
        return None  # a document that has a question in it
    pieces: list[tuple[_Side, str]] = [] if _TO_EVERY_MODEL.fullmatch(before) else [("system", before)]
    for (match, kind), end in zip(headers, [match.start() for match, _ in headers[1:]] + [len(text)], strict=True):
        # `table:` in front of what a question is about is one of its words, and `Reasoning:` of an answer.
        name = match.group(1)
        is_context = not marked and (name.lower() == "table" or part_of(name) == "given")
        is_word = is_context or (kind == "assistant" and name.strip().lower() in _THOUGHT)
        pieces.append((kind, text[match.start() if is_word else match.end() : end].strip()))
    return _turns(pieces)


def _in_tags(text: str) -> Turns | None:
    """Return the turns of a text that consists of tags around a question and its answer."""
    named: list[tuple[str, _Side]] = []
    pieces: list[tuple[_Side, str]] = []
    end = 0
    while end < len(text):
        match = _TAGGED.match(text, end)
        kind = _kind(match.group(1), True) if match is not None else None
        if match is None or kind is None:
            return None
        named.append((match.group(1), kind))
        pieces.append((kind, match.group(2).strip()))
        end = match.end()
    return _turns(pieces) if _are_one_pair(named) else None


def _turns(pieces: Sequence[tuple[_Side, str]]) -> Turns | None:
    parts = {side: "\n".join(piece for kind, piece in pieces if kind == side and piece) for side, _ in pieces}
    answer = without_end(_END.sub("", pieces[-1][1]).rstrip(), parts["user"]).strip()
    turns = [("system", parts["system"])] if parts.get("system") else []
    turns += [("user", parts["user"]), ("assistant", answer)]
    if any(not piece or is_marked(piece) for _, piece in turns):
        return None
    messages = [{"role": role, "content": piece} for role, piece in turns]
    if parts.get("thoughts"):
        messages[-1]["reasoning_content"] = parts["thoughts"]
    return messages


def _with_thoughts(headers: Sequence[_Header]) -> list[_Header]:
    """Return the headers of a question and its answer, with the only one of thoughts between the two; where an answer
    has no header of its own, or thinks several times, it begins with the first of those after the question.
    """
    thought, questions, answered = (
        [i for i, (_, kind) in enumerate(headers) if kind == side] for side in ("thoughts", "user", "assistant")
    )
    if not thought or not questions or thought[0] < questions[-1] or (answered and answered[0] < thought[0]):
        return [header for header in headers if header[1] != "thoughts"]
    if len(thought) == len(answered) == 1:
        return list(headers)
    return [*headers[: thought[0]], (headers[thought[0]][0], "assistant")]


def _are_one_pair(headers: Sequence[tuple[str, _Side]]) -> bool:
    """Return whether headers of these names and kinds are those of one question and, at the end, of its answer."""
    kinds = [kind for _, kind in headers]
    alike = len({name.lower() for name, _ in headers}) < len(headers)
    return kinds.count("assistant") == 1 and kinds[-1] == "assistant" and "user" in kinds and not alike


def _kind(name: str, marked: bool) -> _Side | None:
    """Return the party whose text follows a header of this name. Without marks a party's name begins what it said in a
    talk.
    """
    if name.strip().lower() in _THOUGHT:
        return "thoughts"
    role = None if name.lower() == "response" else role_of(name)  # a header of Alpaca's template, and no speaker
    if role is not None:
        return role if marked and role != "tool" else None
    return "user" if name.lower() in _CONTEXT_NAMES else _KINDS.get(part_of(name))


# Who speaks and what stands below a header, by the exact names of columns.toml.

_PARTS = {
    "asked": frozenset(("q", *QUESTIONS)),
    "answered": frozenset((*ANSWERED, *TRUE_ANSWERS)),
    "system": frozenset(SYSTEM),
    "thoughts": frozenset(THOUGHTS),
    "given": CONTENT.union(CONTEXT),
}


@lru_cache(8192)
def role_of(name: str) -> Role | None:
    """Return the role of a speaker: `Human`, `ROLE_USER`, `Customer`; None for an unknown name."""
    plain = plain_name(name).removeprefix("role_")
    speaker_role = next((role for role, names in SPEAKERS.items() if plain in names), None)
    return speaker_role or ROLES.get(plain)


@lru_cache(4096)
def part_of(name: str) -> str:
    """Return the party of a header such as `Question 3` or `Final Answer`."""
    plain = plain_name(name.rstrip("0123456789 ")).removeprefix("final_")
    return next((part for part, names in _PARTS.items() if plain in names), "unknown")


# A conversation as one text in which a mark ends each answer, and functions are called (Glaive's sets of calls).

END = "<|endoftext|>"
GAVE_BACK = "FUNCTION RESPONSE: "
_ROUND = re.compile(r"\s*(USER|FUNCTION RESPONSE): (.*?)\sASSISTANT: ?(.*)", re.S)
_PARTY = re.compile(r"^(?:USER|ASSISTANT|FUNCTION RESPONSE): ", re.M)
_CALL = re.compile(r"\s*\{\s*\"name\":\s*\"([^\"]+)\",\s*\"arguments\":\s*(?:'(.*)'|(\{.*\}))\s*\}", re.S)


def ended_rounds(text: str) -> Turns | None:
    """Return the turns of a talk in rounds; None for other texts, or if a line may be text or speaker."""
    turns: Turns = []
    for piece in filter(str.strip, text.split(END)):
        if (match := _ROUND.match(piece)) is None:
            return None
        question, reply = match.group(2).rstrip(), match.group(3).rstrip()
        content, calls, call = reply.partition("<functioncall>")
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:  # a call at its end, which has to be JSON
            called = _CALL.fullmatch(call)
            arguments = parsed((called.group(2) or called.group(3)).replace("\\'", "'")) if called else None
            if called is None or not isinstance(arguments, dict):
                return None
            function = {"name": called.group(1), "arguments": arguments}
            answer |= {"content": content.strip(), "tool_calls": [{"type": "function", "function": function}]}
        if _PARTY.search(question) or _PARTY.search(reply):
            return None
        turns += [{"role": "user" if match.group(1) == "USER" else "tool", "content": question}, answer]
    return turns if turns and turns[0]["role"] == "user" else None

"""A conversation that was written as one text: lines that begin with who speaks (`Customer: ..`, `[Agent]: ..`)."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hivetune.data.pieces.headed import headed_turns
from hivetune.data.pieces.rendered import is_marked, spoken_turns, turns_of, without_end
from hivetune.data.pieces.rounds import END, GAVE_BACK, ended_rounds
from hivetune.data.pieces.speakers import role_of
from hivetune.records import Role

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


def turns_in_text(text: str) -> list[dict[str, Any]] | None:
    """The turns of a text that begins with a speaker, or has a question and its answer below headers; None for any
    other text.
    """
    rounds = ended_rounds(text) if END in text else None
    if rounds or (END in text and GAVE_BACK in text):
        return rounds  # what a function gave back is nobody's words
    rendered = turns_of(text, whole=True) if ("<" in text or "[" in text) and is_marked(text) else None
    return rendered or _spoken_lines(text) or headed_turns(text)


def _spoken_lines(text: str) -> list[dict[str, Any]] | None:
    """The turns of a text that begins with a speaker; None for any other text, and where a line may be somebody's words
    and no speaker: two sides have to take turns, unless every line names its speaker.
    """
    if _WEIGHTED.match(text):
        return _weighted(text)
    if _END_OF_UTTERANCE.search(text):
        said = [said for piece in _END_OF_UTTERANCE.split(text) if (said := piece.strip())]
        return _in_turn(said) if len(said) >= _MIN_SPOKEN else None
    lines = [(match, role_of(match.group(1))) for match in _SPEAKER.finditer(text)]
    found = [(match, role) for match, role in lines if role in _SPEAK]
    others = Counter(match.group(1) for match, role in lines if role not in _SPEAK)
    if any(count > 1 or role_of(name) == "tool" for name, count in others.items()):
        return None  # somebody else may speak too
    if len(found) < _MIN_SPOKEN or text[: found[0][0].start()].strip():
        return spoken_turns(text) or None
    ends = [match.start() for match, _ in found[1:]] + [len(text)]
    said = [without_end(text[m.end() : end].strip(), "").strip() for (m, _), end in zip(found, ends, strict=True)]
    roles: list[Role] = [role for _, role in found if role is not None]
    each_line_speaks = sum(bool(line.strip()) for line in text.splitlines()) == len(found)
    if not all(said) or not _take_turns(roles, each_line_speaks):
        return None
    return [{"role": role, "content": piece} for role, piece in zip(roles, said, strict=True)]


def turns_behind_system(text: str) -> list[dict[str, Any]] | None:
    """The same of any text: what stands in front has to be one paragraph, or to speak to a model."""
    turns = turns_behind_words(text)
    told = turns[0]["content"] if turns else ""
    is_system = "\n\n" not in told or _TO_A_MODEL.match(told)
    return turns if turns and turns[-1]["role"] == "assistant" and turns[-1]["content"] and is_system else None


def turns_behind_words(text: str) -> list[dict[str, Any]] | None:
    """The turns of a conversation in one text that begins with words to both sides: they are its system prompt."""
    first = _ROLE_LINE.search(text)
    turns = spoken_turns(text[first.start() :]) if first is not None and text[: first.start()].strip() else None
    return [{"role": "system", "content": text[: first.start()].strip()}, *turns] if first and turns else None


def _weighted(text: str) -> list[dict[str, Any]] | None:
    """The turns of a text in which each has its weight; who gave the last one answers, and of turns in a row the last
    one's weight counts. None for any other text.
    """
    pieces = [piece for piece in _END_OF_WEIGHTED.split(text) if piece.strip()]
    marks = [_WEIGHTED.match(piece) for piece in pieces]
    found = [mark for mark in marks if mark is not None]
    if len(found) < len(pieces) or len(pieces) < _MIN_SPOKEN or len({mark.group(2) is None for mark in found}) > 1:
        return None
    sides = [mark.group(2) or str((len(found) - i) % 2) for i, mark in enumerate(found)]
    turns: list[dict[str, Any]] = []
    for side, piece, mark in zip(sides, pieces, found, strict=True):
        said = piece[mark.end() :].strip()
        turn: dict[str, Any] = {"role": "user", "content": said}
        if side == sides[-1]:
            turn = {"role": "assistant", "content": said, "weight": int(mark.group(1))}
        if turns and turns[-1]["role"] == turn["role"]:  # a template has no place for two answers
            turn["content"] = f"{turns.pop()['content']}\n\n{said}"
        turns.append(turn)
    return turns


def _in_turn(said: Sequence[str]) -> list[dict[str, str]]:
    """Two people speak in turn: who begins is the one who asks."""
    return [{"role": ("user", "assistant")[i % 2], "content": piece} for i, piece in enumerate(said)]


def _take_turns(roles: Sequence[Role], each_line_speaks: bool) -> bool:
    spoken = roles[1:] if roles[0] == "system" else roles
    if set(spoken) != {"user", "assistant"}:
        return False
    return each_line_speaks or all(first != second for first, second in pairwise(spoken))

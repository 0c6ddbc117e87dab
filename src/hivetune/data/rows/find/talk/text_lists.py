"""Turns in a list that are bare texts: each behind who speaks, or in pairs of a question and its answer."""

import re
from collections.abc import Sequence
from typing import Any

from hivetune.data.pieces.said import are_two_texts, listed

_NAMED = re.compile(r"\A\s*[\[(<*]*([^\W\d][\w .-]{0,30}?)[\])>*]*\s?[:\uff1a]\s*(.*)\Z", re.S)
_IN_BRACKETS = re.compile(r"\A\s*[\[\u3010]([^\W\d]\w{0,30})[\]\u3011]\s*(.*)\Z", re.S)

_ASKS = re.compile(
    r"\A\s*(?:who|whom|whose|what|when|where|why|which|how|can|could|do|does|did|is|are|will|would|should|may|must)\b"
    r"|[?\uff1f]\s*\Z",
    re.I,
)


def speaker_and_text(text: str) -> tuple[str, str] | None:
    """(who speaks, what is said) of a text that begins with a name and a colon, or with a name in brackets."""
    found = _NAMED.match(text) if not text.lstrip().startswith(("[", "\u3010")) else None
    found = found or _IN_BRACKETS.match(text) or _NAMED.match(text)
    return (found.group(1), found.group(2)) if found else None


def asked_pairs(value: Any) -> list[dict[str, str]]:
    """The rows of a list of pairs of a question and its answer, as most of them look; empty for anything else."""
    pairs = listed(value)
    if not all(map(are_two_texts, pairs)):
        return []
    asked = sum(bool(_ASKS.search(question)) and not _ASKS.search(answer) for question, answer in pairs)
    return [{"question": pair[0], "answer": pair[1]} for pair in pairs] if 2 * asked > len(pairs) else []


def rounds(value: Sequence[Any]) -> list[dict[str, str]] | None:
    """The turns of pairs of a question and its answer, as ChatGLM keeps what was said; None for any other list."""
    if not all(map(are_two_texts, value)):
        return None
    sides = zip(("user", "assistant") * len(value), [text for item in value for text in item], strict=True)
    return [{"role": role, "content": text} for role, text in sides]

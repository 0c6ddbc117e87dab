"""A conversation as one text in which a mark ends each answer, and functions are called (Glaive's sets of calls)."""

import re
from typing import Any

from hivetune.data.pieces.said import parsed

END = "<|endoftext|>"
GAVE_BACK = "FUNCTION RESPONSE: "
_ROUND = re.compile(r"\s*(USER|FUNCTION RESPONSE): (.*?)\sASSISTANT: ?(.*)", re.S)
_ROLES = {"USER": "user", "FUNCTION RESPONSE": "tool"}
_SPEAKER = re.compile(r"^(?:USER|ASSISTANT|FUNCTION RESPONSE): ", re.M)
_CALL = re.compile(r"\s*\{\s*\"name\":\s*\"([^\"]+)\",\s*\"arguments\":\s*(?:'(.*)'|(\{.*\}))\s*\}", re.S)


def ended_rounds(text: str) -> list[dict[str, Any]] | None:
    """The turns of such a text; None for any other, and where somebody's words look like a speaker."""
    turns: list[dict[str, Any]] = []
    for piece in text.split(END):
        if not piece.strip():
            continue
        found = _ROUND.match(piece)
        if found is None:
            return None
        asked, said = found.group(2).rstrip(), found.group(3).rstrip()
        answer = _answer(said)
        if answer is None or _SPEAKER.search(asked) or _SPEAKER.search(said):
            return None
        turns += [{"role": _ROLES[found.group(1)], "content": asked}, answer]
    return turns if turns and turns[0]["role"] == "user" else None


def _answer(text: str) -> dict[str, Any] | None:
    """An answer, with the call at its end; None where that is no JSON."""
    words, begins, call = text.partition("<functioncall>")
    if not begins:
        return {"role": "assistant", "content": text}
    found = _CALL.fullmatch(call)
    arguments = parsed((found.group(2) or found.group(3)).replace("\\'", "'")) if found else None
    if found is None or not isinstance(arguments, dict):
        return None
    called = {"type": "function", "function": {"name": found.group(1), "arguments": arguments}}
    return {"role": "assistant", "content": words.strip(), "tool_calls": [called]}

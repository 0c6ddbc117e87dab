"""A conversation as one text in which a mark ends each answer, and functions are called (Glaive's sets of calls)."""

import re
from typing import Any

from hivetune.data.rows.layouts.said import parsed

END = "<|endoftext|>"
GAVE_BACK = "FUNCTION RESPONSE: "
_ROUND = re.compile(r"\s*(USER|FUNCTION RESPONSE): (.*?)\s+ASSISTANT: ?(.*?)\s*\Z", re.S)
_ROLES = {"USER": "user", "FUNCTION RESPONSE": "tool"}
_SPEAKER = re.compile(r"^(?:USER|ASSISTANT|FUNCTION RESPONSE): ", re.M)
_CALL = re.compile(
    r"<functioncall>\s*\{\s*\"name\":\s*\"([^\"]+)\",\s*\"arguments\":\s*(?:'(.*)'|(\{.*\}))\s*\}\s*\Z", re.S
)


def ended_rounds(text: str) -> list[dict[str, Any]] | None:
    """The turns of such a text; None for any other, and where somebody's words look like a speaker."""
    turns: list[dict[str, Any]] = []
    for piece in text.split(END):
        if not piece.strip():
            continue
        found = _ROUND.match(piece)
        if found is None or any(map(_SPEAKER.search, found.groups()[1:])):
            return None
        answer = _answer(found.group(3))
        if answer is None:
            return None
        turns += [{"role": _ROLES[found.group(1)], "content": found.group(2)}, answer]
    return turns if turns and turns[0]["role"] == "user" else None


def _answer(text: str) -> dict[str, Any] | None:
    """An answer, with the call at its end; None where that is no JSON."""
    if "<functioncall>" not in text:
        return {"role": "assistant", "content": text}
    found = _CALL.search(text)
    arguments = parsed((found.group(2) or found.group(3)).replace("\\'", "'")) if found else None
    if found is None or not isinstance(arguments, dict):
        return None
    call = {"type": "function", "function": {"name": found.group(1), "arguments": arguments}}
    return {"role": "assistant", "content": text[: found.start()].strip(), "tool_calls": [call]}

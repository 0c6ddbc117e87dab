"""A conversation that was written as one text: lines that begin with who speaks (`Customer: ..`, `[Agent]: ..`)."""

import re
from collections import Counter
from itertools import pairwise

from hivetune.data.rows.find.names import role_of
from hivetune.data.rows.sessions.rendered import spoken_turns
from hivetune.records import Role

_SPEAKER = re.compile(
    r"^[ \t]*[\[(<*#]{0,3} ?([^\W\d][\w .-]{0,24}?)[\])>*]{0,3}[ \t]?[:\uff1a][\])>*]{0,3}[ \t]*", re.M
)
_SPEAK = ("user", "assistant", "system")
MIN_TURNS = 2


def turns_in_text(text: str) -> list[dict[str, str]] | None:
    """The turns of a text that begins with a speaker; None for any other text, and where a line may be somebody's words
    and no speaker: two sides have to take turns, unless every line names its speaker.
    """
    lines = [(match, role_of(match.group(1))) for match in _SPEAKER.finditer(text)]
    found = [(match, role) for match, role in lines if role in _SPEAK]
    others = Counter(match.group(1) for match, role in lines if role not in _SPEAK)
    if any(count > 1 or role_of(name) == "tool" for name, count in others.items()):
        return None  # somebody else may speak too
    if len(found) < MIN_TURNS or text[: found[0][0].start()].strip():
        return spoken_turns(text) or None
    ends = [match.start() for match, _ in found[1:]] + [len(text)]
    said = [text[match.end() : end].strip() for (match, _), end in zip(found, ends, strict=True)]
    roles: list[Role] = [role for _, role in found if role is not None]
    if not {"user", "assistant"} <= set(roles) or not all(said) or "system" in roles[1:]:
        return None
    spoken = roles[1:] if roles[0] == "system" else roles
    in_turn = all(first != second for first, second in pairwise(spoken))
    if not in_turn and sum(bool(line.strip()) for line in text.splitlines()) != len(found):
        return None
    return [{"role": role, "content": piece} for role, piece in zip(roles, said, strict=True)]

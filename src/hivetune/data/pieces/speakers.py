"""Who speaks and what stands below a header, by the exact names of columns.toml."""

from functools import lru_cache
from typing import Literal

from hivetune.data.columns import ANSWERED, ASKED, CONTENT, CONTEXT, SPEAKERS, SYSTEM, THOUGHTS, TRUE_ANSWERS
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.turns import ROLES
from hivetune.records import Role

Part = Literal["asked", "answered", "system", "thoughts", "given", "unknown"]


@lru_cache(8192)
def role_of(name: str) -> Role | None:
    """The role of a speaker: `Human`, `ROLE_USER`, `Customer`; None for a name that nobody knows."""
    plain = plain_name(name).removeprefix("role_")
    known = next((role for role, names in SPEAKERS.items() if plain in names), None)
    return known or ROLES.get(plain)


@lru_cache(4096)
def part_of(name: str) -> Part:
    """What stands under a name: `Question 3`, `Final Answer`."""
    plain = plain_name(name.rstrip("0123456789 ")).removeprefix("final_")
    if plain in ("q", *ASKED):
        return "asked"
    if plain in ANSWERED or plain in TRUE_ANSWERS:
        return "answered"
    if plain in SYSTEM:
        return "system"
    if plain in THOUGHTS:
        return "thoughts"
    return "given" if plain in CONTEXT or plain in CONTENT else "unknown"

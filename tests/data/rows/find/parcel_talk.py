"""The talk about a parcel that tests of unknown layouts write down in many ways."""

from typing import Any

from hivetune.data.rows.find.asking.advice import lines_for
from hivetune.data.rows.find.conversation import read_conversation

ASKED, ANSWERED = "Where is my parcel now?", "It is at the depot."
PAIR = [("user", ASKED), ("assistant", ANSWERED)]
TALK = [*PAIR, ("user", "And when does it come?"), ("assistant", "It comes tomorrow.")]


def said(row: dict[str, Any], **options: bool) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in read_conversation(row, **options).messages]


def columns_for(row: dict[str, Any]) -> dict[str, str] | None:
    """The line that is printed for a row alone."""
    lines = lines_for([row])
    return lines[0].columns if lines else None


def turns(role: str, content: str, users: Any, assistants: Any) -> list[dict[str, Any]]:
    return [{role: users if who == "user" else assistants, content: text} for who, text in TALK]

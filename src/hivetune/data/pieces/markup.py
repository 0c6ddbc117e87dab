"""Messages that were written as HTML, as help desks keep them."""

import html
import re
from collections.abc import Iterable
from typing import Any

from hivetune.data.pieces.said import Conversation, text_of
from hivetune.data.pieces.turns import in_order
from hivetune.data.reasons import RowRefused
from hivetune.records import Message, Role

_MARKUP = re.compile(r"</?(?:p|div|br|b|i|a|ul|ol|li|span|strong|em|img|h[1-6]|blockquote|pre|code)\b[^<>]*>", re.I)
_BREAK = re.compile(r"<(?:br\b[^<>]*|(?:/p|/div|/li|/h[1-6]|/blockquote|/pre)\s*/?)>", re.I)


def without_markup(body: str) -> str:
    """Return what a person reads of a message's HTML; text without tags is only rid of its entities."""
    text = _MARKUP.sub("", _BREAK.sub("\n", body)) if _MARKUP.search(body) else body
    lines = (" ".join(line.split()) for line in html.unescape(text).strip().split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def desk_conversation(name: str, turns: Iterable[tuple[Role, Any, float]], notes: bool) -> Conversation:
    """Return the conversation of a ticket. `turns`: who, what, and the weight; `notes`: whether internal notes were
    removed.
    """
    messages: list[Message] = []
    marked = False
    for role, value, weight in turns:
        body = text_of(value, "body")
        text = without_markup(body)
        if not text and "<img" in body.lower():
            raise RowRefused("unsupported-content", "a message that is only an image")
        marked = marked or _MARKUP.search(body) is not None
        messages += [Message(role, text, weight=weight)] if text else []
    ordered, changed = in_order(messages)
    warnings = (("internal-notes",) if notes else ()) + (("markup",) if marked else ())
    return Conversation(name, ordered, changed=warnings + changed)

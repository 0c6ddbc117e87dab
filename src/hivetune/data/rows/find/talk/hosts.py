"""Which of two parties that nobody knows answers the other: the one who asks what they can do for them, or a dialogue
system that speaks behind each turn of its user.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.rows.find.names import part_of
from hivetune.records import Role

FIRST_TURNS = 3  # in which somebody greets
_SERVES = re.compile(
    r"\b(?:how (?:can|may|could) (?:i|we) (?:be of )?(?:help|assist|serv)|what can (?:i|we) (?:do for|help) you"
    r"|(?:thanks|thank you) for (?:calling|contacting|reaching out)|en qu[eé] (?:puedo|podemos) ayudar"
    r"|(?:como|em que) posso (?:te |lhe )?ajudar|wie kann ich (?:ihnen |dir )?(?:heute )?(?:weiter)?helfen"
    r"|(?:comment|en quoi) puis-je (?:vous |t')?aider|come posso aiutar|чем (?:я )?могу (?:вам |тебе )?помочь)"
    r"|有什么(?:可以|能)帮|請問有什麼|ご用件|무엇을 도와",
    re.I,
)


def served(parties: Sequence[str], texts: Sequence[Any]) -> list[Role] | None:
    """Who speaks in each turn, `parties` and `texts` being those of a whole conversation; None where not exactly one of
    two parties offers help in the first turns.
    """
    if len(set(parties)) != 2 or not all(isinstance(text, str) for text in texts):
        return None
    begun = list(zip(parties, texts, strict=True))[:FIRST_TURNS]
    hosts = {party for party, text in begun if _SERVES.search(text)}
    return ["assistant" if party in hosts else "user" for party in parties] if len(hosts) == 1 else None


def with_system_as_party(items: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Items with `user` and `system` where the latter is a dialogue system that answers each time, and no text that was
    set once: with its words, and the user's, under names that say so. Others as they are.
    """
    said = [(item.get("user"), item.get("system")) for item in items]
    if not all(isinstance(text, str) and text.strip() for both in said for text in both):
        return items
    others = {part_of(name) for item in items for name in item if name not in ("user", "system")}
    if others & {"asked", "answered"} or len({text for _, text in said}) < max(2, len(said) / 2):
        return items
    names = {"user": "question", "system": "answer"}
    return [{names.get(name, name): value for name, value in item.items()} for item in items]

"""Which of two parties that nobody knows answers the other: the one who asks what they can do for them."""

import re
from collections.abc import Sequence
from typing import Any

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

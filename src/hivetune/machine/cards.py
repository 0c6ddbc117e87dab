"""The known cards (cards.yaml: memory, bandwidth, measured rates) and models (models.yaml: sizes) by name."""

import difflib
import functools
from collections.abc import Mapping
from typing import Any

import yaml

from hivetune.errors import UsageError
from hivetune.machine.facts import KNOWLEDGE


def known_model(name: str) -> Mapping[str, Any] | None:
    """Return the relevant fields of a model's config.json by Hub id or its last part, None if it is not listed."""
    sought = name.lower()
    models = {listed.lower(): config for listed, config in _read("models.yaml").items()}
    by_last_part = {listed.rpartition("/")[2]: config for listed, config in models.items()}
    found: Mapping[str, Any] | None = models.get(sought) or by_last_part.get(sought)
    return found


def known_card(name: str) -> Mapping[str, Any]:
    """Return a card by its name, an alias, or its driver's name. Raise UsageError for an unknown one."""
    if card := _find_card(name):
        return card
    near = difflib.get_close_matches(name, known_cards(), 1, cutoff=0.3)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"unknown card {name!r}", hint=f"{hint}known: {', '.join(known_cards())}")


def similar_card(name: str, architecture: str, memory_bytes: int) -> Mapping[str, Any] | None:
    """Return the entry of cards.yaml for a card of this machine: by its name, else by the same chip and memory within
    15 %."""
    if found := _find_card(name):
        return found
    for listed, card in _read("cards.yaml").items():
        same_memory = abs(card["memory_gb"] * 1e9 / max(memory_bytes, 1) - 1) < 0.15
        if architecture and card.get("gfx") == architecture and same_memory:
            return {"name": listed, **card}
    return None


def known_cards() -> list[str]:
    """Return the names of all known cards."""
    return list(_read("cards.yaml"))


def _find_card(name: str) -> Mapping[str, Any] | None:
    sought = name.lower().strip()
    for listed, card in _read("cards.yaml").items():
        if sought in (listed.lower(), *(alias.lower() for alias in card.get("aliases", []))):
            return {"name": listed, **card}
    return None


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((KNOWLEDGE / name).read_text(encoding="utf-8")))

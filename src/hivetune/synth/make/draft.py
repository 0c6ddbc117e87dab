"""A question and its answer before they are checked, and how their wording is drawn."""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

OPENER_SHARE = 0.3
# What a row teaches; packs weigh them by these names.
DRAFT_KINDS = ("meaning", "which", "command", "mistake", "explain", "compare", "follow-up", "unsaid",
         "purpose", "concept", "call", "fact")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """`turns`: questions and answers in order. `passage`: what of the source the answers rest on.

    `absent`: options that the questions name and that do not exist. `commands`: shell lines of the answers, `python`:
    code of the answers; both are parsed. `checker`: what a correct answer contains, where that is known.
    """

    kind: str
    turns: tuple[tuple[str, str], ...]
    section: str
    passage: str
    absent: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    checker: Mapping[str, Any] | None = field(default=None)


@cache
def _phrases() -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "phrases.toml").read_text(encoding="utf-8"))


def worded(name: str, draw: random.Random, fields: Mapping[str, str], *, opener: bool = True) -> tuple[str, str]:
    """Return a question and an answer of the kind `name` ("meaning.option"), in wordings that are drawn."""
    phrases = _phrases()
    for part in name.split("."):
        phrases = phrases[part]
    ask, answer = _pick(phrases["ask"], draw, fields), _pick(phrases["answer"], draw, fields)
    if opener and "```" not in ask and draw.random() < OPENER_SHARE:
        ask = _pick(_phrases()["openers"]["any"], draw, fields) + ask
    return ask, answer


def _pick(wordings: list[str], draw: random.Random, fields: Mapping[str, str]) -> str:
    """Return one wording whose fields are all known and not empty."""
    return draw.choice([text for text in wordings if _fits(text, fields)]).format_map(fields)


@cache
def _needs(text: str) -> frozenset[str]:
    return frozenset(name for part in text.split("{")[1:] if (name := part.partition("}")[0]))


def _fits(text: str, fields: Mapping[str, str]) -> bool:
    """Return whether a wording's fields are there.

    `{value}` may be empty: it is the sentence that gives a number, where one is asked for.
    """
    return all(fields.get(name) or (name == "value" and name in fields) for name in _needs(text))

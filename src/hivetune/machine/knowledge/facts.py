"""The facts of the *.toml files beside this module, and the torch to install by them. Standard library, for set-up.

Every fact but a fault (machine/faults.py) has these keys besides those of its kind (machines.toml lists them):

    id          its name in reports
    says        the fact, in a sentence
    when        observation = pattern, all of which must match; or a list of alternatives. A pattern is true or
                false, a range of versions (">=7.2,<7.3"), or a list of words with wildcards ("gfx103*"), one of which
                must match. A missing observation matches nothing.
    source      public addresses
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*([\w.]+)\s*$")

Patterns = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Fact:
    """One fact; `more` has the keys of its kind."""

    id: str
    says: str
    when: Patterns
    source: tuple[str, ...]
    more: Mapping[str, Any]


@functools.cache
def read_knowledge(kind: str) -> tuple[Mapping[str, Any], ...]:
    """Return the entries of a kind from the files beside this module, in their order."""
    entries: list[Mapping[str, Any]] = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        with path.open("rb") as file:
            entries += tomllib.load(file).get(kind, ())
    return tuple(entries)


@functools.cache
def facts(kind: str) -> tuple[Fact, ...]:
    """Return all facts of a kind: finding, chip, advice, remedy or install. Raise KeyError for an incomplete one."""
    common = ("id", "says", "when", "source")
    return tuple(
        Fact(e["id"], e["says"], e["when"], tuple(e["source"]), {k: v for k, v in e.items() if k not in common})
        for e in read_knowledge(kind)
    )


def first_fact(kind: str, observed: Mapping[str, Any]) -> Fact | None:
    """Return the first fact of a kind whose patterns match the observations."""
    return next((fact for fact in facts(kind) if is_met(fact.when, observed)), None)


def alternatives(when: Patterns) -> Sequence[Mapping[str, Any]]:
    return [when] if isinstance(when, Mapping) else when


def matching(when: Patterns, observed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first alternative whose patterns all match the observations, empty if none does."""
    for patterns in alternatives(when):
        if all(observed.get(name) is not None and _fits(pattern, observed[name]) for name, pattern in patterns.items()):
            return patterns
    return {}


def is_met(when: Patterns, observed: Mapping[str, Any]) -> bool:
    """Return whether all patterns of an alternative of `when` match the observations."""
    return bool(matching(when, observed))


def chip_has(gfx: str, key: str) -> Any:
    """Return what is known by `key` of an architecture, None if nothing is."""
    observed = {"gfx": gfx}
    return next((fact.more[key] for fact in facts("chip") if key in fact.more and is_met(fact.when, observed)), None)


def _fits(pattern: Any, value: Any) -> bool:
    if isinstance(pattern, bool):
        return value is pattern
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        return any(_fits(alternative, value) for alternative in pattern)
    if pattern[:1] in "<>=!":
        return in_range(str(value), pattern)
    return fnmatchcase(str(value), pattern)


def in_range(version: str, allowed: str) -> bool:
    """Return whether a version is in ">=7.2,<7.3". Only numbers before a "+" count; a missing part is 0."""
    have = _numbers(version)
    for part in allowed.split(","):
        match = _COMPARISON.match(part)
        if match is None:
            raise ValueError(f"not a range of versions: {allowed!r}")
        want = _numbers(match[2])
        width = max(len(have), len(want))
        mine, limit = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
        if not {
            "<": mine < limit, "<=": mine <= limit, ">": mine > limit,
            ">=": mine >= limit, "==": mine == limit, "!=": mine != limit,
        }[match[1]]:  # fmt: skip
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13, 0) for 2.13.0+rocm7.2, (6, 18, 2) for 6.18.2-arch1-1, (2, 9, 0) for 2.9.0rc3."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


@dataclass(frozen=True)
class Install:
    """A requirement and what uv calls its backend, the fact with the reason, and whether this Python has wheels."""

    requirement: str
    backend: str
    fact: Fact
    python_fits: bool

    @property
    def options(self) -> str:
        """Return the options of `uv pip install` for this build. They replace an installed torch, since a build for
        another card can have the same version.
        """
        return f"--torch-backend {self.backend} --reinstall-package torch '{self.requirement}'"


def choose_install(facts_of_cards: Sequence[Mapping[str, Any]], python: str) -> Install | None:
    """Return the install for the first known card, or for the processor; None if there are only unknown cards.

    `facts_of_cards` has the observations of each card: its vendor, and gfx or capability.
    """
    for card_facts in [*facts_of_cards] or [{"vendor": "none"}]:
        if fact := first_fact("install", card_facts):
            more = fact.more
            return Install(more["requirement"], more["backend"], fact, in_range(python, more["python"]))
    return None

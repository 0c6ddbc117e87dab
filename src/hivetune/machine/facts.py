"""The known facts about machines and faults: the entries of knowledge/*.toml. Standard library alone, for set-up.

Every fact about machines has these keys besides those of its kind, which machines.toml explains:

    id          its name in reports
    explanation the fact, in a sentence
    when        observation = pattern, all of which must match; or a list of alternatives. A pattern is true or
                false, a range of versions (">=7.2,<7.3"), or a list of words with wildcards ("gfx103*"), one of which
                must match. A missing observation matches nothing.
    source      public addresses

The faults that end runs are explained at the top of faults.toml.
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

KNOWLEDGE = Path(__file__).parent / "knowledge"
WHEELS = ">=3.10,<3.15"  # the versions of Python that current builds of torch have wheels for
_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*([\w.]+)\s*$")

Patterns = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Fact:
    """One fact about machines. `fields`: the keys that only facts of its kind have."""

    id: str
    explanation: str
    when: Patterns
    source: tuple[str, ...]
    fields: Mapping[str, Any]


@functools.cache
def facts(kind: str) -> tuple[Fact, ...]:
    """Return all facts of a kind: finding, chip or install. Raise KeyError for an incomplete one."""
    common = ("id", "explanation", "when", "source")
    return tuple(
        Fact(e["id"], e["explanation"], e["when"], tuple(e["source"]), {k: v for k, v in e.items() if k not in common})
        for e in tomllib.loads((KNOWLEDGE / "machines.toml").read_text(encoding="utf-8"))[kind]
    )


def alternatives(when: Patterns) -> Sequence[Mapping[str, Any]]:
    return [when] if isinstance(when, Mapping) else when


def matching(when: Patterns, observed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first alternative of `when` whose patterns all match the observations; {} if none does."""
    for patterns in alternatives(when):
        wanted = {name: pattern for name, pattern in patterns.items() if name != "fix"}
        if all(observed.get(name) is not None and _fits(pattern, observed[name]) for name, pattern in wanted.items()):
            return patterns
    return {}


def is_met(when: Patterns, observed: Mapping[str, Any]) -> bool:
    """Return whether all patterns of an alternative of `when` match the observations."""
    return bool(matching(when, observed))


def chip_has(gfx: str, key: str) -> Any:
    """Return the value of `key` for a gfx architecture, or None if it is unknown."""
    known = (fact.fields for fact in facts("chip") if is_met(fact.when, {"gfx": gfx}))
    return next((fields[key] for fields in known if key in fields), None)


def remedies_of(gfx: str) -> list[Mapping[str, Any]]:
    """Return the published remedies for faults on a chip: each has the recovery change (`rung`), its `faults` and its
    `source`."""
    remedies = [fact for fact in facts("finding") if "rungs" in fact.fields]
    about = [fact for fact in remedies if any(_fits(each["gfx"], gfx) for each in alternatives(fact.when))]
    return [remedy for fact in about for remedy in fact.fields["rungs"]]


def _fits(pattern: Any, value: Any) -> bool:
    if isinstance(pattern, bool):
        return value is pattern
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        return any(_fits(alternative, value) for alternative in pattern)
    if pattern[:1] in "<>=!":
        return in_range(str(value), pattern)
    return fnmatchcase(str(value), pattern)


def in_range(version: str, allowed: str) -> bool:
    """Return whether a version is in ">=7.2,<7.3". Only numbers before a "+" count; a missing part is 0.

    Raise ValueError for an invalid range.
    """
    have = _numbers(version)
    for part in allowed.split(","):
        match = _COMPARISON.match(part)
        if match is None:
            raise ValueError(f"{allowed!r} is not a range of versions")
        want = _numbers(match[2])
        width = max(len(have), len(want))
        mine, limit = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
        fits = {"<": mine < limit, "<=": mine <= limit, ">": mine > limit, ">=": mine >= limit, "==": mine == limit}
        if not fits.get(match[1], mine != limit):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13, 0) for 2.13.0+rocm7.2, (6, 18, 2) for 6.18.2-arch1-1, (2, 9, 0) for 2.9.0rc3."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


@dataclass(frozen=True)
class Install:
    """The build of torch for a card, and the Python versions that it needs."""

    requirement: str
    backend: str  # what uv calls it
    fact: Fact  # with the reason
    python: str  # the versions that have wheels
    python_fits: bool

    @property
    def options(self) -> str:
        """Return the options of `uv pip install` for this build."""
        # They replace an installed torch, since a build for another card can have the same version.
        return f"--torch-backend {self.backend} --reinstall-package torch '{self.requirement}'"


def choose_install(facts_of_cards: Sequence[Mapping[str, Any]], python: str) -> Install | None:
    """Return the install for the first known card, or for the processor if there is no card; None if all cards are
    unknown.

    `facts_of_cards`: the observations of each card: its vendor, and gfx or capability.
    """
    for card_facts in [*facts_of_cards] or [{"vendor": "none"}]:
        for fact in facts("install"):
            if is_met(fact.when, card_facts):
                fields, wheels = fact.fields, fact.fields.get("python", WHEELS)
                return Install(fields["requirement"], fields["backend"], fact, wheels, in_range(python, wheels))
    return None


Domain = Literal["device", "memory", "host", "disk", "data", "numerics", "program", "setup"]
_NEVER = re.compile("(?!)")


@dataclass(frozen=True)
class Fault:
    """One kind of failure; faults.toml explains the fields."""

    id: str
    domain: Domain
    title: str
    cause: str
    advice: str
    retry: bool
    first: Literal["again", "change"] = "again"
    rungs: tuple[str, ...] = ()
    patterns: re.Pattern[str] = _NEVER
    own: re.Pattern[str] = _NEVER
    weak: re.Pattern[str] = _NEVER
    facts: frozenset[str] = frozenset()
    backoff: bool = False
    waits_for: str = ""
    distrust: bool = False
    source: tuple[str, ...] = ()


@functools.cache
def catalogue() -> tuple[Fault, ...]:
    """Return all faults in the order in which they are compared with a failure. The last one matches every failure."""
    entries = tomllib.loads((KNOWLEDGE / "faults.toml").read_text(encoding="utf-8"))["fault"]
    return tuple(Fault(**{name: _read(name, value) for name, value in entry.items()}) for entry in entries)


def fault(identifier: str) -> Fault:
    """Return a fault by its id. Raise KeyError for an unknown one."""
    return {entry.id: entry for entry in catalogue()}[identifier]


def _read(name: str, value: Any) -> Any:
    if name in ("patterns", "own", "weak"):
        return re.compile("|".join(value), re.MULTILINE)
    return {"rungs": tuple, "source": tuple, "facts": frozenset}.get(name, lambda same: same)(value)

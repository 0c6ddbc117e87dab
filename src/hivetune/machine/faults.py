"""The fault catalogue (`knowledge/faults.yaml`) as frozen values."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

Domain = Literal["device", "memory", "host", "disk", "data", "numerics", "program", "setup"]


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue; the head of the file says what each field means."""

    id: str
    domain: Domain
    title: str
    cause: str
    retry: bool
    advice: str
    evidence: tuple[str, ...]
    first: Literal["again", "change"]
    rungs: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    facts: frozenset[str]
    needs: frozenset[str]
    backoff: bool
    waits_for: str
    distrust: bool


@functools.cache
def catalogue() -> tuple[Fault, ...]:
    """All faults, in the order in which they are tried."""
    text = resources.files("hivetune.machine").joinpath("knowledge/faults.yaml").read_text(encoding="utf-8")
    return tuple(_fault(entry) for entry in yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def fault(identifier: str) -> Fault:
    """Raises KeyError for a name that the catalogue does not have."""
    return {entry.id: entry for entry in catalogue()}[identifier]


def _fault(entry: Mapping[str, Any]) -> Fault:
    known = {*Fault.__dataclass_fields__}
    if not entry.keys() <= known:
        raise ValueError(f"faults.yaml: {entry['id']}: unknown {sorted(entry.keys() - known)}")
    return Fault(
        id=entry["id"],
        domain=entry["domain"],
        title=entry["title"],
        cause=entry["cause"],
        retry=entry["retry"],
        advice=entry["advice"],
        evidence=tuple(entry["evidence"]),
        first=entry.get("first", "again"),
        rungs=tuple(entry.get("rungs", ())),
        patterns=tuple(re.compile(pattern) for pattern in entry.get("patterns", ())),
        facts=frozenset(entry.get("facts", ())),
        needs=frozenset(entry.get("needs", ())),
        backoff=entry.get("backoff", False),
        waits_for=entry.get("waits_for", ""),
        distrust=entry.get("distrust", False),
    )

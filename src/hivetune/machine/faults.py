"""The faults of `knowledge/faults.toml` as frozen values. The comment at its top explains the fields."""

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

from hivetune.machine.knowledge.facts import read_knowledge

Domain = Literal["device", "memory", "host", "disk", "data", "numerics", "program", "setup"]
_NEVER = re.compile("(?!)")


@dataclass(frozen=True)
class Fault:
    """One kind of failure. `patterns`, `own` and `weak` recognise it in texts, `facts` in what is known of the end."""

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
    """Return all faults in the order in which they are tried. The last one fits everything."""
    return tuple(Fault(**{name: _read(name, value) for name, value in e.items()}) for e in read_knowledge("fault"))


def fault(identifier: str) -> Fault:
    """Return a fault by its id. Raise KeyError for an unknown one."""
    return {entry.id: entry for entry in catalogue()}[identifier]


def _read(name: str, value: Any) -> Any:
    if name in ("patterns", "own", "weak"):
        return re.compile("|".join(value), re.MULTILINE)
    return {"rungs": tuple, "source": tuple, "facts": frozenset}.get(name, lambda same: same)(value)

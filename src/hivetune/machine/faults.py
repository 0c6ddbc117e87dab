"""The fault catalogue (`knowledge/faults.yaml`) as frozen values."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, NamedTuple

import yaml

from hivetune.machine.codes import code_pattern
from hivetune.machine.knowledge.facts import facts

Domain = Literal["device", "memory", "host", "disk", "data", "numerics", "program", "setup"]

FIRST = {"again": "the same again", "change": "a change, as it can't go away by itself"}


class Sign(NamedTuple):
    """Something to recognise a fault by: as a person reads it, and as it is searched for."""

    words: str
    pattern: re.Pattern[str]


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
    patterns: tuple[Sign, ...]
    own: tuple[Sign, ...]
    symptoms: tuple[Sign, ...]
    wrappers: tuple[Sign, ...]
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
        patterns=_signs(entry.get("patterns", ())),
        own=_signs(entry.get("own", ())),
        symptoms=_signs(entry.get("symptoms", ())),
        wrappers=_signs(entry.get("wrappers", ())),
        facts=frozenset(entry.get("facts", ())),
        needs=frozenset(entry.get("needs", ())),
        backoff=entry.get("backoff", False),
        waits_for=entry.get("waits_for", ""),
        distrust=entry.get("distrust", False),
    )


def _signs(listed: Iterable[str | Mapping[str, Sequence[str | int]]]) -> tuple[Sign, ...]:
    """Regular expressions as they are; of {family: [code, ...]} one for all its codes."""
    found = []
    for item in listed:
        if isinstance(item, str):
            found.append(Sign(f"`{item}`", re.compile(item, re.MULTILINE)))
            continue
        for family, codes in item.items():
            together = "|".join(code_pattern(family, str(code)) for code in codes)
            found.append(Sign(f"{family} {', '.join(map(str, codes))}", re.compile(together, re.MULTILINE)))
    return tuple(found)


def as_markdown() -> str:
    """docs/faults.md; a test holds the page equal to this."""
    lines = [
        "# Faults",
        "",
        "What can end or spoil a run, and what is done about it. Generated from",
        "`src/hivetune/machine/knowledge/faults.yaml`, which has the patterns too. The first entry that fits",
        "is the diagnosis. Changes are tried from left to right ([reliability.md](reliability.md)).",
    ]
    for entry in catalogue():
        retry = FIRST[entry.first] if entry.retry else "no retry"
        changes = f"; changes: {', '.join(entry.rungs)}" if entry.rungs else ""
        lines += [
            "",
            f"## {entry.id}",
            "",
            f"**{entry.title[0].upper()}{entry.title[1:]}.** {entry.cause} {entry.advice}",
        ]
        lines += [f"({entry.domain}; {retry}{changes})"]
    lines += ["", *_published_table()]
    return "\n".join(lines) + "\n"


def _published_table() -> list[str]:
    """Faults of cards as others published them: a test asks doctor, diagnosis and ladder about each."""
    lines = [
        "## Published faults of cards",
        "",
        "Faults that others published, none of which was seen here. Tests give each to doctor, diagnosis and ladder.",
        "",
        "| thread | what happened | fault | first changes |",
        "| --- | --- | --- | --- |",
    ]
    for fact in facts("published"):
        thread = f"[{fact.more['thread']}]({fact.source[0]})"
        name = f"[{fact.more['fault']}](#{fact.more['fault']})" if fact.more["fault"] else "none: nothing is said"
        rungs = ", ".join(f"`{rung}`" for rung in fact.more["rungs"])
        lines.append(f"| {thread} | {fact.says} | {name} | {rungs} |")
    return lines

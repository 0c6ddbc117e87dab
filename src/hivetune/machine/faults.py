"""The fault catalogue (`knowledge/faults.yaml`) as frozen values, with patterns for documented error codes."""

import errno
import functools
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hivetune.base.typed import from_plain
from hivetune.machine.knowledge.cards import read_knowledge

_CARD = "(?i:cuda|hip|rocm|triton|thccheck)"
# Below this number the old and the new CUDA runtime have different errors; there only the words decide.
MIN_CUDA_NUMBER = 98


def code_pattern(family: str, code: str) -> str:
    """Return a regular expression for a code of `family` (cuda, hsa, xid, errno, signal) as logs have it.

    Raise KeyError for an undocumented code.
    """
    match family:
        case "cuda":
            return _cuda(code)
        case "hsa":
            number = {name: number for number, name in read_knowledge("codes.yaml")["hsa"].items()}[code]
            return rf"HSA_STATUS_(?:ERROR_)?{code}\b|(?:code|status|error)[ :=]+0x{number:x}\b"
        case "xid":  # NVIDIA's kernel messages (https://docs.nvidia.com/deploy/xid-errors/index.html)
            return rf"\bX[iI][dD](?: \([^)]*\):)? {int(code)}\b"
        case "errno":
            return _errno(code)
        case "signal":
            return _signal(code)
    raise KeyError(family)


def _cuda(code: str) -> str:
    names, _, text = read_knowledge("codes.yaml")["cuda"][int(code)].partition(" | ")
    camel = "|".join(name for name in names.split() if not name.isupper())
    capitals = "|".join(name for name in names.split() if name.isupper()) or "(?!)"
    patterns = [rf"(?:hip|cuda)Error(?:{camel})\b", rf"CUDA_ERROR_(?:{capitals})\b"]
    patterns += [rf"Triton Error \[\w+\]:\s+Code: {code}\b"]
    if int(code) >= MIN_CUDA_NUMBER:
        failed = r"[ -]?(?i:runtime |driver |api )?(?i:error|failure)\w*(?: \(error)?(?: code)?[ :=#(]+"
        patterns += [rf"{_CARD}\w*{failed}{code}\b", rf"\b[Ee]rror {code}: "]
    patterns += [rf"{_CARD}[^\n]{{0,60}}(?i:{text[1:]})\b" if text.startswith("~") else rf"(?i:{text})\b"]
    return "|".join(patterns)


def _errno(code: str) -> str:
    """Match an errno as Python ([Errno 28]), Rust (os error 28; code: 28), C++ and the C library print it."""
    number = vars(errno)[code]  # a KeyError for a name that no error has
    text = re.escape(os.strerror(number))
    return (
        rf"\[Errno {number}\]|\b(?:os error|errno)[ :=]+{number}\b|\b[Ee]rror code {number} \(|\bcode: {number}, "
        rf"|\b{code}\b|(?i:{text})"
    )


def _signal(code: str) -> str:
    """Match a signal as shells, torchrun, Docker and Python's subprocess report it."""
    number = int(signal.Signals[code])  # a KeyError for a name that no signal has
    text = re.escape((signal.strsignal(number) or code).partition(" (")[0])
    ended = r"(?:exit|return|status)\w*(?: with)?(?: code| status)?[ :=(]+"
    return (
        rf"\b{code}\b|\bsignal[ :=]+(?:number )?{number}\b|\b{ended}(?:-{number}|{128 + number})\b"
        rf"|Signal: {text} \({number}\)|\b{text}: {number}\b|\berror code -{number}\b|\bline \d+:\s+\d+ {text}\b"
        rf"|signal[ :]+{text}|Unexpected (?i:{text}) encountered|\b{text}(?: \(core dumped\)|\s*$)"
    )


Domain = Literal["device", "memory", "host", "disk", "data", "numerics", "program", "setup"]


class Sign(NamedTuple):
    """A sign of a fault: in words for people, and as a pattern."""

    words: str
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue. The comment at the top of faults.yaml explains the fields."""

    id: str
    domain: Domain
    title: str
    cause: str
    retry: bool
    advice: str
    evidence: tuple[str, ...]
    first: Literal["again", "change"] = "again"
    rungs: tuple[str, ...] = ()
    patterns: tuple[Sign, ...] = ()
    own: tuple[Sign, ...] = ()
    symptoms: tuple[Sign, ...] = ()
    wrappers: tuple[Sign, ...] = ()
    facts: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    backoff: bool = False
    waits_for: str = ""
    distrust: bool = False


@functools.cache
def catalogue() -> tuple[Fault, ...]:
    """Return all faults in the order in which they are tried."""
    return tuple(_fault(entry) for entry in read_knowledge("faults.yaml"))


def fault(identifier: str) -> Fault:
    """Return a fault by its id. Raise KeyError for an unknown one."""
    return {entry.id: entry for entry in catalogue()}[identifier]


def _fault(entry: Mapping[str, Any]) -> Fault:
    signs = {name: _signs(entry[name]) for name in ("patterns", "own", "symptoms", "wrappers") if name in entry}
    return from_plain(Fault, {**entry, **signs})


def _signs(listed: Iterable[str | Mapping[str, Sequence[str | int]]]) -> list[Sign]:
    """Return the signs of a list of regular expressions and of {family: [code, ...]}, each with one pattern."""
    signs = []
    for item in listed:
        if isinstance(item, str):
            signs.append(Sign(f"`{item}`", re.compile(item, re.MULTILINE)))
            continue
        for family, codes in item.items():
            together = "|".join(code_pattern(family, str(code)) for code in codes)
            signs.append(Sign(f"{family} {', '.join(map(str, codes))}", re.compile(together, re.MULTILINE)))
    return signs

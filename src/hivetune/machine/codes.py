"""Patterns for the documented codes of drivers, runtimes and the operating system: by name, by number and by words."""

import errno
import functools
import os
import re
import signal
from collections.abc import Mapping
from importlib import resources

import yaml

_CARD = "(?i:cuda|hip|rocm|triton|thccheck)"
# Below this the old and the new CUDA runtime give one number to different errors; there the words decide.
LEAST_CUDA_NUMBER = 98


def code_pattern(family: str, code: str) -> str:
    """A regular expression for `code` of `family` (cuda, hsa, xid, errno, signal) as it stands in logs.

    Raises KeyError for a code that the family does not document."""
    return _PATTERN_OF[family](code)


def _cuda(code: str) -> str:
    names, _, words = _documented()["cuda"][int(code)].partition(" | ")
    camel = "|".join(name for name in names.split() if not name.isupper())
    capitals = "|".join(name for name in names.split() if name.isupper()) or "(?!)"
    found = [rf"(?:hip|cuda)Error(?:{camel})\b", rf"CUDA_ERROR_(?:{capitals})\b"]
    found += [rf"Triton Error \[\w+\]:\s+Code: {code}\b"]
    if int(code) >= LEAST_CUDA_NUMBER:
        failed = r"[ -]?(?i:runtime |driver |api )?(?i:error|failure)\w*(?: \(error)?(?: code)?[ :=#(]+"
        found += [rf"{_CARD}\w*{failed}{code}\b", rf"\b[Ee]rror {code}: "]
    found += [rf"{_CARD}[^\n]{{0,60}}(?i:{words[1:]})\b" if words.startswith("~") else rf"(?i:{words})\b"]
    return "|".join(found)


def _hsa(code: str) -> str:
    numbers = [number for number, name in _documented()["hsa"].items() if name == code]
    if not numbers:
        raise KeyError(code)
    return rf"HSA_STATUS_(?:ERROR_)?{code}\b|(?:code|status|error)[ :=]+0x{numbers[0]:x}\b"


def _xid(code: str) -> str:
    """NVIDIA's kernel messages; https://docs.nvidia.com/deploy/xid-errors/index.html"""
    return rf"\bX[iI][dD](?: \([^)]*\):)? {int(code)}\b"


def _errno(code: str) -> str:
    """As Python ([Errno 28]), Rust (os error 28; code: 28), C++ and the C library print it."""
    number = getattr(errno, code, None)
    if number is None:
        raise KeyError(code)
    words = re.escape(os.strerror(number))
    return (
        rf"\[Errno {number}\]|\b(?:os error|errno)[ :=]+{number}\b|\b[Ee]rror code {number} \(|\bcode: {number}, "
        rf"|\b{code}\b|(?i:{words})"
    )


def _signal(code: str) -> str:
    """As shells, torchrun, Docker and Python's subprocess say how a process ended."""
    number = int(signal.Signals[code])  # a KeyError for a name that no signal has
    words = re.escape((signal.strsignal(number) or code).partition(" (")[0])
    ended = r"(?:exit|return|status)\w*(?: with)?(?: code| status)?[ :=(]+"
    return (
        rf"\b{code}\b|\bsignal[ :=]+(?:number )?{number}\b|\b{ended}(?:-{number}|{128 + number})\b"
        rf"|Signal: {words} \({number}\)|\b{words}: {number}\b|\berror code -{number}\b|\bline \d+:\s+\d+ {words}\b"
        rf"|signal[ :]+{words}|Unexpected (?i:{words}) encountered|\b{words}(?: \(core dumped\)|\s*$)"
    )


@functools.cache
def _documented() -> Mapping[str, Mapping[int, str]]:
    text = resources.files("hivetune.machine").joinpath("knowledge/codes.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[int, str]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


_PATTERN_OF = {
    "cuda": _cuda,
    "hsa": _hsa,
    "xid": _xid,
    "errno": _errno,
    "signal": _signal,
}

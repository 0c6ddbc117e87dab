"""Manual pages from their source: the macros of mdoc(7), in which the BSDs and OpenSSH write theirs."""

import re
from collections.abc import Iterator

from hivetune.synth.sources.page import DocBlock
from hivetune.synth.sources.roff import Builder, arguments, logical_lines, plain

_QUOTES = {"Dq": ('"', '"'), "Sq": ("'", "'"), "Ql": ("'", "'"), "Pq": ("(", ")"), "Qq": ('"', '"'), "Op": ("[", "]"),
           "Aq": ("<", ">"), "Bq": ("[", "]"), "Brq": ("{", "}")}  # fmt: skip
_OPEN = {"Oo": "[", "Ao": "<", "Bo": "[", "Bro": "{", "Do": '"', "Po": "(", "Qo": '"', "So": "'"}
_CLOSE = {"Oc": "]", "Ac": ">", "Bc": "]", "Brc": "}", "Dc": '"', "Pc": ")", "Qc": '"', "Sc": "'"}
_PLAIN = {"Ar", "Cm", "Ic", "Pa", "Ev", "No", "Li", "Em", "Sy", "Va", "Vt", "Dv", "Er", "Fa", "Ft", "Tn", "Ad", "An",
           "Lk", "Mt", "Ms", "Cd", "St", "Nm", "Fn", "In", "Ox", "Nx", "Fx", "Bx", "Ux", "At", "D1", "Dl"}  # fmt: skip
_SYSTEMS = {"Ox": "OpenBSD", "Nx": "NetBSD", "Fx": "FreeBSD", "Bx": "BSD", "Ux": "UNIX", "At": "AT&T UNIX"}
_SKIPPED = {"Dd", "Dt", "Os", "Bk", "Ek", "Rs", "Re", "Sm", "Bf", "Ef", "Nd", "Tg", "Db", "Lb", "Rv"}
_BEFORE = set(".,:;)]?!")
_AFTER = set("([")


def blocks_of_mdoc(source: str) -> list[DocBlock]:
    """The blocks of a page that is written with mdoc(7)."""
    build = Builder()
    name = ""
    lists: list[str] = []
    lines = logical_lines(source)
    for line in lines:
        if not line.startswith("."):
            if line.strip() or build.verbatim:
                build.add(plain(line))
            else:
                build.end()
            continue
        words = arguments(line[1:].strip())
        if not words:
            continue
        if "Xo" in words:
            words = _until_closed(words, lines)
        if words[0] == "Nm" and len(words) > 1 and not name:
            name = words[1]
        if words[0] in ("Bl", "El", "It"):
            _list(build, lists, words[0], words[1:], name)
        elif not _layout(build, words[0], words[1:], name) and words[0] not in _SKIPPED:
            build.add(spoken(words, name))
    build.end()
    return build.blocks


def _layout(build: Builder, macro: str, rest: list[str], name: str) -> bool:
    """Macros that divide the page; False for one that is text."""
    if macro == "Nd":
        build.add(f"{name} - {' '.join(rest)}")
    elif macro in ("Sh", "Ss"):
        build.heading(spoken(rest, name), sub=macro == "Ss")
    elif macro in ("Pp", "Lp"):
        if build.verbatim:
            build.add("")
        else:
            build.end()
    elif macro in ("Bd", "Ed"):
        build.end()
        build.verbatim = macro == "Bd" and any(kind in rest for kind in ("-literal", "-unfilled"))
    elif macro in ("Dl", "D1"):
        build.end()
        build.verbatim = True
        build.add(spoken(rest, name))
        build.end()
        build.verbatim = False
    elif macro == "Ex":
        build.add(f"The {name} utility exits 0 on success, and >0 if an error occurs.")
    else:
        return False
    return True


def _until_closed(words: list[str], lines: Iterator[str]) -> list[str]:
    """A macro that goes on over several lines, from Xo to Xc."""
    while "Xc" not in words:
        line = next(lines, ".Xc")
        words = words + (arguments(line[1:].strip()) if line.startswith(".") else arguments(line))
    spaced = " ".join(words).replace(" Sm off", "").replace(" Sm on", "")  # blanks or none: a matter of looks
    return [word for word in spaced.split() if word not in ("Xo", "Xc")]


def _list(build: Builder, lists: list[str], macro: str, rest: list[str], name: str) -> None:
    if macro == "Bl":
        build.end()
        lists.append("tag" if any(kind in rest for kind in ("-tag", "-hang", "-ohang", "-diag", "-inset")) else "")
        build.depth += len(lists) > 1
    elif macro == "El":
        build.end()
        build.depth = max(0, build.depth - (len(lists) > 1))
        if lists:
            lists.pop()
    elif lists and lists[-1] == "tag":
        build.term(spoken(rest, name))
    else:
        build.end()
        build.add("- " + spoken(rest, name))


def spoken(words: list[str], name: str) -> str:
    """A line of macros as text: -l [user@]host."""
    line = _Line(name)
    at = 0
    while at < len(words):
        at += line.take(words[at], words[at + 1 :])
    return line.text()


class _Line:
    """A line as it grows. `_flag` begins each of the next words; `_joined`: no blank before the next piece."""

    def __init__(self, name: str):
        self._name, self._flag, self._joined = name, "", False
        self._pieces: list[str] = []
        self._closing: list[str] = []  # what the rest of the line is put into

    def take(self, word: str, rest: list[str]) -> int:
        """One word, and how many words that were."""
        if word in _QUOTES or word in _OPEN:
            self._put(_QUOTES[word][0] if word in _QUOTES else _OPEN[word])
            self._closing += [_QUOTES[word][1]] if word in _QUOTES else []
            self._joined, self._flag = True, ""
        elif word in _CLOSE:
            self._pieces.append(_CLOSE[word])
            self._joined, self._flag = False, ""
        elif word in ("Ns", "Ap"):
            self._pieces += ["'"] if word == "Ap" else []
            self._joined, self._flag = True, ""
        elif word == "Fl":
            self._begin_flag(rest)
        elif word in ("Pf", "Xr") and rest:
            return self._take_two(word, rest)
        elif word in _PLAIN:
            self._flag = ""
            self._implied(word, rest)
        else:
            self._joined = self._joined or word in _BEFORE
            self._put(word if word in _BEFORE else self._flag + word)
            self._joined = word in _AFTER
        return 1

    def text(self) -> str:
        ending = []
        while self._closing and self._pieces and self._pieces[-1] in _BEFORE:
            ending.append(self._pieces.pop())  # the full stop stands behind the quote
        return "".join(self._pieces + self._closing[::-1] + ending[::-1]).strip()

    def _begin_flag(self, rest: list[str]) -> None:
        self._flag = "-"
        if not rest or rest[0] in _PLAIN or rest[0] in _CLOSE:
            self._put("-")
            self._joined, self._flag = True, ""

    def _take_two(self, word: str, rest: list[str]) -> int:
        """Pf joins its word to the next; Xr names a page and its section."""
        section = word == "Xr" and len(rest) > 1 and re.fullmatch(r"\d\w*", rest[1]) is not None
        self._put(f"{rest[0]}({rest[1]})" if section else rest[0])
        self._joined, self._flag = word == "Pf", ""
        return 2 + section

    def _implied(self, word: str, rest: list[str]) -> None:
        """What a macro without words stands for."""
        if word in _SYSTEMS or (word == "Nm" and (not rest or rest[0] in _PLAIN or rest[0] in _QUOTES)):
            self._put(_SYSTEMS.get(word, self._name))
            self._joined = False
        elif word == "Ar" and (not rest or rest[0] in _BEFORE):
            self._put("file ...")
            self._joined = False

    def _put(self, text: str) -> None:
        if self._pieces and not self._joined:
            self._pieces.append(" ")
        self._pieces.append(text)

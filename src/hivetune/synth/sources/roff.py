"""Manual pages from their source: the macros of man(7) and of mdoc(7).

man-db, pod2man, help2man, DocBook and AsciiDoc write man(7); the BSDs and OpenSSH write mdoc(7). Only the structure is
read: headings, tagged paragraphs, indentation, verbatim text. The language itself (conditions, registers, own macros)
is left out, as in a terminal it changes the look alone.
"""

import re
from collections.abc import Iterator

from hivetune.synth.sources.page import DocBlock

# groff_char(7), what manual pages use of it.
CHARACTERS = {
    "aq": "'", "dq": '"', "oq": "'", "cq": "'", "lq": '"', "rq": '"', "bu": "*", "em": "-", "en": "-", "hy": "-",
    "mi": "-", "ha": "^", "ti": "~", "ga": "`", "rs": "\\", "ul": "_", "ba": "|", "co": "(c)", "rg": "(R)",
    "tm": "(TM)", "<=": "<=", ">=": ">=", "!=": "!=", "->": "->", "<-": "<-", "+-": "+-", "mu": "x", "de": " degrees",
    "at": "@", "sh": "#", "Do": "$", "la": "<", "ra": ">", "lB": "[", "rB": "]", "lC": "{", "rC": "}", "sl": "/",
    "fo": "<", "fc": ">", "Fo": '"', "Fc": '"', "bq": ",", "Bq": ",,", "ss": "ss", "aa": "'", "rh": "=>", "pl": "+",
    "eq": "=", "**": "*", "ci": "o", "sq": "*", "dg": "+", "dd": "++", "ae": "ae", "mc": "u", "*m": "u", "is": "",
}  # fmt: skip
# Predefined strings: of man(7), of pod2man, and of mdoc(7), in which dash(1) and file(1) write < and >.
STRINGS = {"Am": "&", "Ba": "|", "Ge": ">=", "Gt": ">", "If": "infinity", "Le": "<=", "Lq": '"', "Lt": "<", "Na": "NaN",
           "Ne": "!=", "Pi": "pi", "Pm": "+-", "Rq": '"', "q": '"',
           "Aq": "'", "lq": '"', "rq": '"', "C'": "'", 'C`': '"', "R": "(R)", "Tm": "(TM)", "L\"": '"', "R\"": '"',
           "-D": "-", "C+": "C++", "PI": "pi", "L'": "'", "R'": "'"}  # fmt: skip
_ESCAPE = re.compile(
    r"""\\(?:
      f(?:\[[^\]]*\]|\(..|.)            # font
    | [sg](?:\[[^\]]*\]|'[^']*'|[+-]?\(?\d{1,2}|.)   # size
    | [mMFHSYV](?:\[[^\]]*\]|\(..|.)    # colour, family
    | \*\[(?P<string>[^\]]*)\] | \*\((?P<string2>..) | \*(?P<string1>.)
    | n[+-]?(?:\[[^\]]*\]|\(..|.)       # register
    | \[(?P<named>[^\]]*)\] | \((?P<two>..) | C'(?P<quoted>[^']*)'
    | [hvwbDlLNoRxXZAB]'[^']*'          # motions and the like
    | k(?:\(..|.)
    | (?P<one>.)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ONE = {"-": "-", "e": "\\", "\\": "\\", "'": "'", "`": "`", " ": " ", "~": " ", "0": " ", "t": "\t", "E": "\\",
        ".": ".", "_": "_", "&": "", "/": "", ",": "", "|": "", "^": "", "%": "", ":": "", "c": "", "{": "", "}": "",
        "d": "", "u": "", "p": "", ")": "", "z": "", "r": "", "a": ""}  # fmt: skip
_FONT_MACROS = {"B", "I", "R", "SM", "SB"}
_ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}
_BREAKS = {"PP", "P", "LP", "sp", "br", "Sp", "HP"}
_VERBATIM_ON = {"nf", "EX", "Vb"}
_VERBATIM_OFF = {"fi", "EE", "Ve"}
_COMMENT = re.compile(r'(?<!\\)\\".*$')
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def plain(text: str) -> str:
    """Return text without escapes: fonts and motions go, characters stay."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    for name in ("string", "string2", "string1"):
        if found[name] is not None:
            return STRINGS.get(found[name], "")
    for name in ("named", "two", "quoted"):
        if found[name] is not None:
            return _named(found[name])
    one = found["one"]
    return "" if one is None else _ONE.get(one, one)


def _named(name: str) -> str:
    if re.fullmatch(r"u[0-9A-F]{4,6}", name):
        code = int(name[1:], 16)
        return "" if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF else chr(code)
    if len(name) > 2 and name[-1] in "'`^:~,":  # accents, as in \['e]
        return name[0]
    return CHARACTERS.get(name, name[1] if len(name) == 2 and name[0] in "'`^:~," else "")


def arguments(text: str) -> list[str]:
    """Return the arguments of a macro: words, or text in double quotes."""
    return [
        plain(quoted.replace('""', '"')) if quoted or not word else plain(word)
        for quoted, word in _ARGUMENT.findall(text.replace("\\ ", "\\~"))
    ]


def logical_lines(source: str) -> Iterator[str]:
    """Yield lines without comments, macro definitions and conditions; continued lines are joined."""
    lines = iter(source.replace("\\\n", "").splitlines())
    for line in lines:
        if line.startswith((".de", ".am", ".ig", "'de", "'ig")):
            _skip_definition(line, lines)
            continue
        if line.startswith((".ie", ".if", ".el")):
            for_terminal = line.startswith((".ie n", ".if n"))
            kept = _condition(line)
            if kept.rstrip().endswith(("\\{", "\\{\\")):
                if not for_terminal:
                    _skip_block(lines)
                continue
            if not for_terminal:
                continue
            line = kept
        line = _COMMENT.sub("", line)
        if not line.startswith((".\\}", "'\\}", "\\}")) and line.strip() not in (".", "'"):
            yield line


def _skip_definition(line: str, lines: Iterator[str]) -> None:
    """Skip a macro's body, or text that is ignored, up to the line that ends it."""
    words = line.split()
    at = 1 if line[1:3] == "ig" else 2
    end = words[at] if len(words) > at else "."
    for inner in lines:
        if inner.replace(" ", "").startswith((f".{end}", f"'{end}")):
            return


def _condition(line: str) -> str:
    """Return what stands behind the condition."""
    parts = line.split(None, 2 if not line.startswith(".el") else 1)
    return parts[-1] if len(parts) > 1 else ""


def _skip_block(lines: Iterator[str]) -> None:
    depth = 1
    for line in lines:
        depth += line.count("\\{") - line.count("\\}")
        if depth <= 0:
            return


class Builder:
    """Blocks as they grow: text lines are joined until something ends the paragraph."""

    def __init__(self) -> None:
        self.blocks: list[DocBlock] = []
        self.depth = 0
        self.verbatim = False
        self._lines: list[str] = []

    def add(self, text: str) -> None:
        if self.verbatim or text.strip():
            self._lines.append(text.rstrip() if self.verbatim else text.strip())

    def end(self) -> None:
        """End the paragraph."""
        if any(line.strip() for line in self._lines):
            kind = "code" if self.verbatim else "text"
            joined = "\n".join(self._lines).strip("\n") if self.verbatim else " ".join(self._lines)
            self.blocks.append(DocBlock("code" if kind == "code" else "text", self.depth, joined))
        self._lines = []

    def heading(self, text: str, *, sub: bool) -> None:
        self.end()
        self.depth, self.verbatim = 0, False
        self.blocks.append(DocBlock("subheading" if sub else "heading", 0, text.strip()))

    def term(self, text: str) -> None:
        self.end()
        if text.strip():
            self.blocks.append(DocBlock("term", self.depth, " ".join(text.split())))


def blocks_of_man(source: str) -> list[DocBlock]:
    """Return the blocks of a page that is written with man(7)."""
    build = Builder()
    wait = ""  # what the next line is: a heading or a term
    skipping = ""
    for line in logical_lines(source):
        if skipping:
            skipping = "" if line.startswith(f".{skipping}") else skipping
            continue
        name, rest = _macro(line)
        if name in ("TS", "EQ", "PS"):
            build.end()
            skipping = {"TS": "TE", "EQ": "EN", "PS": "PE"}[name]
            continue
        text = _text_of(name, rest, line)
        if wait and text is not None and text.strip():
            if wait == "TP":
                build.term(text)
            else:
                build.heading(text, sub=wait == "SS")
            wait = ""
        elif text is not None:
            if not line.strip() and not build.verbatim:
                build.end()
            else:
                build.add(text)
        else:
            wait = _structure(build, name, rest) or wait
    build.end()
    return build.blocks


def _macro(line: str) -> tuple[str, str]:
    if not line.startswith((".", "'")) or line.startswith("'\\"):
        return "", line
    name, _, rest = line[1:].lstrip().partition(" ")
    return name.strip(), rest.strip()


def _text_of(name: str, rest: str, line: str) -> str | None:
    """Return the text of a line; None for a macro that is structure, or nothing."""
    if not name:
        return plain(line)
    if name in _FONT_MACROS:
        return " ".join(arguments(rest)) or None
    if name in _ALTERNATING:
        return "".join(arguments(rest))
    if name in ("UR", "MT"):
        return " ".join(arguments(rest))
    if name == "OP":
        return "[" + " ".join(arguments(rest)) + "]"
    if name in ("SY",):
        return " ".join(arguments(rest))
    return None


def _structure(build: Builder, name: str, rest: str) -> str:
    """Change the page as the macro says; return "TP", "SH" or "SS" where the next line is what counts."""
    if name in ("SH", "SS") and rest:
        build.heading(" ".join(arguments(rest)), sub=name == "SS")
    elif name in ("SH", "SS", "TP", "TQ"):
        build.end()
        return "TP" if name == "TQ" else name
    elif name == "IP":
        _tagged(build, rest)
    elif name in ("RS", "RE"):
        build.end()
        build.depth = max(0, build.depth + (1 if name == "RS" else -1))
    elif name in _VERBATIM_ON or name in _VERBATIM_OFF:
        build.end()
        build.verbatim = name in _VERBATIM_ON
    elif name in _BREAKS and build.verbatim:
        build.add("")
    elif name in _BREAKS and name != "br":
        build.end()
    return ""


def _tagged(build: Builder, rest: str) -> None:
    """Begin a paragraph with a tag in front: a term, or a bullet."""
    tag = (arguments(rest) or [""])[0].strip()
    if len(tag) > 1 or tag.isdigit():
        build.term(tag)
        return
    build.end()
    if tag:
        build.add("-")


# mdoc(7)

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
    """Return the blocks of a page that is written with mdoc(7)."""
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
    """Follow a macro that divides the page; return False for one that is text."""
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
    """Return a macro that goes on over several lines, from Xo to Xc."""
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
    """Return a line of macros as text: -l [user@]host."""
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
        """Take one word, and return how many words that were."""
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
        """Take a macro and its word: Pf joins it to the next; Xr names a page and its section."""
        section = word == "Xr" and len(rest) > 1 and re.fullmatch(r"\d\w*", rest[1]) is not None
        self._put(f"{rest[0]}({rest[1]})" if section else rest[0])
        self._joined, self._flag = word == "Pf", ""
        return 2 + section

    def _implied(self, word: str, rest: list[str]) -> None:
        """Put what a macro without words stands for."""
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

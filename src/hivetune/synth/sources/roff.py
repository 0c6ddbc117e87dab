"""Manual pages from their source: the macros of man(7), as man-db, pod2man, help2man, DocBook and AsciiDoc write them.

Only what says something about the structure is read: headings, tagged paragraphs, indentation, verbatim text. The
language itself (conditions, registers, own macros) is left out, as in a terminal it changes the look alone.
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
STRINGS = {"Aq": "'", "lq": '"', "rq": '"', "C'": "'", 'C`': '"', "R": "(R)", "Tm": "(TM)", "L\"": '"', "R\"": '"',
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
    """Text without escapes: fonts and motions go, characters stay."""
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
    """The arguments of a macro: words, or text in double quotes."""
    return [
        plain(quoted.replace('""', '"')) if quoted or not word else plain(word)
        for quoted, word in _ARGUMENT.findall(text.replace("\\ ", "\\~"))
    ]


def logical_lines(source: str) -> Iterator[str]:
    """Lines without comments, macro definitions and conditions; continued lines are joined."""
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
    """A macro's body, or text that is ignored, up to the line that ends it."""
    words = line.split()
    at = 1 if line[1:3] == "ig" else 2
    end = words[at] if len(words) > at else "."
    for inner in lines:
        if inner.replace(" ", "").startswith((f".{end}", f"'{end}")):
            return


def _condition(line: str) -> str:
    """What stands behind the condition."""
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
        """The paragraph ends here."""
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
    """The blocks of a page that is written with man(7)."""
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
    """The text of a line; None for a macro that is structure, or nothing."""
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
    """What the macro does to the page; "TP", "SH" or "SS" where the next line is what counts."""
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
    """A paragraph with a tag in front: a term, or a bullet."""
    tag = (arguments(rest) or [""])[0].strip()
    if len(tag) > 1 or tag.isdigit():
        build.term(tag)
        return
    build.end()
    if tag:
        build.add("-")

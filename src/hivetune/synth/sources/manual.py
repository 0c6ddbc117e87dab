"""One manual page from its file: compressed or not, written with man(7) or mdoc(7)."""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hivetune.synth.sources.page import DocBlock, DocPage, NotUnderstood
from hivetune.synth.sources.structure import page_of

MAX_BYTES = 4 << 20  # the longest page here, of a compiler, has 1.5 MB
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NAME = re.compile(r"(?P<name>.+)\.(?P<section>\d\w*|n|l)$")


def read_manual(path: Path) -> DocPage:
    """Read one page.

    Raises NotUnderstood for a file that can't be read, is too large, an alias (.so) or documents nothing.
    """
    name, section = name_of(path)
    text = read_packed(path)
    if text.lstrip().startswith(".so "):
        raise NotUnderstood("alias of another page")
    typed = re.fullmatch(r"[168]|1\w+|8\w+", section)  # these sections document what is typed
    return page_of(blocks_in(text), path, f"{name}({section})", command=name if typed else None)


def name_of(path: Path) -> tuple[str, str]:
    """Return ("systemctl", "1") for systemctl.1.gz."""
    stem = path.stem if path.suffix in _OPENERS else path.name
    match = _NAME.fullmatch(stem)
    return (match["name"], match["section"]) if match else (stem, "1")


def read_packed(path: Path) -> str:
    """Return the text of a file that may be compressed. Raises NotUnderstood."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise NotUnderstood(f"can't be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise NotUnderstood(f"larger than {MAX_BYTES >> 20} MiB")
    if b"\0" in data[:4096]:
        raise NotUnderstood("not text")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def blocks_in(text: str) -> list[DocBlock]:
    """Return the blocks of a page in man(7) or mdoc(7); none of any other text."""
    if re.search(r"^\.Sh\b", text, re.MULTILINE):
        return blocks_of_mdoc(text)
    return blocks_of_man(text) if re.search(r"^['.]\s*(SH|TH)\b", text, re.MULTILINE) else []


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
_ESCAPES = {"-": "-", "e": "\\", "\\": "\\", "'": "'", "`": "`", " ": " ", "~": " ", "0": " ", "t": "\t", "E": "\\",
        ".": ".", "_": "_", "&": "", "/": "", ",": "", "|": "", "^": "", "%": "", ":": "", "c": "", "{": "", "}": "",
        "d": "", "u": "", "p": "", ")": "", "z": "", "r": "", "a": ""}  # fmt: skip
# man(7): macros of fonts and links are text, with what joins their arguments.
TEXT_MACROS = dict.fromkeys(("B", "I", "R", "SM", "SB", "UR", "MT", "SY"), " ") | dict.fromkeys(
    ("BR", "RB", "BI", "IB", "IR", "RI"), ""
)
BREAKS = {"PP", "P", "LP", "sp", "Sp", "HP"}
VERBATIM = dict.fromkeys(("nf", "EX", "Vb"), True) | dict.fromkeys(("fi", "EE", "Ve"), False)
UNREAD = {"TS": "TE", "EQ": "EN", "PS": "PE"}  # tables, equations and pictures, with what ends them
_COMMENT = re.compile(r'(?<!\\)\\".*$')
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def plain(text: str) -> str:
    """Return text without escapes: fonts and motions go, characters stay."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    """Return what an escape stands for; fonts, sizes and motions stand for nothing."""
    groups = match.groupdict()
    for group in ("string", "string2", "string1"):
        if groups[group] is not None:
            return STRINGS.get(groups[group], "")
    name = groups["named"] or groups["two"] or groups["quoted"]
    if name is None:
        return "" if groups["one"] is None else _ESCAPES.get(groups["one"], groups["one"])
    if re.fullmatch(r"u[0-9A-F]{4,6}", name):
        code = int(name[1:], 16)
        return "" if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF else chr(code)
    if len(name) > 2 and name[-1] in "'`^:~,":  # an accent, as in \['e]
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
            arguments_of_line = line.split()[1 if line[1:3] == "ig" else 2 :]
            end = arguments_of_line[0] if arguments_of_line else "."
            for inner in lines:
                if inner.replace(" ", "").startswith((f".{end}", f"'{end}")):
                    break
            continue
        if line.startswith((".ie", ".if", ".el")):
            for_terminal = line.startswith((".ie n", ".if n"))
            _, *rest = line.split(None, 1 if line.startswith(".el") else 2)
            line = rest[-1] if rest else ""
            if line.rstrip().endswith(("\\{", "\\{\\")):
                depth = 0 if for_terminal else 1
                while depth > 0 and (block_line := next(lines, None)) is not None:
                    depth += block_line.count("\\{") - block_line.count("\\}")
                continue
            if not for_terminal:
                continue
        line = _COMMENT.sub("", line)
        if not line.startswith((".\\}", "'\\}", "\\}")) and line.strip() not in (".", "'"):
            yield line


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
            joined = "\n".join(self._lines).strip("\n") if self.verbatim else " ".join(self._lines)
            self.blocks.append(DocBlock("code" if self.verbatim else "text", self.depth, joined))
        self._lines = []

    def paragraph(self) -> None:
        """Begin a new paragraph; within verbatim text it is an empty line."""
        if self.verbatim:
            self.add("")
        else:
            self.end()

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
    wait = ""  # TP, SH or SS: the next text is a term or a heading
    skip_to = ""
    for line in logical_lines(source):
        if skip_to:
            skip_to = "" if line.startswith(f".{skip_to}") else skip_to
            continue
        name, rest = "", line
        if line.startswith((".", "'")) and not line.startswith("'\\"):
            name, _, rest = line[1:].lstrip().partition(" ")
            name, rest = name.strip(), rest.strip()
        operands = arguments(rest) if name else []
        text = None if name else plain(line)
        if name in TEXT_MACROS:
            text = TEXT_MACROS[name].join(operands)
        elif name == "OP":
            text = f"[{' '.join(operands)}]"
        if wait and text and text.strip():
            if wait == "TP":
                build.term(text)
            else:
                build.heading(text, sub=wait == "SS")
            wait = ""
        elif text is not None:
            if name or line.strip() or build.verbatim:
                build.add(text)
            else:
                build.end()
        elif name in UNREAD:
            build.end()
            skip_to = UNREAD[name]
        elif name in ("SH", "SS") and rest:
            build.heading(" ".join(operands), sub=name == "SS")
        elif name in ("SH", "SS", "TP", "TQ"):
            build.end()
            wait = "TP" if name == "TQ" else name
        elif name == "IP":
            tag = operands[0].strip() if operands else ""
            if len(tag) > 1 or tag.isdigit():
                build.term(tag)
            else:
                build.end()
                build.add("-" if tag else "")
        elif name in ("RS", "RE"):
            build.end()
            build.depth = max(0, build.depth + (1 if name == "RS" else -1))
        elif name in VERBATIM:
            build.end()
            build.verbatim = VERBATIM[name]
        elif name in BREAKS:
            build.paragraph()
    build.end()
    return build.blocks


# mdoc(7)

QUOTES = {"Dq": '""', "Sq": "''", "Ql": "''", "Pq": "()", "Qq": '""', "Op": "[]", "Aq": "<>", "Bq": "[]", "Brq": "{}"}
OPEN = {"Oo": "[", "Ao": "<", "Bo": "[", "Bro": "{", "Do": '"', "Po": "(", "Qo": '"', "So": "'"}
CLOSE = {"Oc": "]", "Ac": ">", "Bc": "]", "Brc": "}", "Dc": '"', "Pc": ")", "Qc": '"', "Sc": "'"}
PLAIN = {"Ar", "Cm", "Ic", "Pa", "Ev", "No", "Li", "Em", "Sy", "Va", "Vt", "Dv", "Er", "Fa", "Ft", "Tn", "Ad", "An",
         "Lk", "Mt", "Ms", "Cd", "St", "Nm", "Fn", "In", "Ox", "Nx", "Fx", "Bx", "Ux", "At", "D1", "Dl"}  # fmt: skip
SYSTEMS = {"Ox": "OpenBSD", "Nx": "NetBSD", "Fx": "FreeBSD", "Bx": "BSD", "Ux": "UNIX", "At": "AT&T UNIX"}
SKIPPED = {"Dd", "Dt", "Os", "Bk", "Ek", "Rs", "Re", "Sm", "Bf", "Ef", "Tg", "Db", "Lb", "Rv"}
BEFORE, AFTER = set(".,:;)]?!"), set("([")  # marks that stand close to the word before, or behind
TAGGED_LISTS = {"-tag", "-hang", "-ohang", "-diag", "-inset"}


def blocks_of_mdoc(source: str) -> list[DocBlock]:
    """Return the blocks of a page that is written with mdoc(7)."""
    build = Builder()
    name = ""
    lists: list[bool] = []  # the open lists: whether their items have tags
    lines = logical_lines(source)
    for line in lines:
        if not line.startswith("."):
            if line.strip() or build.verbatim:
                build.add(plain(line))
            else:
                build.end()
            continue
        operands = arguments(line[1:].strip())
        if "Xo" in operands:  # goes on over several lines, up to Xc
            while "Xc" not in operands:
                line = next(lines, ".Xc")
                operands += arguments(line.removeprefix(".").strip())
            spaced = " ".join(operands).replace(" Sm off", "").replace(" Sm on", "")
            operands = [word for word in spaced.split() if word not in ("Xo", "Xc")]
        if not operands:
            continue
        macro, *rest = operands
        if macro == "Nm" and rest and not name:
            name = rest[0]
        if macro in ("Sh", "Ss"):
            build.heading(spoken(rest, name), sub=macro == "Ss")
        elif macro in ("Pp", "Lp"):
            build.paragraph()
        elif macro in ("Bd", "Ed"):
            build.end()
            build.verbatim = macro == "Bd" and ("-literal" in rest or "-unfilled" in rest)
        elif macro in ("Dl", "D1"):
            build.end()
            build.blocks.append(DocBlock("code", build.depth, spoken(rest, name)))
        elif macro == "Bl":
            build.end()
            build.depth += bool(lists)
            lists.append(bool(TAGGED_LISTS & {*rest}))
        elif macro == "El":
            build.end()
            if lists:
                lists.pop()
                build.depth = max(0, build.depth - bool(lists))
        elif macro == "It" and lists and lists[-1]:
            build.term(spoken(rest, name))
        elif macro == "It":
            build.end()
            build.add(f"- {spoken(rest, name)}")
        elif macro == "Nd":
            build.add(f"{name} - {' '.join(rest)}")
        elif macro == "Ex":
            build.add(f"The {name} utility exits 0 on success, and >0 if an error occurs.")
        elif macro not in SKIPPED:
            build.add(spoken(operands, name))
    build.end()
    return build.blocks


def spoken(words: list[str], name: str) -> str:
    """Return a line of macros as text, such as -l [user@]host. `name`: what Nm stands for."""
    pieces: list[str] = []
    closing = ""  # of the quotes that the rest of the line stands in
    flag = ""  # begins each of the next words
    joined = False  # the next piece follows without a blank

    def put(text: str, *, joins: bool = False) -> None:
        nonlocal joined
        pieces.append(text if joined or not pieces else f" {text}")
        joined = joins

    at = 0
    while at < len(words):
        word, following = words[at], words[at + 1 :]
        ends = not following or following[0] in PLAIN
        at += 1
        if word in QUOTES or word in OPEN:
            put(QUOTES[word][0] if word in QUOTES else OPEN[word], joins=True)
            closing = QUOTES[word][1] + closing if word in QUOTES else closing
            flag = ""
        elif word in CLOSE:
            pieces.append(CLOSE[word])
            joined, flag = False, ""
        elif word in ("Ns", "Ap"):
            pieces += ["'"] if word == "Ap" else []
            joined, flag = True, ""
        elif word == "Fl":
            flag = "--" if words[at - 2 : at - 1] == ["Fl"] else "-"  # Fl Fl name is --name
            if ends or following[0] in CLOSE:
                put("-", joins=True)
                flag = ""
        elif word in ("Pf", "Xr") and following:
            at += 1
            if word == "Xr" and len(following) > 1 and re.fullmatch(r"\d\w*", following[1]):
                at += 1
                put(f"{following[0]}({following[1]})")
            else:
                put(following[0], joins=word == "Pf")
            flag = ""
        elif word in PLAIN:
            flag = ""
            if word in SYSTEMS or (word == "Nm" and (ends or following[0] in QUOTES)):
                put(SYSTEMS.get(word, name))
            elif word == "Ar" and (not following or following[0] in BEFORE):
                put("file ...")
        elif word in BEFORE:
            joined = True
            put(word)
        else:
            put(flag + word, joins=word in AFTER)
    ending = ""
    while closing and pieces and pieces[-1] in BEFORE:
        ending = pieces.pop() + ending  # the full stop stands behind the quote
    return ("".join(pieces) + closing + ending).strip()

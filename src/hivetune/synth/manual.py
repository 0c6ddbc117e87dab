"""Manual pages as `man` renders them.

`man` marks bold and italic letters by overstriking. Italics are placeholders, so a name ends where they begin: that
tells the option -u with its argument USER from an option -uUSER.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.synth.page import DocEntry, DocPage, EntryKind, NotUnderstood

WIDTH = 2000  # columns, so that nearly every paragraph is one line
TIMEOUT_S = 20.0
MAX_TERM_CHARS = 160
_OPTION_TERM = re.compile(r"--?[A-Za-z0-9?#@]")
# A number is an option only as a single digit: `-0`, but neither `-1d` nor `-4w`, which are times.
_OPTION_NAME = re.compile(r"--[A-Za-z0-9][\w+.-]*|-[A-Za-z?#@][\w+.-]*|-\d")
_DIRECTIVE = re.compile(r"(?=[A-Z0-9]*[a-z])[A-Z][A-Za-z0-9]+=")
_OF_COMMANDS = re.compile(r"COMMAND|SUBCOMMAND|ACTION|VERB|OPERATION")  # headings above sub-commands
# Headings above options of a part of the command: "OPTIONS FOR PERF SCHED TIMEHIST" in perf-sched(1), "SUBSYSTEM" in
# perf-bench(1), and "REPORT OPTIONS" in perf-lock(1), whose synopsis has the word.
_OF_A_PART = re.compile(r"\bOPTIONS? (?:FOR|OF)\b|\b(?:SUB-?SYSTEM|SUITE)S?\b", re.IGNORECASE)
_OPTIONS_OF = re.compile(r"(?:^|: )(\S+) OPTIONS$", re.IGNORECASE)
_LEFT_OUT = re.compile(
    r"^(NAME|SYNOPSIS|SEE ALSO|AUTHORS?|COPYRIGHT|LICEN[SC]E|HISTORY|REPORTING|BUGS?|COLOPHON|VERSION|RESOURCES"
    r"|ACKNOWLEDG|CREDITS|WWW|NOTES|AVAILABILITY|GIT$|TRADEMARK|DISTRIBUTION|CONTRIBUT|EXAMPLES?$)",
    re.IGNORECASE,
)  # headings that say who wrote it, or show calls, not how it works


def read_manual(path: Path) -> DocPage:
    """Read one page. Raises NotUnderstood for a file that can't be read, and for one without entries."""
    name, section = name_of(path)
    variables = {"MANWIDTH": str(WIDTH), "MAN_KEEP_FORMATTING": "1", "GROFF_NO_SGR": "1", "LC_ALL": "C.UTF-8"}
    command = ["man", "--local-file", "--encoding=ascii", "--pager=cat", "--no-hyphenation", "--no-justification"]
    environment = {**os.environ, **variables}
    try:
        shown = subprocess.run(
            [*command, "--", str(path)], capture_output=True, timeout=TIMEOUT_S, check=False, env=environment
        )
    except OSError as error:
        raise NotUnderstood(f"man can't be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise NotUnderstood(f"man did not end in {TIMEOUT_S:.0f} s") from None
    lines = [decode(line) for line in shown.stdout.decode("ascii", "replace").splitlines()[1:-1]]
    is_typed = section[0] in "168"  # these sections document what is typed
    return page_of(lines, path, f"{name}({section})", command=name if is_typed else None)


def name_of(path: Path) -> tuple[str, str]:
    """Return ("systemctl", "1") for systemctl.1.gz."""
    stem = path.stem if path.suffix in (".gz", ".bz2", ".xz", ".zst") else path.name
    match = re.fullmatch(r"(.+)\.(\d\w*|n|l)", stem)
    return (match[1], match[2]) if match else (stem, "1")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of rendered text. `italic` has an "i" at the position of each italic letter, or is empty."""

    text: str
    italic: str = ""

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())


NO_LINE = Line("")


def decode(raw: str) -> Line:
    """Return the line without overstriking: `_`, backspace, `x` becomes an italic x."""
    if "\b" not in raw:
        return Line(raw.rstrip())
    letters, italic, at = list[str](), list[str](), 0
    while at < len(raw):
        first, style = raw[at], " "
        while raw[at + 1 : at + 2] == "\b" and at + 2 < len(raw):
            is_underlined = raw[at] == "_" and (raw[at + 2] != "_" or italic[-1:] == ["i"])
            first, style = raw[at + 2], "i" if is_underlined else style
            at += 2
        letters.append(first)
        italic.append(style)
        at += 1
    return Line("".join(letters).rstrip(), "".join(italic))


def page_of(lines: Sequence[Line], path: Path, label: str, *, command: str | None) -> DocPage:
    """Return a page made of rendered lines. `command`: its name, if the page documents a command that is typed.

    Raises NotUnderstood if the page documents nothing.
    """
    text = "\n".join(line.text for line in lines)
    sections = list(_sections(lines))
    below = {heading: body for heading, body in reversed(sections)}
    named = (line.text.strip().partition(" - " if " - " in line.text else " -- ") for line in below.get("NAME", ()))
    summary = next((" ".join(rest.split()).rstrip(".") for _, dash, rest in named if dash), "")
    synopsis = tuple(with_placeholders(line).strip() for line in below.get("SYNOPSIS", ()) if line.text)
    words = {*re.findall(r"[a-z]+", " ".join(synopsis))}
    entries = [entry for heading, body in sections if _is_of_all(heading, words) for entry in _entries(heading, body)]
    typed = _typed(command, synopsis) if command else None
    if not entries and not (typed and summary):
        raise NotUnderstood("nothing is documented in a form that is understood")
    # A page may show an option twice: the first counts.
    unique = {(entry.kind, entry.names): entry for entry in reversed(entries)}
    return DocPage(
        label,
        path,
        command=typed,
        summary=summary,
        entries=tuple(_without_shared(list(reversed(unique.values())))),
        has_commands=any(_OF_COMMANDS.search(heading.upper()) for heading, _ in sections),
        text=text,
    )


def _is_of_all(heading: str, synopsis_words: Collection[str]) -> bool:
    """Return whether a section documents the whole command."""
    part = _OPTIONS_OF.search(heading)
    of_one = part is not None and part[1].lower() in synopsis_words
    return not (of_one or _LEFT_OUT.match(heading) or _OF_A_PART.search(heading))


def _without_shared(entries: Sequence[DocEntry]) -> Iterator[DocEntry]:
    """Yield the entries without names that another entry has too: systemd-cgtop(1) documents `-p, --order=path` and
    `-t, --order=tasks`, and neither describes `--order`.
    """
    counts = Counter((entry.kind, name) for entry in entries for name in entry.names)
    for entry in entries:
        if names := tuple(name for name in entry.names if counts[entry.kind, name] == 1):
            yield replace(entry, names=names)


def with_placeholders(line: Line, *, glued: bool = False) -> str:
    """Return the text with each italic word as <word>, a placeholder.

    If a line begins in italics, those words are the command, as in Git's pages. `glued`: replace only words directly
    after a letter.
    """
    marked = line.text
    for match in reversed(list(re.finditer(r"i+", line.italic[: len(line.text)]))):
        before = zip(line.text[: match.start()], line.italic, strict=False)
        if all(style == "i" or letter == " " for letter, style in before):
            continue
        word = line.text[match.start() : match.end()]
        if not word.isupper() and (line.text[match.start() - 1].isalnum() or not glued):
            marked = f"{marked[: match.start()]}<{word}>{marked[match.end() :]}"
    return marked


def _sections(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    heading, title = "", ""
    body: list[Line] = []
    for at, line in enumerate(lines):
        behind = next((after for after in lines[at + 1 : at + 3] if after.text), NO_LINE)
        is_sub = 0 < line.indent <= 3 and behind.indent > line.indent and not line.italic
        if line.text and (line.indent == 0 or is_sub) and not _OPTION_TERM.match(line.text.strip()):
            yield title, body
            shown = line.text.strip().rstrip(":")
            heading, title = (heading, f"{heading}: {shown}") if line.indent else (shown, shown)
            body = []
        else:
            body.append(line)
    yield title, body


def _entries(heading: str, body: Sequence[Line]) -> Iterator[DocEntry]:
    """Yield each term with the paragraphs that are indented below it, or that follow it on its line."""
    at = 0
    while at < len(body):
        terms, first, start = _terms_at(body, at)
        if not terms:
            at += 1
            continue
        text = _text_below(body, start, terms[-1].indent, first).removeprefix("- ")
        is_prose = len(re.findall(r"\b[a-z]{2,}\b", text)) >= 2  # else a row of a table, such as bzip2(1)'s sizes
        together = len(terms) > 1 and all(term.text.strip().startswith("-") for term in terms)
        for group in [terms] if together else [[term] for term in terms]:
            usage = ", ".join(" ".join(with_placeholders(term, glued=True).split()) for term in group).rstrip(":")
            kind = _kind(usage, heading) if is_prose and len(usage) <= MAX_TERM_CHARS else None
            if kind is not None and (names := _names(kind, usage, group)):
                yield DocEntry(kind, names, usage, text, heading)
        at = start


def _terms_at(body: Sequence[Line], at: int) -> tuple[list[Line], str, int]:
    """Return the terms of one text that begin at a line, the text on the last one's line, and the next line."""
    terms: list[Line] = []
    while at < len(body):
        line = body[at]
        if not line.text or (terms and line.indent != terms[0].indent):
            break
        if split := _same_line(line):
            term = Line(line.text[:split].rstrip(), line.italic[:split])
            return ([*terms, term], line.text[split:].strip(), at + 1) if _looks_like_term(term.text) else ([], "", at)
        below = body[at + 1] if at + 1 < len(body) else NO_LINE
        is_deeper = bool(below.text) and below.indent > line.indent
        has_more = bool(below.text) and below.indent == line.indent and _looks_like_term(below.text)
        if not _looks_like_term(line.text) or not (is_deeper or has_more):
            break
        terms.append(line)
        at += 1
        if is_deeper:
            return terms, "", at
    return [], "", at


def _same_line(line: Line) -> int | None:
    """Return the column of the text on its term's line, None where the line is a term or prose alone."""
    if gap := re.search(r"(?<=\S)\s{2,}(?=\S)", line.text[line.indent :]):
        term = line.text[line.indent :][: gap.start()]
        # Of other terms than options, only those that leave their text its usual place: no columns of a table.
        in_place = term.startswith("-") or (gap.end() <= 8 and " " not in term)
        if in_place and term[-1] not in ".:;,!?" and len(term) <= 60:
            return line.indent + gap.end()
    column = line.indent + 7  # man(7) indents by seven; a term of six letters leaves one blank
    is_tag = _OPTION_TERM.match(line.text.strip()) and line.text[column - 1 : column] == " "
    return column if is_tag and line.text[column : column + 1].isupper() else None


def _looks_like_term(text: str) -> bool:
    text = text.strip()
    is_plain = text.endswith("...") or not text.endswith((".", ":", ";", ",", "!", "?"))
    return 0 < len(text) <= MAX_TERM_CHARS and is_plain and not text.startswith(("- ", "o ", "* ", "$ ", "# "))


def _text_below(body: Sequence[Line], start: int, indent: int, first: str) -> str:
    """Return the paragraphs of one entry, up to the first deeper or unindented line.

    A deeper line is an example or another list: the text continues after it, so what leads there is no whole sentence,
    and a colon marks it.
    """
    paragraphs = [first] if first else []
    depth = None
    for at in range(start, len(body)):
        line = body[at]
        if not line.text:
            continue
        if line.indent <= indent:
            break
        depth = line.indent if depth is None else depth
        below = body[at + 1] if at + 1 < len(body) else NO_LINE
        goes_on = paragraphs and (at > start or first) and body[at - 1].text
        is_unfilled = goes_on and paragraphs[-1].endswith((".", ":", ";"))  # an example or a table
        if line.indent != depth or (below.text and below.indent > depth) or is_unfilled:
            paragraphs.append(":")
            break
        # pg_basebackup(1) breaks a sentence after a name: "Creates a standby.signal", then "file and appends ...".
        is_broken_off = paragraphs and paragraphs[-1][-1].isalnum() and line.text.lstrip()[0].islower()
        if goes_on or is_broken_off:
            paragraphs[-1] = f"{paragraphs[-1]} {line.text.strip()}"
        else:
            paragraphs.append(line.text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _kind(term: str, heading: str) -> EntryKind | None:
    if _OPTION_TERM.match(term):  # below commands it is an option of one of them, as that of `ls` in sftp(1)
        return None if _OF_COMMANDS.search(heading.upper()) and "OPTION" not in heading.upper() else "option"
    return "directive" if _DIRECTIVE.match(term) else None


def _names(kind: EntryKind, usage: str, terms: Sequence[Line]) -> tuple[str, ...]:
    names = _DIRECTIVE.findall(usage) if kind == "directive" else [n for term in terms for n in _option_names(term)]
    # `-mdsp, -mno-dsp` of as(1) says what the first does.
    return tuple(name for name in dict.fromkeys(names) if not ({*_without_no(name)} & {*names}))


def _without_no(name: str) -> Iterator[str]:
    """Yield the possible opposites of an option: `--pager` for `--no-pager`, `-mdsp` for `-mno-dsp`."""
    for match in re.finditer(r"no-?", name):
        yield name[: match.start()] + name[match.end() :]


def _option_names(term: Line) -> Iterator[str]:
    """Yield the options of a term such as `-e[eof], --eof[=eof]`; italic letters belong to an argument."""
    for match in re.finditer(r"(?:^|(?<=[\s,|/(\[]))--?[^\s,|=\[\]<({]+", term.text):
        italic = term.italic[match.start() : match.end()].find("i")
        name = match[0] if italic < 0 else match[0][:italic]
        name = name.rstrip(".-+/)]") if len(name) > 2 else name
        if _OPTION_NAME.fullmatch(name):
            yield name


def _typed(name: str, synopsis: Sequence[str]) -> str | None:
    """Return the command line of a page: git-log(1) documents `git log`, apt-get(8) `apt-get`. The synopsis decides."""
    if name.endswith((".service", ".socket", ".target", ".mount", ".slice", ".path", ".timer")):
        return None
    for line in synopsis:
        words = line.split()
        for count in range(1, min(4, len(words)) + 1):
            joined = "-".join(words[:count])
            if joined == name or (count > 1 and name.startswith(f"{joined}-") and not words[count : count + 1]):
                return " ".join(words[:count])
        if words and name.startswith(f"{words[0]}."):
            return words[0]  # sar.sysstat(1) documents sar
    return name if not synopsis or " " in name else None

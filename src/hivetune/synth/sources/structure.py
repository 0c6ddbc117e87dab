"""From blocks to a page: which terms are options, commands, directives, files or exit codes, and what prose is left."""

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from hivetune.synth.sources.page import (
    DocBlock,
    DocEntry,
    DocPage,
    DocPassage,
    EntryKind,
    NotUnderstood,
)

MAX_TERM_CHARS = 160
_OPTION_TERM = re.compile(r"-{1,2}[A-Za-z0-9?#@]")
_OPTION_NAME = re.compile(r"(?<![\w-])(-{1,2}[A-Za-z0-9?#@][\w.+-]*|-\?)")
_DIRECTIVE = re.compile(r"[A-Z][A-Za-z0-9]+=")
_VARIABLE = re.compile(r"\$?[A-Z][A-Z0-9_]{2,}\b")
_FILE = re.compile(r"[~$]?[\w{}]*/[^\s,]+")
_STATUS = re.compile(r">?\d{1,3}\b")
_COMMAND = re.compile(r"[a-z][a-z0-9]*(?:[-_:][a-z0-9]+)*\b")
_SECTIONS: tuple[tuple[str, EntryKind], ...] = (
    (r"EXIT|RETURN VALUE|RETURN CODE|STATUS CODE", "status"),
    (r"ENVIRONMENT", "variable"),
    (r"^FILES|FILES$", "file"),
    (r"COMMAND|SUBCOMMAND|ACTION|VERB|OPERATION|FUNCTIONS MODE", "command"),
)
_LEFT_OUT = re.compile(
    r"^(NAME|SYNOPSIS|SEE ALSO|AUTHORS?|COPYRIGHT|LICEN[SC]E|HISTORY|REPORTING|BUGS?|COLOPHON|VERSION|RESOURCES"
    r"|REPORTING BUGS|ACKNOWLEDG|CREDITS|WWW|NOTES|AVAILABILITY|GIT$|TRADEMARK|DISTRIBUTION|CONTRIBUT)",
    re.IGNORECASE,
)  # headings that say who wrote it, not how it works


def page_of(blocks: Sequence[DocBlock], path: Path, label: str, *, command: str | None) -> DocPage:
    """Return the page made of these blocks. `command`: its name, if it is of a section for commands.

    Raises NotUnderstood when it documents nothing.
    """
    blocks = _with_terms(blocks)
    text = "\n".join(block.text for block in blocks)
    entries, passages = [], []
    for heading, body in sections_of(blocks):
        if _LEFT_OUT.match(heading):
            continue
        entries += list(_entries(heading, body))
        texts = [block.text for block in takewhile(lambda block: block.kind == "text", body)]
        if len(text_below := "\n\n".join(texts)) >= 80:
            passages.append(DocPassage(heading, text_below))
    if not entries and not passages:
        raise NotUnderstood("nothing is documented in a form that is understood")
    # The text after the hyphen in NAME.
    names = [block.text for block in blocks_below(blocks, "NAME")]
    parts = (name.partition(" - " if " - " in name else " -- ") for name in names)
    summary = next((" ".join(rest.split()).rstrip(".") for _, dash, rest in parts if dash), "")
    synopsis = tuple(block.text for block in blocks_below(blocks, "SYNOPSIS") if block.kind in ("text", "code"))
    typed = _typed(command, synopsis) if command else None
    entries = [e for e in entries if e.kind != "command" or _is_command_of(typed, e.names[0], synopsis, text)]
    unique: dict[tuple[str, tuple[str, ...]], DocEntry] = {}  # a page may show an option twice: the first counts
    for entry in entries:
        unique.setdefault((entry.kind, entry.names), entry)
    return DocPage(label, path, typed, summary, synopsis, tuple(unique.values()), tuple(passages), text)


def _typed(name: str, synopsis: Sequence[str]) -> str | None:
    """Return the command line of a page: git-log(1) documents `git log`, apt-get(8) documents `apt-get`. The synopsis
    decides.
    """
    if name.endswith((".service", ".socket", ".target", ".mount", ".slice", ".path", ".timer")):
        return None
    for line in [line for text in synopsis for line in text.splitlines()]:
        words = line.split()
        for count in range(1, min(4, len(words)) + 1):
            joined = "-".join(words[:count])
            if joined == name or (count > 1 and name.startswith(f"{joined}-") and not words[count : count + 1]):
                return " ".join(words[:count])
        if words and name.startswith(f"{words[0]}."):
            return words[0]  # sar.sysstat(1) documents sar
    return name if not synopsis or " " in name else None


def _is_command_of(typed: str | None, name: str, synopsis: Sequence[str], text: str) -> bool:
    """Return whether `typed name` is a call: the page writes it so somewhere, or its synopsis has a place for a
    command.

    Pages list other things below such headings too: what a shell has built in, what is typed at a prompt.
    """
    if typed is None:
        return False
    if name.split()[0] == typed.split()[0] or re.search(
        rf"(?<![\w,)] )(?<![\w-]){re.escape(f'{typed} {name}')}(?![\w-])", text
    ):
        return True
    for line in (line for part in synopsis for line in part.splitlines() if line.startswith(f"{typed} ")):
        words = re.sub(r"\[[^\[\]]*\]", " ", re.sub(r"\[[^\[\]]*\]", " ", line.removeprefix(typed))).split()
        if words and re.fullmatch(r"\{?(?:SUB)?COMMAND\}?|VERB|<(?:sub)?command>", words[0]):
            return True
    return False


def sections_of(blocks: Sequence[DocBlock]) -> Iterator[tuple[str, list[DocBlock]]]:
    """Yield (heading or "HEADING: subheading", the blocks below it)."""
    title, body = "", list[DocBlock]()
    heading = ""
    for block in blocks:
        if block.kind in ("heading", "subheading"):
            if body:
                yield title, body
            heading = block.text if block.kind == "heading" else heading
            title = block.text if block.kind == "heading" else f"{heading}: {block.text}"
            body = []
        else:
            body.append(block)
    if body:
        yield title, body


def blocks_below(blocks: Sequence[DocBlock], heading: str) -> list[DocBlock]:
    return [block for title, body in sections_of(blocks) if title.upper() == heading for block in body]


def _with_terms(blocks: Sequence[DocBlock]) -> list[DocBlock]:
    """Find terms in other layouts.

    DocBook and AsciiDoc write a term as a paragraph with an indented one after it; others write it as a heading.
    """
    with_terms = [
        DocBlock("term", 0, block.text) if block.kind == "subheading" and _OPTION_TERM.match(block.text) else block
        for block in blocks
    ]
    for at, block in enumerate(with_terms[:-1]):
        behind = with_terms[at + 1]
        if block.kind == "text" and behind.kind == "text" and behind.depth > block.depth and _looks_like_term(block):
            with_terms[at] = DocBlock("term", block.depth, block.text)
    return with_terms


def _looks_like_term(block: DocBlock) -> bool:
    text = block.text
    return (
        len(text) <= MAX_TERM_CHARS
        and not text.startswith("- ")
        and (text.endswith("...") or not text.endswith((".", ":", ";", ",")))
    )


def _entries(heading: str, body: Sequence[DocBlock]) -> Iterator[DocEntry]:
    """Yield each term with the text that is indented below it, or follows it up to the next term."""
    at = 0
    while at < len(body):
        if body[at].kind != "term":
            at += 1
            continue
        terms = [body[at].text]
        start = at + 1
        while start < len(body) and body[start].kind == "term" and body[start].depth == body[at].depth:
            terms.append(body[start].text)  # several terms for one text
            start += 1
        texts = []
        for block in body[start:]:
            if block.kind == "term" or block.depth < body[at].depth:
                break
            if block.kind == "code":
                texts.append(":")  # the text goes on behind an example: what stands before it is no whole sentence
                break
            texts.append(block.text)
        for term in terms if len(terms) > 1 and not all(term.startswith("-") for term in terms) else [", ".join(terms)]:
            usage, text = " ".join(term.split()).rstrip(":"), "\n\n".join(texts).strip()
            kind = _kind(usage, heading) if text and 0 < len(usage) <= MAX_TERM_CHARS else None
            if kind is not None and (names := _names(kind, usage)):
                yield DocEntry(kind, names, usage, text, heading)
        at = start


def _kind(term: str, heading: str) -> EntryKind | None:
    if _OPTION_TERM.match(term):
        return "option"
    if _DIRECTIVE.match(term):
        return "directive"
    for pattern, kind in _SECTIONS:
        if re.search(pattern, heading.upper()):
            fits = {"status": _STATUS, "variable": _VARIABLE, "file": _FILE, "command": _COMMAND}.get(kind)
            if fits is None or fits.match(term):
                return kind
    if _FILE.fullmatch(term):
        return "file"
    return None


def _names(kind: EntryKind, term: str) -> tuple[str, ...]:
    if kind == "option":
        head = re.sub(r"[=\[<{][^,]*", " ", term)  # what stands in brackets or angles is its argument
        names = [name.rstrip(".-+") if len(name) > 2 else name for name in _OPTION_NAME.findall(head)]
        names = [name for name in names if not re.fullmatch(r"-\d{2,}|--?", name)]
    elif kind == "directive":
        names = _DIRECTIVE.findall(term)
    elif kind == "command":
        # `ip addr add` of `ip addr add IFADDR dev IFNAME`: words up to the first that is a placeholder
        names = [" ".join([*takewhile(_COMMAND.fullmatch, part.split())][:3]) for part in term.split(", ")]
    elif kind == "status":
        names = [match[0]] if (match := _STATUS.match(term)) else []
    else:
        names = [part.strip() for part in term.split(", ")]
    return tuple(dict.fromkeys(name for name in names if name))

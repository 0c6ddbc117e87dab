"""Text that was laid out for a terminal: a rendered manual page, or what a command prints for `--help`."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from hivetune.synth.sources.page import DocBlock, DocPage
from hivetune.synth.sources.structure import page_of

_OVERSTRUCK = re.compile(r".\x08")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TITLE_LINE = re.compile(r"^\S+\(\d\w*\)\s.*\S+\(\d\w*\)$")
_TWO_COLUMNS = re.compile(r"^(\s*)(\S.*?\S|\S)\s{2,}(\S.*)$")
_HELP_HEADING = re.compile(r"^(\S[^:]{0,60}):\s*$")
_USAGE = re.compile(r"^\s*usage:\s*(.*)$", re.IGNORECASE)


def blocks_of_rendered(text: str) -> list[DocBlock]:
    """Return the blocks of a page as `man` prints it: headings at the margin, terms above or before indented text."""
    blocks: list[DocBlock] = []
    for paragraph in _paragraphs(_undressed(text)):
        first = paragraph[0]
        if _TITLE_LINE.match(first):
            continue
        indent = len(first) - len(first.lstrip())
        if indent == 0:
            blocks.append(DocBlock("heading", 0, first.strip()))
            paragraph = paragraph[1:]
        elif 1 <= indent <= 4 and len(paragraph) > 1 and not first.strip().startswith("-"):
            blocks.append(DocBlock("subheading", 0, first.strip()))
            paragraph = paragraph[1:]
        if paragraph:
            blocks += _paragraph(paragraph)
    return blocks


def help_page(command: str, text: str, path: Path) -> DocPage:
    """Return the page that `command --help` printed. Raises NotUnderstood."""
    blocks = [DocBlock("heading", 0, "OPTIONS")]
    usage = ""
    for line in _undressed(text).splitlines():
        if (found := _USAGE.match(line)) and not usage:
            usage = found[1]
        elif found := _HELP_HEADING.match(line):
            blocks.append(DocBlock("subheading", 0, found[1]))
        elif (found := _TWO_COLUMNS.match(line)) and found[1]:
            blocks += [DocBlock("term", 0, found[2]), DocBlock("text", 1, found[3])]
        elif line.startswith(" ") and line.strip() and blocks[-1].kind in ("text", "term"):
            _continue(blocks, line.strip())
        elif line.strip():
            blocks.append(DocBlock("text", 0, line.strip()))
    if usage:
        blocks += [DocBlock("heading", 0, "SYNOPSIS"), DocBlock("text", 0, usage)]
    return page_of(blocks, path, f"{command} --help", command=command)


def _continue(blocks: list[DocBlock], text: str) -> None:
    """Add a line that goes on: a term of its own, or more of the text."""
    last = blocks[-1]
    if text.startswith("-"):
        blocks.append(DocBlock("term", 0, text))
    elif last.kind == "term":
        blocks.append(DocBlock("text", 1, text))
    else:
        blocks[-1] = DocBlock("text", last.depth, f"{last.text} {text}")


def _undressed(text: str) -> str:
    """Return the text without overstriking and colours."""
    return _COLOUR.sub("", _OVERSTRUCK.sub("", text)).expandtabs()


def _paragraphs(text: str) -> Iterator[list[str]]:
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip():
            lines.append(line.rstrip())
        elif lines:
            yield lines
            lines = []
    if lines:
        yield lines


def _paragraph(lines: Sequence[str]) -> list[DocBlock]:
    """Return a term and its text, or text; depth is a level for each 7 columns, as `man` indents."""
    first = lines[0]
    indent = len(first) - len(first.lstrip())
    depth = max(0, indent // 7 - 1)
    rest = list(lines[1:])
    if rest and all(len(line) - len(line.lstrip()) > indent for line in rest):
        return [DocBlock("term", depth, first.strip()), DocBlock("text", depth + 1, _joined(rest))]
    columns = _TWO_COLUMNS.match(first)
    if columns and len(columns[2]) <= 12:  # a short term has its text behind it
        text = _joined([columns[3], *rest])
        return [DocBlock("term", depth, columns[2]), DocBlock("text", depth + 1, text)]
    return [DocBlock("text", depth, _joined(lines))]


def _joined(lines: Sequence[str]) -> str:
    """Join lines to one, with words that were divided at the end of a line."""
    text = textwrap.dedent("\n".join(lines))
    return " ".join(re.sub(r"[\u2010\u00ad]\n\s*", "", text).split())

"""A document of a folder: Markdown, reStructuredText or HTML, as the prose below its headings."""

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

from hivetune.synth.sources.manual import read_packed
from hivetune.synth.sources.page import BlockKind, DocBlock, DocPage, DocPassage, NotUnderstood
from hivetune.synth.sources.structure import sections_of

MARKUP_SUFFIXES = (".md", ".markdown", ".rst", ".html", ".htm", ".rst.txt")
_ATX = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
_UNDERLINE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_ROLE = re.compile(r":[\w:+.-]+:`([^`]*?)(?:\s*<[^>]*>)?`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NO_PROSE = ("|", "+-", "<", "[!", "---")  # tables, markup, badges, rulers
LEFT_OUT = DocBlock("code", 0, "")  # where a table or a directive stood: the section is not whole without it


def documents_below(folder: Path) -> Iterator[Path]:
    """Yield the documents of a folder in the order of their names, hidden folders left out."""
    for path in sorted(folder.rglob("*")):
        name = path.name.lower().removesuffix(".gz")
        if name.endswith(MARKUP_SUFFIXES) and path.is_file() and "/." not in str(path.relative_to(folder.parent)):
            yield path


def read_document(path: Path, label: str) -> DocPage:
    """Read one document. Raises NotUnderstood for a file that can't be read or has no text below a heading."""
    text = read_packed(path)
    name = path.name.lower()
    if name.endswith((".html", ".htm")):
        reader = _HtmlReader()
        reader.feed(text)
        reader.close()
        blocks = reader.blocks
    else:
        blocks = list(_text_blocks(text, rst=".rst" in name))
    passages = []
    for heading, body in sections_of(blocks):
        prose = [block.text for block in body if block.kind == "text"]
        if heading and prose:
            whole = len(prose) == len(body)
            passages.append(DocPassage(heading.rpartition(": ")[2] or heading, "\n\n".join(prose), whole))
    if not passages:
        raise NotUnderstood("no text below a heading")
    all_text = "\n".join(block.text for block in blocks)
    return DocPage(label, path, None, passages[0].heading, (), (), tuple(passages), all_text)


def _text_blocks(source: str, *, rst: bool) -> Iterator[DocBlock]:
    """Yield the blocks of Markdown or reStructuredText; directives are left out."""
    lines = source.splitlines()
    last = ""  # the text before, which says whether an indented one is code or the rest of a list
    at = 0
    while at < len(lines):
        start, line = at, lines[at]
        below = lines[at + 1] if at + 1 < len(lines) else ""
        at += 1
        if fence := re.match(r"\s*(```|~~~)", line):
            while at < len(lines) and not lines[at].strip().startswith(fence[1]):
                at += 1
            yield DocBlock("code", 0, "\n".join(lines[start + 1 : at]))
            at += 1
        elif not rst and (match := _ATX.match(line)):
            yield DocBlock("heading" if len(match[1]) < 3 else "subheading", 0, _inline(match[2]))
            last = ""
        elif line.strip() and not line.startswith(" ") and _UNDERLINE.match(below) and len(below) >= min(3, len(line)):
            yield DocBlock("heading" if below[0] in "=-#*" else "subheading", 0, _inline(line))
            at, last = at + 1, ""
        elif line.startswith(("    ", "\t")) and line.strip() and (not last or last.endswith(":")):
            at = _end_of_indented(lines, at)
            yield DocBlock("code", 0, "\n".join(lines[start:at]))
        elif rst and line.lstrip().startswith(".. "):
            at = _end_of_indented(lines, at)
            yield LEFT_OUT
        elif line.strip():
            while at < len(lines) and lines[at].strip() and not re.match(r"\s*(```|~~~)", lines[at]):
                at += 1
            if _UNDERLINE.match(line):
                continue
            if line.lstrip().startswith(_NO_PROSE):
                yield LEFT_OUT
                continue
            last = _inline(" ".join(lines[start:at]))
            yield DocBlock("text", 0, last)


def _end_of_indented(lines: list[str], at: int) -> int:
    while at < len(lines) and (not lines[at].strip() or lines[at].startswith((" ", "\t"))):
        at += 1
    return at


def _inline(text: str) -> str:
    """Return the text without links, roles and emphasis; names of code keep no quotes."""
    colon = ":" if text.rstrip().endswith("::") else ""
    text = _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
    text = re.sub(r"`([^`<]+?)\s*<[^>]*>`_+", r"\1", text)
    text = re.sub(r"(\*\*|__)(\S.*?)\1", r"\2", text.replace("``", "`"))
    text = html.unescape(re.sub(r"`([^`]*)`_?", r"\1", text))
    return " ".join(text.removesuffix("::").split()) + colon


class _HtmlReader(HTMLParser):
    """Headings, paragraphs and verbatim text; scripts, styles and navigation are left out."""

    SKIPPED = frozenset({"script", "style", "nav", "head", "footer", "table", "svg", "form"})
    KINDS: ClassVar[dict[str, BlockKind]] = {
        "h1": "heading", "h2": "heading", "h3": "subheading", "h4": "subheading", "h5": "subheading",
        "h6": "subheading", "p": "text", "dt": "text", "dd": "text", "li": "text", "pre": "code",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[DocBlock] = []
        self._skipped: list[str] = []  # the open elements that are left out
        self._tag = ""
        self._pieces: list[str] = []

    def handle_starttag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._end()
            self.blocks.append(LEFT_OUT)
        if tag in self.SKIPPED:
            self._skipped.append(tag)
        elif tag in self.KINDS:
            self._end()
            self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        if self._skipped and tag == self._skipped[-1]:
            self._skipped.pop()
        elif tag == self._tag:
            self._end()

    def handle_data(self, data: str) -> None:
        if self._tag and not self._skipped:
            self._pieces.append(data)

    def _end(self) -> None:
        text = " ".join("".join(self._pieces).split())
        if self._tag and text:
            kind = self.KINDS[self._tag]
            self.blocks.append(DocBlock(kind, 0, text.rstrip("¶#") if kind.endswith("heading") else text))
        self._tag, self._pieces = "", []

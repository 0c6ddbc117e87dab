"""A document of a folder: Markdown, reStructuredText or HTML, as the prose below its headings.

Only sections that are prose alone are kept: where a table, a list of links or code stood, the rest is not whole.
"""

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from hivetune.synth.manual import read_packed
from hivetune.synth.page import DocPage, DocPassage, NotUnderstood

MARKUP_SUFFIXES = (".md", ".markdown", ".rst", ".html", ".htm", ".rst.txt")
_ATX = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_UNDERLINE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_ROLE = re.compile(r":[\w:+.-]+:`([^`]*?)(?:\s*<[^>]*>)?`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NO_PROSE = re.compile(r"\s*(```|~~~|\||\+-|<|\[!|---|\.\. |[-*+] |\d+\. )|    |\t")


def documents_below(folder: Path) -> Iterator[Path]:
    """Yield the documents of a folder in the order of their names, hidden folders left out."""
    for path in sorted(folder.rglob("*")):
        name = path.name.lower().removesuffix(".gz")
        if name.endswith(MARKUP_SUFFIXES) and path.is_file() and "/." not in str(path.relative_to(folder.parent)):
            yield path


def read_document(path: Path, label: str) -> DocPage:
    """Read one document. Raises NotUnderstood for a file that can't be read or has no prose below a heading."""
    text = read_packed(path)
    if path.name.lower().endswith((".html", ".htm")):
        reader = _HtmlReader()
        reader.feed(text)
        reader.close()
        sections = reader.sections
    else:
        sections = list(_sections(text.splitlines()))
    passages = tuple(DocPassage(title, "\n\n".join(body)) for title, body in sections if title and body and all(body))
    if not passages:
        raise NotUnderstood("no prose below a heading")
    every_text = "\n".join("\n".join([title, *body]) for title, body in sections)
    return DocPage(label, path, None, passages[0].heading, (), (), passages, every_text)


def _sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, paragraphs) of Markdown or reStructuredText; a paragraph that is no prose is empty."""
    title, body, at = "", list[str](), 0
    while at < len(lines):
        line, below = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
        underlined = line.strip() and not line.startswith(" ") and _UNDERLINE.match(below) and len(below) >= 3
        if underlined or (heading := _ATX.match(line)):
            yield title, body
            title, body = _inline(line if underlined else heading[1]), []  # type: ignore[index]
            at += 2 if underlined else 1
            continue
        start = at
        while at < len(lines) and lines[at].strip():
            at += 1
        paragraph = lines[start:at]
        if paragraph and not all(map(_UNDERLINE.match, paragraph)):
            is_prose = not any(map(_NO_PROSE.match, paragraph)) and not paragraph[-1].endswith("::")
            body.append(_inline(" ".join(paragraph)) if is_prose else "")
        at = max(at, start + 1)
    yield title, body


def _inline(text: str) -> str:
    """Return the text without links, roles and emphasis; names of code keep no quotes."""
    text = _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
    text = re.sub(r"`([^`<]+?)\s*<[^>]*>`_+", r"\1", text)
    text = re.sub(r"(\*\*|__)(\S.*?)\1", r"\2", text.replace("``", "`"))
    return " ".join(html.unescape(re.sub(r"`([^`]*)`_?", r"\1", text)).split())


class _HtmlReader(HTMLParser):
    """Headings and paragraphs; scripts, styles and navigation are left out."""

    HIDDEN = frozenset({"script", "style", "nav", "head", "footer", "svg", "form"})
    NO_PROSE = frozenset({"table", "pre", "ul", "ol", "dl"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[tuple[str, list[str]]] = [("", [])]
        self._hidden: list[str] = []  # the open elements that are left out
        self._tag = ""
        self._pieces: list[str] = []

    def handle_starttag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.NO_PROSE and not self._hidden:
            self.sections[-1][1].append("")
        if tag in self.HIDDEN or tag in self.NO_PROSE:
            self._hidden.append(tag)
        elif not self._hidden and (tag == "p" or re.fullmatch(r"h[1-6]", tag)):
            self._tag, self._pieces = tag, []

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and tag == self._hidden[-1]:
            self._hidden.pop()
        elif tag == self._tag:
            text = " ".join("".join(self._pieces).split())
            if tag == "p" and text:
                self.sections[-1][1].append(text)
            elif text:
                self.sections.append((text.rstrip("¶#"), []))
            self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag and not self._hidden:
            self._pieces.append(data)

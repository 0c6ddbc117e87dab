"""A document of a folder: Markdown, reStructuredText or HTML, as headings, prose and code."""

import html
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

from hivetune.synth.sources.manual import read_packed
from hivetune.synth.sources.page import DocBlock, DocExample, DocPage, DocPassage, NotUnderstood
from hivetune.synth.sources.structure import MAX_CODE_CHARS, sections_of

MARKUP_SUFFIXES = (".md", ".markdown", ".rst", ".html", ".htm", ".rst.txt")
_FENCE = re.compile(r"^\s*(```|~~~)\s*([\w+-]*)")
_ATX = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
_UNDERLINE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_DIRECTIVE = re.compile(r"^\s*\.\. ")
_ROLE = re.compile(r":[\w:+.-]+:`([^`]*?)(?:\s*<[^>]*>)?`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_LANGUAGES = {"bash": "sh", "sh": "sh", "shell": "sh", "console": "sh", "shell-session": "sh", "python": "python",
              "py": "python", "pycon": ""}  # fmt: skip
_NO_PROSE = ("|", "+-", "<", "[!", "---")  # tables, markup, badges, rulers
_PROMPT = re.compile(r"^\s*[$#]\s+\S", re.MULTILINE)


def read_document(path: Path, label: str) -> DocPage:
    """Read one document. Raises NotUnderstood for a file that can't be read or says nothing below its headings."""
    text = read_packed(path)
    name = path.name.lower()
    if name.endswith((".html", ".htm")):
        blocks, languages = _html_blocks(text)
    else:
        blocks, languages = _text_blocks(text, rst=".rst" in name)
    passages, examples = [], []
    for heading, body in sections_of(blocks):
        prose = [block.text for block in body if block.kind == "text"]
        if heading and prose:
            passages.append(DocPassage(heading.rpartition(": ")[2] or heading, "\n\n".join(prose)))
        for before, block in pairwise(body):
            language = languages.get(id(block), "")
            if block.kind == "code" and language and before.kind == "text" and len(block.text) <= MAX_CODE_CHARS:
                examples.append(DocExample(before.text, block.text, language, heading))
    if not passages and not examples:
        raise NotUnderstood("no text below a heading")
    said = "\n".join(block.text for block in blocks)
    return DocPage(label, path, None, passages[0].heading if passages else "", (), (), tuple(examples),
                   tuple(passages), said)  # fmt: skip


class _Lines:
    """The lines of Markdown or reStructuredText, read block by block."""

    def __init__(self, text: str, *, rst: bool):
        self._lines, self._rst = text.splitlines(), rst
        self._at = 0
        self.blocks: list[DocBlock] = []
        self.languages: dict[int, str] = {}

    def read(self) -> None:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if not (self._fenced(line) or self._heading(line) or self._indented(line) or self._directive(line)):
                self._paragraph(line)

    def _end(self, start: int, is_end: Callable[[str], bool]) -> int:
        """Return the first line from `start` on that ends the block, or the end of the text."""
        return next((i for i in range(start, len(self._lines)) if is_end(self._lines[i])), len(self._lines))

    def _fenced(self, line: str) -> bool:
        fence = _FENCE.match(line)
        if fence is None:
            return False
        end = self._end(self._at + 1, lambda other: other.strip().startswith(fence[1]))
        lines = self._lines[self._at + 1 : end]
        _add_code(self.blocks, self.languages, lines, _LANGUAGES.get(fence[2].lower(), ""))
        self._at = end + 1
        return True

    def _heading(self, line: str) -> bool:
        found = None if self._rst else _ATX.match(line)
        if found:
            self.blocks.append(DocBlock("heading" if len(found[1]) < 3 else "subheading", 0, _inline(found[2])))
            self._at += 1
            return True
        below = self._lines[self._at + 1] if self._at + 1 < len(self._lines) else ""
        if not line.strip() or not _is_underline(below, line):
            return False
        self.blocks.append(DocBlock("heading" if below[0] in "=-#*" else "subheading", 0, _inline(line)))
        self._at += 2
        return True

    def _indented(self, line: str) -> bool:
        if not line.startswith(("    ", "\t")) or not line.strip() or not _code_may_begin(self.blocks):
            return False
        end = self._end(self._at, lambda other: bool(other.strip()) and not other.startswith((" ", "\t")))
        _add_code(self.blocks, self.languages, self._lines[self._at : end], "")
        self._at = end
        return True

    def _directive(self, line: str) -> bool:
        """Skip a directive of reStructuredText with what is indented below it."""
        if not self._rst or not _DIRECTIVE.match(line):
            return False
        self._at = self._end(self._at + 1, lambda other: bool(other.strip()) and not other.startswith(" "))
        return True

    def _paragraph(self, line: str) -> None:
        end = max(self._at + 1, self._end(self._at, lambda other: not other.strip() or bool(_FENCE.match(other))))
        said = line.strip() and not _UNDERLINE.match(line) and not line.lstrip().startswith(_NO_PROSE)
        if said:
            self.blocks.append(DocBlock("text", 0, _inline(" ".join(self._lines[self._at : end]))))
        self._at = end if line.strip() else self._at + 1


def _text_blocks(text: str, *, rst: bool) -> tuple[list[DocBlock], dict[int, str]]:
    lines = _Lines(text, rst=rst)
    lines.read()
    return lines.blocks, lines.languages


def _code_may_begin(blocks: list[DocBlock]) -> bool:
    """Return whether indented text is code.

    It is behind a heading or a colon; elsewhere it may be the rest of a list.
    """
    return not blocks or blocks[-1].kind != "text" or blocks[-1].text.endswith(":")


def _is_underline(line: str, title: str) -> bool:
    return bool(_UNDERLINE.match(line)) and len(line.rstrip()) >= min(3, len(title)) and not title.startswith(" ")


def _add_code(blocks: list[DocBlock], languages: dict[int, str], lines: list[str], language: str) -> None:
    if any(line.strip() for line in lines):
        margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        text = "\n".join(line[margin:].rstrip() for line in lines).strip("\n")
        block = DocBlock("code", 0, text)
        blocks.append(block)
        languages[id(block)] = language or ("sh" if _PROMPT.match(text) else "")


def _inline(text: str) -> str:
    """Return the text without links, roles and emphasis; names of code keep no quotes."""
    text = _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
    text = re.sub(r"`([^`<]+?)\s*<[^>]*>`_+", r"\1", text)
    text = re.sub(r"(\*\*|__)(\S.*?)\1", r"\2", text.replace("``", "`"))
    return " ".join(html.unescape(re.sub(r"`([^`]*)`_?", r"\1", text)).removesuffix("::").split()) + (
        ":" if text.rstrip().endswith("::") else ""
    )


class _Reader(HTMLParser):
    """Headings, paragraphs, terms and verbatim text; scripts, styles and navigation are left out."""

    SKIPPED = frozenset({"script", "style", "nav", "head", "footer", "table", "svg", "form"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str, str]] = []  # tag, class, text
        self._open: list[str] = []
        self._tag, self._about = "", ""
        self._pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SKIPPED:
            self._open.append(tag)
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6", "p", "pre", "dt", "dd", "li"):
            self._end()
            self._tag, self._about = tag, dict(attrs).get("class") or ""

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()
        elif tag == self._tag:
            self._end()

    def handle_data(self, data: str) -> None:
        if self._tag and not self._open:
            self._pieces.append(data)

    def _end(self) -> None:
        text = "".join(self._pieces)
        if self._tag and text.strip():
            self.blocks.append((self._tag, self._about, text))
        self._tag, self._about, self._pieces = "", "", []


def _html_blocks(text: str) -> tuple[list[DocBlock], dict[int, str]]:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    blocks: list[DocBlock] = []
    languages: dict[int, str] = {}
    for tag, about, said in reader.blocks:
        if tag == "pre":
            known = next((name for name in _LANGUAGES if name in about.split()), "")
            _add_code(blocks, languages, said.splitlines(), _LANGUAGES.get(known, ""))
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            blocks.append(DocBlock("heading" if tag < "h3" else "subheading", 0, " ".join(said.split()).rstrip("¶#")))
        else:
            blocks.append(DocBlock("text", 0, " ".join(said.split())))
    return blocks, languages


def documents_below(folder: Path) -> Iterator[Path]:
    """Yield the documents of a folder in the order of their names, hidden folders left out."""
    for path in sorted(folder.rglob("*")):
        name = path.name.lower().removesuffix(".gz")
        if name.endswith(MARKUP_SUFFIXES) and path.is_file() and "/." not in str(path.relative_to(folder.parent)):
            yield path

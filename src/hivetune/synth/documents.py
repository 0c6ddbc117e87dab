"""Python modules by their docstrings, which are parsed and never run, and documents in Markdown."""

import ast
import gzip
import html
import itertools
import re
import sys
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from hivetune.synth.page import DocEntry, DocPage, DocPassage, NotUnderstood

MAX_BYTES = 2 << 20
SKIPPED = {"test", "tests", "testing", "_vendor", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
MARKUP_SUFFIXES = (".md", ".markdown")
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# A first line that repeats the call, as extension modules have.
_SIGNATURE = re.compile(r"\A\s*[\w.]+\(.*\)\s*(->.*)?\n")


def module_files(name: str) -> list[tuple[str, Path]]:
    """Return (module name, file) of each module of a package, or of one module, of the standard library or this
    environment, sorted by name."""
    for root in dict.fromkeys([sysconfig.get_paths()["stdlib"], *sys.path]):
        base = Path(root, *name.split("."))
        if base.with_suffix(".py").is_file():
            return [(name, base.with_suffix(".py"))]
        if (base / "__init__.py").is_file():
            return list(modules_below(base, name))
    return []


def modules_below(base: Path, *prefix: str, skipped: Collection[str] = SKIPPED) -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, file) of the public modules below a folder, without parts that are `skipped`."""
    for path in sorted(base.rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        if not any(part in skipped or (part.startswith("_") and part != "__init__") for part in parts):
            yield ".".join((*prefix, *(part for part in parts if part != "__init__"))), path


def read_module(module: str, path: Path) -> DocPage:
    """Read one module: its docstring, and an entry for each documented function and class. Raises NotUnderstood."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise NotUnderstood(f"larger than {MAX_BYTES >> 20} MiB")
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise NotUnderstood(f"does not parse: {error}") from None
    entries, texts = [], []
    for name, node in documented(tree, module):
        docstring, usage = ast.get_docstring(node) or "", _usage(name, node)
        texts.append(f"{usage}\n{docstring}")
        if prose := _prose(docstring):
            entries.append(DocEntry("function", (name,), usage, prose, module))
    whole = _prose(ast.get_docstring(tree) or "")
    passages = (DocPassage(module, whole),) if len(whole) >= 80 else ()
    if not entries and not passages:
        raise NotUnderstood("has no docstrings")
    text = "\n".join([module, whole, *texts])
    return DocPage(f"Python {module}", path, entries=tuple(entries), passages=passages, text=text)


def documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, Documented]]:
    """Yield (dotted name, node) of public functions, classes and methods that have a docstring."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented) and not child.name.startswith("_"):
            name = f"{prefix}.{child.name}"
            if ast.get_docstring(child):
                yield name, child
            if isinstance(child, ast.ClassDef):
                yield from documented(child, name)


def _usage(name: str, node: Documented) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {name}"
    shown = ast.unparse(node.args)
    first = next((argument.arg for argument in node.args.posonlyargs or node.args.args), "")
    if first in ("self", "cls"):
        shown = re.sub(rf"^{first}(?::[^,]*)?(?:, /)?(?:, |$)", "", shown)
    return f"{name}({shown})"


def _prose(docstring: str) -> str:
    """Return the paragraphs before the first that is a list, a table, a section or code."""
    _, body = next(_sections(_SIGNATURE.sub("", f"{docstring}\n").splitlines()))
    return "\n\n".join(itertools.takewhile(bool, body))


# Documents: only sections that are prose alone are kept. Where a table, a list or code was, the rest is incomplete.

_ATX = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_UNDERLINE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_NO_PROSE = re.compile(
    r"\s*(```|~~~|\||\+-|<|\[!|---|\.\. |[-*+] |\d+\. |>>>|:param|@param)|    |\t"
    r"|\s*(Args?|Arguments|Parameters?|Returns?|Examples?):"
)


def documents_below(folder: Path) -> Iterator[Path]:
    """Yield the documents in a folder and its subfolders, sorted by name."""
    for path in sorted(folder.rglob("*")):
        name = path.name.lower().removesuffix(".gz")
        # Without those of hidden folders, such as .git and .venv.
        if name.endswith(MARKUP_SUFFIXES) and path.is_file() and "/." not in str(path.relative_to(folder.parent)):
            yield path


def read_document(path: Path, label: str) -> DocPage:
    """Read one document. Raises NotUnderstood for a file that can't be read or has no prose below a heading."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise NotUnderstood(f"can't be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise NotUnderstood(f"larger than {MAX_BYTES >> 20} MiB")
    sections = list(_sections(content.decode("utf-8", "replace").splitlines()))
    passages = tuple(DocPassage(title, "\n\n".join(body)) for title, body in sections if title and body and all(body))
    if not passages:
        raise NotUnderstood("no prose below a heading")
    whole = "\n".join("\n".join([title, *body]) for title, body in sections)
    return DocPage(label, path, summary=passages[0].heading, passages=passages, text=whole)


def _sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, paragraphs) of Markdown, or of a docstring; a paragraph that is not prose is empty."""
    title, body, at = "", list[str](), 0
    while at < len(lines):
        line, below = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
        heading = _ATX.match(line)
        underlined = line.strip() and not line.startswith(" ") and _UNDERLINE.match(below)
        if heading or underlined:
            yield title, body
            title, body = _inline(heading[1] if heading else line), []
            at += 1 if heading else 2
            continue
        start = at
        while at < len(lines) and lines[at].strip():
            at += 1
        paragraph = lines[start:at]
        if not all(map(_UNDERLINE.match, paragraph)):
            is_prose = not any(map(_NO_PROSE.match, paragraph)) and not paragraph[-1].endswith("::")
            body.append(_inline(" ".join(paragraph)) if is_prose else "")
        at = max(at, start + 1)
    yield title, body


def _inline(text: str) -> str:
    """Return the text without links, roles and emphasis; names of code keep no quotes."""
    text = re.sub(r":[\w:+.-]+:`[~!]?([^`]*?)(?:\s*<[^>]*>)?`", r"\1", text)
    text = re.sub(r"\[`~?([^`\]]+)`\](?!\()", r"\1", text)  # a link of Hugging Face's docstrings
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^>]*>`_+", r"\1", text)
    text = re.sub(r"\*\*(\S.*?)\*\*", r"\1", text.replace("``", "`"))
    text = re.sub(r"(?<![\w*])\*(\w(?:[^*]*\w)?)\*(?![\w*])", r"\1", text)
    return " ".join(html.unescape(re.sub(r"`([^`]*)`_?", r"\1", text)).split())

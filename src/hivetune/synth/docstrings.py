"""Python modules by their docstrings: parsed, never imported."""

import ast
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

from hivetune.synth.page import DocEntry, DocPage, DocPassage, NotUnderstood

MAX_SOURCE_BYTES = 2 << 20
_SKIPPED = {"test", "tests", "testing", "_vendor", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_MARKUP = re.compile(r":(?:\w+:)+`~?([^`]*)`|``([^`]*)``|`([^`<]*)`")


def module_files(name: str) -> list[tuple[str, Path]]:
    """Return (module, file) of a package or module of the standard library or this environment, in order of names."""
    relative = Path(*name.split("."))
    for root in dict.fromkeys([sysconfig.get_paths()["stdlib"], *sys.path]):
        base = Path(root) / relative
        if base.with_suffix(".py").is_file():
            return [(name, base.with_suffix(".py"))]
        if (base / "__init__.py").is_file():
            return list(modules_below(base, name))
    return []


def modules_below(base: Path, *prefix: str, skipped: Collection[str] = _SKIPPED) -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, file) of the public modules below a folder, without parts that are `skipped`."""
    for path in sorted(base.rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        if not any(part in skipped or (part.startswith("_") and part != "__init__") for part in parts):
            yield ".".join((*prefix, *(part for part in parts if part != "__init__"))), path


def read_module(module: str, path: Path) -> DocPage:
    """Read one module: its docstring, and an entry for each documented function and class.

    Raises NotUnderstood.
    """
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            raise NotUnderstood(f"larger than {MAX_SOURCE_BYTES >> 20} MiB")
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise NotUnderstood(f"does not parse: {error}") from None
    entries, texts = [], []
    for name, node in documented(tree, module):
        docstring, usage = ast.get_docstring(node) or "", _usage(name, node)
        texts.append(f"{usage}\n{docstring}")
        if prose := _prose(docstring):
            entries.append(DocEntry("function", (name,), usage, prose, module))
    module_text = _tidy(ast.get_docstring(tree) or "")
    first = module_text.split("\n\n")[0]
    passages = (DocPassage(module, module_text),) if len(module_text) >= 80 else ()
    if not entries and not passages:
        raise NotUnderstood("has no docstrings")
    text = "\n".join([module, module_text, *texts])
    summary = " ".join(first.split()) if len(first) < 200 else ""
    return DocPage(f"Python {module}", path, None, summary, (), tuple(entries), passages, text)


def documented(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield public functions, classes and methods with a docstring, by their dotted names."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        if ast.get_docstring(child):
            yield name, child
        if isinstance(child, ast.ClassDef):
            yield from documented(child, name)


def _usage(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the call as it is written: name(a, b=1)."""
    if isinstance(node, ast.ClassDef):
        return f"class {name}"
    shown = ast.unparse(node.args)
    first = next((argument.arg for argument in node.args.posonlyargs or node.args.args), "")
    if first in ("self", "cls"):
        shown = re.sub(rf"^{first}(?::[^,]*)?(?:, /)?(?:, |$)", "", shown)
    return f"{name}({shown})"


def _prose(docstring: str) -> str:
    """Return the paragraphs before the first that is a list, a table, a section or code."""
    paragraphs = []
    for paragraph in _tidy(docstring).split("\n\n"):
        lines = paragraph.splitlines()
        if not lines or (len(lines) > 1 and re.fullmatch(r"[-=~]{3,}", lines[1].strip())):
            break
        if re.match(r"\s*(>>>|\.\. |[-*] |:param|@param|Args?:|Parameters?:|Returns?:|Example)", lines[0]):
            break
        if lines[0].startswith("    "):
            break
        paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _tidy(docstring: str) -> str:
    """Return the text without roles and quotes of reST, and without a signature on the first line."""
    lines = _MARKUP.sub(lambda match: match[1] or match[2] or match[3] or "", docstring).splitlines()
    if lines and re.fullmatch(r"[\w.]+\(.*\)\s*(->.*)?", lines[0].strip()):
        lines = lines[1:]
    return "\n".join(line.rstrip() for line in lines).strip()

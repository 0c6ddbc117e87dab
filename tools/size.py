"""Print how large the project is: lines and modules of each room beside its budget, and the sums that should fall.

    make size

A report, never a test. A budget is what a room should need once all that belongs to it lies in it.
"""

import ast
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hivetune"
sys.path.insert(0, str(ROOT / "src"))

# room: (folders and modules of today that belong to it, lines it should need)
BUDGETS: dict[str, tuple[tuple[str, ...], int]] = {
    "storage": (("base", "run", "config", "records", "errors", "__init__", "__main__"), 2700),
    "process": (("process",), 1300),
    "machine": (("machine",), 2000),
    "models": (("models", "checkers"), 1600),
    "data": (("data",), 10500),
    "train": (("train",), 11500),
    "judge": (("judge",), 3400),
    "release": (("release",), 1700),
    "serve": (("serve", "llama", "routing"), 3200),
    "cycle": (("cycle",), 2000),
    "dashboard": (("dashboard",), 2000),
    "features": (("synth", "specialists", "cluster"), 5500),
    "cli": (("cli", "walk"), 2700),
}
MAX_LINES, MAX_MODULES, MAX_CHAIN, MAX_IMPORT_SHARE = 52_000, 280, 18, 0.045


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def lines(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def modules_of(room: str) -> list[Path]:
    names = BUDGETS[room][0]
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).with_suffix("").parts[0] in names]


def docstring_lines(path: Path) -> int:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [node.body[0] for node in ast.walk(parsed(path)) if isinstance(node, owners) and ast.get_docstring(node)]
    return sum((text.end_lineno or text.lineno) - text.lineno + 1 for text in texts)


def comments(path: Path) -> int:
    """Comments, alone on a line or at the end of one."""
    with open(path, "rb") as file:
        return sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))


def import_lines(path: Path) -> int:
    imports = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def public_names(path: Path) -> Iterator[str]:
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def needs(paths: list[Path]) -> dict[str, set[str]]:
    """Each module's name: the modules of the project that it imports, wherever in the file."""
    names = {".".join(("hivetune", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in paths}
    known = {name.removesuffix(".__init__"): path for name, path in names.items()}
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        found[name] = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                wanted = {alias.name for alias in node.names}
            else:
                continue
            found[name] |= (wanted & known.keys()) - {name, "hivetune"}
    return found


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest line of modules of which each imports the next. The imports have no circle (tests/test_layout.py)."""

    @cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *longest(below(other) for other in graph[name]))

    def longest(chains: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        return max(chains, key=lambda chain: len(chain), default=())

    return list(longest(below(name) for name in graph))


def print_report() -> None:
    from hivetune.cli.main import COMMANDS
    from hivetune.config import known_settings

    paths = sorted(SOURCE.rglob("*.py"))
    counted = {room: modules_of(room) for room in BUDGETS}
    rest = set(paths) - {path for room in counted.values() for path in room}
    print(f"{'room':<12}{'lines':>8}{'budget':>8}{'modules':>9}")
    for room, (_, budget) in BUDGETS.items():
        print(f"{room:<12}{lines(counted[room]):>8,}{budget:>8,}{len(counted[room]):>9}")
    for path in sorted(rest):
        print(f"no budget: {path.relative_to(SOURCE)}")
    total = lines(paths)
    imported = sum(map(import_lines, paths)) / total
    chain = longest_chain(needs(paths))
    top_level = {name.split()[0] for name in COMMANDS}
    # The log and the benchmarks' tables are kept for their figures, not read from beginning to end.
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")]
    pages.remove(ROOT / "docs" / "log.md")
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    tests = sorted((ROOT / "tests").rglob("*.py"))
    print(f"""
source        {total:,} lines in {len(paths)} modules (aim {MAX_LINES:,} in {MAX_MODULES})
tests         {lines(tests):,} lines in {len(tests)} modules
imports       {imported:.1%} of the lines (aim {MAX_IMPORT_SHARE:.1%})
comments      {sum(map(comments, paths)) / total:.1%} of the lines have one
docstrings    {sum(map(docstring_lines, paths)) / total:.1%} of the lines
longest chain {len(chain)} modules (aim {MAX_CHAIN}): {chain[0]} ... {chain[-1]}
public names  {sum(len(list(public_names(path))) for path in paths):,} functions and classes
settings      {len(known_settings())} (aim 80)
commands      {len(COMMANDS)}, {len(top_level)} at the top level (aim 35)
documentation {words:,} words in {len(pages)} pages (aim 35,000)""")


if __name__ == "__main__":
    print_report()

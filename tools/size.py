"""Print how large the project is: each room's lines beside its budget, and the sums that should fall.

    make size

A report, never a test. A budget is what a room should need; over all rooms the sum counts.
"""

import ast
import sys
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hivetune"
sys.path.insert(0, str(ROOT / "src"))

# room: (its folders and modules below src/hivetune, lines at most)
ROOMS: dict[str, tuple[tuple[str, ...], int]] = {
    "data": (("data",), 6500),
    "train": (("train",), 8000),
    "judge": (("judge", "release", "models", "llama", "checkers"), 5800),
    "serve": (("serve", "cycle", "dashboard"), 5400),
    "ground": (
        ("cli", "machine", "process", "run", "base", "synth", "config", "walk", "records", "errors", "__init__"),
        8000,
    ),
}
MAX_LINES, MAX_MODULES = 34_000, 190
MAX_TOOLS, MAX_TESTS, MAX_TEST_DATA, MAX_WORDS = 3_000, 26_000, 4_000, 20_000
MIN_COMMENTS = 0.05
MAX_COMMANDS, MAX_SETTINGS = 30, 60


def lines(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8", errors="replace").count("\n") for path in paths)


def room_of(path: Path) -> str | None:
    """Return the room that names the longest part of the module's path."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    for length in (2, 1):
        found = [room for room, (names, _) in ROOMS.items() if "/".join(parts[:length]) in names]
        if found:
            return found[0]
    return None


@cache
def comments(path: Path) -> int:
    """Return how many lines have a comment, alone on the line or at its end."""
    with open(path, "rb") as file:
        return sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))


def docstring_lines(path: Path) -> int:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, owners)]
    texts = [node.body[0] for node in nodes if ast.get_docstring(node)]
    return sum((text.end_lineno or text.lineno) - text.lineno + 1 for text in texts)


def words(pages: list[Path]) -> int:
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def print_report() -> None:
    from hivetune.cli.main import COMMANDS
    from hivetune.config import known_settings

    paths = sorted(SOURCE.rglob("*.py"))
    rooms: dict[str | None, list[Path]] = {}
    for path in paths:
        rooms.setdefault(room_of(path), []).append(path)
    print(f"{'room':<14}{'lines':>8}{'at most':>9}{'modules':>9}")
    for room, (_, budget) in ROOMS.items():
        found = rooms.get(room, [])
        print(f"{room:<14}{lines(found):>8,}{budget:>9,}{len(found):>9}")
    for path in rooms.get(None, []):
        print(f"no room: {path.relative_to(SOURCE)}")
    total = lines(paths)
    tools = [*(ROOT / "bench").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    tests = list((ROOT / "tests").rglob("*.py"))
    kinds = (".yaml", ".toml", ".jsonl", ".json", ".txt", ".csv", ".jinja")
    data = [path for path in (ROOT / "tests").rglob("*") if path.suffix in kinds]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pages.remove(ROOT / "docs" / "log.md")
    for name, count, budget, more in (
        ("source", total, MAX_LINES, f"{len(paths)} modules, at most {MAX_MODULES}"),
        ("bench, tools", lines(tools), MAX_TOOLS, ""),
        ("tests", lines(tests), MAX_TESTS, f"{len(tests)} modules"),
        ("tests' data", lines(data), MAX_TEST_DATA, f"{len(data)} files"),
        ("pages", words(pages), MAX_WORDS, "words, without log and decisions"),
        ("commands", len(COMMANDS), MAX_COMMANDS, ""),
        ("settings", len(known_settings()), MAX_SETTINGS, ""),
    ):
        print(f"{name:<14}{count:>8,}{budget:>9,}{'':>4}{more}".rstrip())
    print(f"comments on {sum(map(comments, paths)) / total:.1%} of the lines, at least {MIN_COMMENTS:.0%};", end=" ")
    print(f"docstrings {sum(map(docstring_lines, paths)) / total:.1%}")


if __name__ == "__main__":
    print_report()

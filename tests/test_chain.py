"""The way from the command to the training loop, as docs/design.md shows it: each function calls the next."""

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hivetune"
PAGE = ROOT / "docs" / "design.md"
# The hop where one process ends and another begins: who starts the child, by which call, and what it runs.
BETWEEN = ("attempt", "main")
STARTS = "start_child"
MAX_FUNCTIONS, MAX_FILES = 6, 5  # before the loop itself


def the_way() -> list[tuple[str, str]]:
    """(file, function) of each hop, as the page lists them: `    cli/training.py   measure_and_train   ...`."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("## The way to the loop")[2].partition("\n## ")[0]
    return re.findall(r"^    ([\w/]+\.py) +(\w+)", section, re.MULTILINE)


def function(file: str, name: str) -> ast.FunctionDef:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{file} has no function {name}"
    return found[0]


def called(node: ast.AST) -> set[str]:
    names = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
    return {name.id if isinstance(name, ast.Name) else getattr(name, "attr", "") for name in names}


def test_each_hop_calls_the_next() -> None:
    way = the_way()
    assert way[0] == ("cli/train.py", "train") and way[-1] == ("train/worker/loop.py", "train")
    for (file, name), (next_file, next_name) in itertools.pairwise(way):
        wanted = STARTS if (name, next_name) == BETWEEN else next_name
        assert wanted in called(function(file, name)), f"{file} {name} does not call {wanted} of {next_file}"


def test_the_way_is_short() -> None:
    way = the_way()[:-1]
    assert len(way) <= MAX_FUNCTIONS and len({file for file, _ in way}) <= MAX_FILES


def test_the_child_that_is_started_is_the_loop() -> None:
    """The one hop between two processes: the parent's table names the module whose `main` is next."""
    from hivetune.process.protocol import ENTRIES, Train

    way = the_way()
    hop = next(i for i, (here, there) in enumerate(itertools.pairwise(way)) if (here[1], there[1]) == BETWEEN)
    assert "hivetune." + way[hop + 1][0].removesuffix(".py").replace("/", ".") == ENTRIES[Train]


def test_no_hop_only_passes_on() -> None:
    """A function that calls nothing but the next hop has no reason to stand between."""
    for file, name in the_way()[:-1]:
        assert len(called(function(file, name))) > 1, f"{file} {name} only passes on"

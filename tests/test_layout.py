"""The fences: which room may import which, who may import torch, and how large a piece may get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "hivetune"
MODULES = sorted(SOURCE.rglob("*.py"))

# A module imports its own room and rooms further up, never further down. One row: equal rank, no imports across.
ROOMS = (
    {"errors", "records", "__init__"},
    {"config", "base"},
    {"process"},
    {"models", "run"},
    {"data"},
    {"machine"},
    {"plan"},
    {"engine", "supervise"},
    {"judge"},
    {"release"},
    {"serve"},
    {"walk"},
    {"cli"},
    {"__main__"},
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
TENSORS = {"torch", "transformers", "peft", "safetensors", "accelerate", "bitsandbytes", "numpy", "triton"}

# path: (longest module, reason). Everything else has at most MAX_LINES.
MAX_LINES = 450
MAX_FUNCTION_LINES = 80


def room(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_up(path: Path) -> None:
    mine = room(path)
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "hivetune" or len(parts) < 2:
            continue
        other = parts[1] if parts[1] in RANK else "__init__"
        assert other == mine or RANK[other] < RANK[mine], f"{path}:{line}: {mine} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_engine_touches_tensors(path: Path) -> None:
    if room(path) == "engine":
        return
    for line, name in imports(path):
        assert name.split(".")[0] not in TENSORS, f"{path}:{line} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_pieces_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES, f"{path} is too long: is it still one thing?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_lives_there(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no opening sentence"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_exception_is_swallowed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or (
            isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        )
        silent = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
        assert not (broad and silent), f"{path}:{node.lineno} hides whatever went wrong"


def test_only_the_command_line_prints() -> None:
    for path in MODULES:
        if room(path) == "cli" or path == SOURCE / "process" / "child.py":  # a child prints into its own log file
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno} prints"


def test_who_watches_never_loads_torch() -> None:
    """Command line, supervisor and everything but the engine, imported for real in a fresh interpreter."""
    names = [
        "hivetune." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in MODULES
        if room(path) not in ("engine", "__main__") and path.name != "__init__.py"
    ]
    script = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    script += f"loaded = sorted({TENSORS!r} & set(sys.modules))\nassert not loaded, loaded\n"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr

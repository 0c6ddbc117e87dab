"""The laws of imports: which room may import which, who may import torch, and that no exception is swallowed.

There is no limit on the lines of a module or a function, or on the modules of a folder: `make size` prints the sums.
What messages and pages name is checked in `test_names.py`.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "hivetune"
MODULES = sorted(SOURCE.rglob("*.py"))

# A module imports its own room and rooms further up, never further down. One row: equal rank, no imports across.
# A worker computes in a child process: nobody imports it but another worker, and torch is nowhere else.
ROOMS = (
    {"errors", "records", "__init__"},
    {"base"},
    {"config"},
    {"run"},
    {"process"},
    {"models"},
    {"data"},
    {"models/worker"},
    {"llama"},
    {"machine"},
    {"machine/worker"},
    {"checkers"},
    {"train"},
    {"train/worker"},
    {"release"},
    {"release/worker"},
    {"judge"},
    {"judge/worker"},
    {"serve"},
    {"synth"},
    {"walk"},
    {"cycle"},
    {"dashboard"},
    {"cli"},
    {"__main__"},
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
TENSORS = {"torch", "transformers", "peft", "safetensors", "accelerate", "bitsandbytes", "numpy", "triton"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    return room_of(path.relative_to(SOURCE).with_suffix("").parts)


def room_of(parts: tuple[str, ...]) -> str:
    """ "train/worker" and the like for what lies in a worker, else the first folder or the module."""
    return "/".join(parts[:2]) if "/".join(parts[:2]) in RANK else parts[0]


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands in the file."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def module_name(path: Path) -> str:
    return ".".join(("hivetune", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def test_imports_point_up() -> None:
    wrong = []
    for path in MODULES:
        mine = room(path)
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] == "hivetune" and len(parts) > 1:
                other = room_of(tuple(parts[1:])) if parts[1] in RANK else "__init__"
                inward = other.endswith("/worker") and not mine.endswith("/worker")
                if other != mine and (RANK[other] >= RANK[mine] or inward):
                    wrong.append(f"{path}:{line}: {mine} imports {name}")
    assert not wrong


def test_no_import_circle() -> None:
    """Inside a room too, and wherever in a file the import stands."""
    known = {module_name(path) for path in MODULES}
    needs = {}
    for path in MODULES:
        named = [name if name in known else name.rpartition(".")[0] for _, name in imports(path)]
        needs[module_name(path)] = {name for name in named if name in known and name != module_name(path)}
    left = dict(needs)
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, f"modules in circles, or above one: {sorted(left)}"


def test_only_workers_touch_tensors() -> None:
    outside = [path for path in MODULES if not room(path).endswith("/worker")]
    wrong = [f"{p}:{line} {name}" for p in outside for line, name in imports(p) if name.split(".")[0] in TENSORS]
    assert not wrong


def test_no_exception_is_swallowed() -> None:
    wrong = []
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
            if broad and silent:
                wrong.append(f"{path}:{node.lineno} hides whatever went wrong")
    assert not wrong


@pytest.mark.slow
def test_who_watches_never_loads_torch() -> None:
    """Command line, supervisor and everything but the workers, imported for real in a fresh interpreter."""
    names = [
        "hivetune." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in MODULES
        if not room(path).endswith(("/worker", "__main__")) and path.name not in ("__init__.py", "__main__.py")
    ]
    script = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    script += f"loaded = sorted({TENSORS!r} & set(sys.modules))\nassert not loaded, loaded\n"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr

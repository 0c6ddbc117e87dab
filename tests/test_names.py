"""The commands, options, settings and files that messages and pages name exist."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

from hivetune.cli.main import COMMANDS, _app
from hivetune.config import known_settings

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hivetune"
LOG = ROOT / "docs" / "log.md"  # it names what was tried and is gone
PAGES = [
    ROOT / "README.md",
    *sorted({*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")} - {LOG}),
]


@functools.cache
def texts() -> list[tuple[str, str]]:
    """(place, text) of every string in the source and every line of its data files and of the pages."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node.value))
    for path in (*sorted(SOURCE.rglob("*.toml")), *PAGES):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found.append((f"{path.relative_to(ROOT)}:{number}", line))
    return found


def named_commands() -> Iterator[tuple[str, str, str]]:
    """(place, command, the rest up to the end of what belongs to it) for each `hivetune WORD...` in a text."""
    for place, text in texts():
        if "import" not in text:  # code in an example of Python
            for match in re.finditer(r"\bhivetune +([a-z-]+)([^`;|&#\n]*)", text):
                yield place, match[1], match[2]


@functools.cache
def options_of(command: str) -> set[str]:
    """The options of a command, as its help lists them."""
    found = typer.main.get_command(_app(command)).commands[command]  # type: ignore[attr-defined]
    return {text for each in found.params for text in (*each.opts, *each.secondary_opts)} | {"--json", "--help"}


def test_every_command_that_is_named_exists() -> None:
    found = list(named_commands())
    assert len(found) > 100
    assert [(place, command) for place, command, _ in found if command not in COMMANDS] == []


def test_every_option_of_a_named_command_exists() -> None:
    wrong = []
    for place, command, rest in named_commands():
        if command in COMMANDS:
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest)
            wrong += [f"{place}: {command} has no {option}" for option in options if option not in options_of(command)]
    assert wrong == []


def test_every_setting_that_a_page_names_exists() -> None:
    """`data.path` and the like in backticks, wherever the first word is a section of the config."""
    keys = {setting.key for setting in known_settings()}
    sections = {key.split(".")[0] for key in keys if "." in key}
    pattern = re.compile(rf"`({'|'.join(sorted(sections))})\.([a-z_]+)\b(?![./(])")
    found = [(page.name, ".".join(name)) for page in PAGES for name in pattern.findall(page.read_text("utf-8"))]
    assert len(found) > 30
    files = ("json", "jsonl", "html")  # eval.json, eval.html
    assert [(page, name) for page, name in found if name not in keys and not name.endswith(files)] == []


def test_every_file_of_the_repository_that_is_named_exists() -> None:
    name = re.compile(r"(?<![\w/.-])(?:docs|src|tools|bench|tests)/[\w./-]+\.\w+")
    found = [(place, page) for place, text in texts() for page in name.findall(text)]
    foreign = {"docs/gguf.md", "src/models/phi3.cpp"}  # in ggml-org/ggml and llama.cpp
    assert [(place, page) for place, page in found if not (ROOT / page).exists() and page not in foreign] == []


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"

"""The command line's contract: lazy imports, exit codes, one JSON document, and docs that name only what exists."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hivetune.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def hivetune(*arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hivetune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_help_imports_no_command() -> None:
    """What keeps `--help` at about 0.15 s: only the frame is loaded."""
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(sorted(m for m in sys.modules if m.startswith('hivetune')), file=sys.stderr))\n"
        "sys.argv = ['hivetune', '--help']\n"
        "from hivetune.cli.main import main\nmain()\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "verify-resume" in finished.stdout
    loaded = finished.stderr.strip()
    assert loaded == str(["hivetune", "hivetune.cli", "hivetune.cli.main", "hivetune.cli.output", "hivetune.errors"]), (
        loaded
    )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_explains_itself(name: str) -> None:
    module, function, line = COMMANDS[name]
    body = vars(importlib.import_module(f"hivetune.cli.{module}"))[function]
    assert inspect.getdoc(body)
    assert line.endswith(".")


def test_errors_have_their_exit_code_and_one_document(tmp_path: Path) -> None:
    finished = hivetune("train", str(tmp_path / "no.yaml"), "--json")
    assert finished.returncode == 2
    document = json.loads(finished.stdout)
    assert document["schema"] == 1
    assert document["error"]["type"] == "UsageError"
    assert "Traceback" not in finished.stderr


def test_an_unknown_command_names_the_nearest() -> None:
    finished = hivetune("trian")
    assert finished.returncode == 2
    assert "train" in finished.stderr


def test_the_schema_is_one_document() -> None:
    finished = hivetune("config", "--schema")
    assert finished.returncode == 0
    assert "lora" in json.loads(finished.stdout)["properties"]


def documented_commands() -> list[tuple[str, str]]:
    """(place, command) of every `hivetune ...` in a code block or inline code of the docs."""
    found = []
    for page in PAGES:
        fenced = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```"):
                fenced = not fenced
            pieces = [line.strip().removeprefix("$ ")] if fenced else re.findall(r"`(hivetune [^`]+)`", line)
            for piece in pieces:
                for command in re.split(r"\s*(?:&&|\|\||[|;])\s*", piece.split("  #")[0].split(" # ")[0]):
                    if command.startswith("hivetune "):
                        found.append((f"{page.relative_to(ROOT)}:{number}", command))
    return found


def test_commands_in_the_docs_exist_with_their_options() -> None:
    commands = documented_commands()
    assert len(commands) > 10
    help_texts: dict[str, str] = {}
    for place, command in commands:
        words = command.split()[1:]
        if words and words[0].startswith("-"):
            continue
        name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
        assert name, f"{place}: hivetune {words[0]} is no command"
        if name not in help_texts:
            help_texts[name] = hivetune(*name.split(), "--help").stdout
        for option in re.findall(r"(?<=\s)--[a-z-]+", command):
            assert option in help_texts[name] or option == "--json", f"{place}: {name} has no {option}"


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"

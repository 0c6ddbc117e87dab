"""The command line's contract: lazy imports, exit codes, one JSON document."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hivetune.cli.main import COMMANDS


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
    frame = ["base", "base.private", "cli", "cli.main", "cli.output", "errors"]
    assert loaded == str(["hivetune", *(f"hivetune.{name}" for name in frame)]), loaded


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

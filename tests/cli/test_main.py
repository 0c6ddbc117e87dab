"""The command line's contract: lazy imports, exit codes, one JSON document."""

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hivetune.cli.main import COMMANDS, LEFT_BEHIND


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


def test_what_says_what_it_leaves_behind_is_a_command() -> None:
    assert set(LEFT_BEHIND) < set(COMMANDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("name", "kept"), [("data check", "nothing was written"), ("export", "earlier export is kept")]
)
def test_a_command_that_is_stopped_says_what_it_leaves_behind(
    tmp_path: Path, name: str, kept: str, number: int
) -> None:
    """The real frame around a command that waits for ever, as one does for a pipe that nobody writes to."""
    module, function, _ = COMMANDS[name]
    script = (
        "import sys, time, importlib\n"
        f"sys.argv = ['hivetune', *{name.split()!r}, '--json']\n"
        "from hivetune.cli.main import main\n"
        "def wait() -> None:\n    print('ready', file=sys.stderr, flush=True)\n    time.sleep(600)\n"
        f"vars(importlib.import_module('hivetune.cli.{module}'))[{function!r}] = wait\n"
        "main()\n"
    )
    environment = {**os.environ, "HIVETUNE_HOME": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True, env=environment
    ) as waiting:
        assert waiting.stderr is not None and waiting.stderr.readline() == "ready\n"
        waiting.send_signal(number)
        out, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 128 + number
    document = json.loads(out)
    assert (document["error"]["type"], kept in document["error"]["hint"], kept in err) == ("Stopped", True, True)

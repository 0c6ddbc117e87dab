"""The command line's contract: lazy imports, exit codes, one JSON document."""

import importlib
import inspect
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from command import hivetune

from hivetune.cli.main import COMMANDS, EXIT_CODES
from hivetune.errors import HivetuneError, Stopped

# They do their work without an argument.
LONG = {"demo", "doctor", "serve", "bench", "dashboard", "synth"}


def ask(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run a command line with --json: exit code, the one document, stderr."""
    done = hivetune(*arguments, "--json")
    assert done.stdout.endswith("\n") and done.stdout.count("\n") == 1, done.stdout
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    return done.returncode, document, done.stderr


def is_error(document: dict[str, Any]) -> bool:
    return set(document) == {"schema", "error"} and set(document["error"]) == {"type", "message", "hint"}


@pytest.mark.slow
def test_help_imports_no_command() -> None:
    """What keeps `--help` at about 0.1 s: no database, no settings, no torch."""
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "sys.argv = ['hivetune', '--help']\n"
        "from hivetune.cli.main import main\nmain()\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Look:" in finished.stdout
    loaded = set(finished.stderr.split())
    assert not loaded & {"torch", "pydantic", "rich", "sqlite3", "hivetune.config", "hivetune.base.database"}


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_every_command_explains_itself_and_is_one_document(name: str) -> None:
    if name:
        module, function, line = COMMANDS[name]
        assert inspect.getdoc(vars(importlib.import_module(f"hivetune.cli.{module}"))[function])
        assert line.endswith(".") and " " not in name
    words = name.split()
    told = hivetune(*words, "--help")
    assert (told.returncode, told.stderr) == (0, "") and told.stdout.strip().startswith(
        " ".join(("Usage: hivetune", *words))
    )
    code, document, _ = ask(*words, "--bogus")
    assert code == 2 and is_error(document)
    assert document["error"]["type"] == "UsageError" and "--bogus" in document["error"]["message"]
    assert document["error"]["hint"] == f"see: {' '.join(('hivetune', *words))} --help"
    if name not in LONG:
        code, document, err = ask(*words)
        assert is_error(document) if code else len(document) > 1
        assert code == 0 or err == f"hivetune: {document['error']['message']}\nhint: {document['error']['hint']}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trian", "'train'"),
        ("show", "Missing argument"),
        ("bench rows.jsonl --repeat many", "'--repeat'"),
        ("runs extra", "extra"),
        ("train no.yaml", "cannot read no.yaml"),
    ],
)
def test_a_usage_error_is_one_document(line: str, words: str) -> None:
    code, document, err = ask(*line.split())
    assert code == 2 and is_error(document) and words in document["error"]["message"] and "Traceback" not in err


def test_a_bug_is_one_document_and_its_traceback_a_file(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hivetune.cli.look.known_runs", lambda *_: 1 / 0)
    code, document, err = ask("runs")
    (kept,) = (own_home / "bugs").iterdir()
    assert code == 1 and is_error(document) and "ZeroDivisionError" in document["error"]["message"]
    assert str(kept) in document["error"]["hint"]
    assert "Traceback" in kept.read_text() and "Traceback" not in err
    kept.unlink()
    (own_home / "bugs").rmdir()
    (own_home / "bugs").write_text("in the way")
    code, document, err = ask("runs")
    assert code == 1 and is_error(document) and "Traceback" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_a_command_or_a_question_that_is_broken_off_is_a_stop(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivetune.cli.look.known_runs", Mock(side_effect=error))
    code, document, err = ask("runs")
    assert (code, document["error"]["type"]) == (130, "Stopped") and "Aborted" not in err


# The real frame around a command that waits for ever and goes on after every failure, as a cycle does.
WAITING = """
import sys, time
import hivetune.cli.machine
sys.argv = ['hivetune', 'fetch', '--json']
from hivetune.cli.main import main
def wait() -> None:
    print('ready', file=sys.stderr, flush=True)
    while True:
        try:
            time.sleep(600)
        except Exception:
            pass
hivetune.cli.machine.fetch = wait
main()
"""


@pytest.mark.slow
def test_a_command_that_is_stopped_says_what_it_leaves_behind() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=pipe, stderr=pipe, text=True) as waiting:
        assert waiting.stderr is not None and waiting.stderr.readline() == "ready\n"
        waiting.send_signal(signal.SIGTERM)
        out, err = waiting.communicate(timeout=30)
    error = json.loads(out)["error"]
    assert (waiting.returncode, error["type"]) == (128 + signal.SIGTERM, "Stopped")
    assert "run it again to resume" in error["hint"] and error["hint"] in err


@pytest.mark.slow
def test_a_server_that_is_stopped_has_printed_one_document() -> None:
    line, pipe = [sys.executable, "-m", "hivetune", "dashboard", "--port", "0", "--json"], subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and "error" not in json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGINT, ""), err


@pytest.mark.slow
def test_a_stop_while_python_still_imports_is_told_as_any_other() -> None:
    """As a person does who sees a mistake in the line: it comes when the first third-party package is imported."""
    script = (
        "import builtins, os, sys\n"
        "import hivetune.cli.start\n"
        "imported = builtins.__import__\n"
        "def stopped(name, *rest):\n"
        f"    if name == 'typer':\n        os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "    return imported(name, *rest)\n"
        "builtins.__import__ = stopped\n"
        "sys.argv = ['hivetune', 'runs', '--json']\n"
        "hivetune.cli.start.run()\n"
    )
    line = [sys.executable, "-c", script]
    stopped = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert (stopped.returncode, stopped.stderr) == (130, "hivetune: stopped\n")
    assert is_error(json.loads(stopped.stdout))


def test_hivetune_alone_shows_the_one_screen() -> None:
    alone = hivetune().stdout
    assert alone == hivetune("status").stdout
    assert "next: start with your own rows: hivetune init ROWS" in alone
    assert ask("--version")[1]["version"] and len(COMMANDS) <= 30
    assert "lora" in json.loads(hivetune("config", "--schema").stdout)["properties"]


def test_the_page_of_exit_codes_has_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    kinds = [HivetuneError, *HivetuneError.__subclasses__()]
    codes = {kind.exit_code for kind in kinds if kind is not Stopped} | {0, 130, 143}
    told = {int(code) for line in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in line.split(",")}
    assert told == codes
    assert all(re.search(rf"\b{code}\b", EXIT_CODES) for code in codes)

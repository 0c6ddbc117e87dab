"""The command line's contract: lazy imports, exit codes, one JSON document."""

import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hivetune.cli.explain import explain
from hivetune.cli.main import COMMANDS, EXIT_CODES, main
from hivetune.cli.output import MODE
from hivetune.errors import DoesNotFit, HivetuneError, Stopped

Ask = Callable[..., tuple[int, dict[str, Any], str]]
# They do their work without an argument.
LONG = {"demo", "doctor", "serve", "bench", "dashboard"}


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
    assert "Look:" in finished.stdout
    loaded = finished.stderr.strip()
    frame = ["base", "base.private", "base.typed", "base.units", "cli", "cli.main", "cli.output", "errors"]
    frame += ["process", "process.stop"]
    assert loaded == str(["hivetune", *(f"hivetune.{name}" for name in frame)]), loaded


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_explains_itself(name: str) -> None:
    module, function, line = COMMANDS[name]
    body = vars(importlib.import_module(f"hivetune.cli.{module}"))[function]
    assert inspect.getdoc(body)
    assert line.endswith(".")


def test_there_are_at_most_30_commands() -> None:
    assert len(COMMANDS) <= 30 and all(" " not in name for name in COMMANDS)


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


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Ask]:
    """A command line with --json in this process: exit code, the one document, stderr."""

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["hivetune", *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert out.endswith("\n") and out.count("\n") == 1, out
        document = json.loads(out)
        assert document["schema"] == 1
        return int(ended.value.code or 0), document, err

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield run
    MODE.json = False
    for number, handler in before.items():
        signal.signal(number, handler)


def is_error(document: dict[str, Any]) -> bool:
    return set(document) == {"schema", "error"} and set(document["error"]) == {"type", "message", "hint"}


def test_a_question_that_is_broken_off_is_a_stop(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_off(*_: object) -> None:
        raise typer.Abort

    monkeypatch.setattr("hivetune.cli.init.first_settings", broken_off)
    code, document, err = ask("init", "rows.jsonl")
    assert (code, document["error"]["type"]) == (130, "Stopped") and "Aborted" not in err


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_a_wrong_option_is_one_document(name: str, ask: Ask) -> None:
    code, document, _ = ask(*name.split(), "--bogus")
    assert code == 2 and is_error(document)
    assert document["error"]["type"] == "UsageError" and "--bogus" in document["error"]["message"]
    assert document["error"]["hint"] == f"see: {' '.join(('hivetune', *name.split()))} --help"


@pytest.mark.parametrize("name", [*(name for name in COMMANDS if name not in LONG), ""])
def test_no_arguments_are_one_document(name: str, ask: Ask) -> None:
    code, document, err = ask(*name.split())
    assert is_error(document) if code else len(document) > 1
    assert code == 0 or err == f"hivetune: {document['error']['message']}\nhint: {document['error']['hint']}\n"


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_help_is_one_document(name: str, ask: Ask) -> None:
    code, document, err = ask(*name.split(), "--help")
    assert code == 0 and not err
    assert document["help"].startswith(" ".join(("Usage: hivetune", *name.split())))


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("trian", 2, "'train'"),
        ("chek", 2, "'check'"),
        ("show", 2, "Missing argument"),
        ("show last -n many", 2, "'--lines'"),
        ("runs extra", 2, "extra"),
        ("--show-completion", 2, "--show-completion"),
    ],
)
def test_a_usage_error_is_one_document(line: str, code: int, words: str, ask: Ask) -> None:
    got, document, _ = ask(*line.split())
    assert got == code and is_error(document) and words in document["error"]["message"]


def test_version_and_schema_are_one_document(ask: Ask) -> None:
    assert ask("--version")[1]["version"]
    assert "lora" in ask("config", "--schema")[1]["json_schema"]["properties"]


def test_a_bug_is_one_document_and_its_traceback_a_file(
    ask: Ask, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivetune.cli.runs.known_runs", lambda *_: 1 / 0)
    code, document, err = ask("runs")
    (kept,) = (own_home / "bugs").iterdir()
    assert code == 1 and is_error(document) and "ZeroDivisionError" in document["error"]["message"]
    assert str(kept) in document["error"]["hint"]
    assert "Traceback" in kept.read_text() and "Traceback" not in err


def test_a_bug_with_no_place_for_its_traceback_prints_it(
    ask: Ask, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_home / "bugs").write_text("in the way")
    monkeypatch.setattr("hivetune.cli.runs.known_runs", lambda *_: 1 / 0)
    code, document, err = ask("runs")
    assert code == 1 and is_error(document) and "Traceback" in err


def test_a_file_that_grows_too_large_names_the_limits() -> None:
    """Of FAT32, or ulimit -f: no path is in the error of a write."""
    with tempfile.TemporaryFile() as file, pytest.raises(OSError, match="File too large") as caught:
        os.posix_fallocate(file.fileno(), 1 << 62, 1)
    told = explain(caught.value)
    assert type(told) is DoesNotFit and "ulimit -f" in told.hint


def test_an_interrupt_is_one_document(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hivetune.cli.runs.known_runs", interrupt)
    code, document, _ = ask("runs")
    assert code == 130 and is_error(document) and document["error"]["type"] == "Stopped"


def test_under_json_stderr_does_not_repeat_the_document(ask: Ask) -> None:
    code, document, err = ask("runs")
    assert code == 0 and document == {"schema": 1, "runs": []} and err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("name", "kept"), [("check", "nothing was written"), ("export", "earlier export is kept")])
def test_a_command_that_is_stopped_says_what_it_leaves_behind(
    tmp_path: Path, name: str, kept: str, number: int
) -> None:
    """The real frame around a command that waits for ever, as one does for a pipe that nobody writes to, and that goes
    on after every failure, as a cycle does."""
    module, function, _ = COMMANDS[name]
    script = (
        "import sys, time, importlib\n"
        f"sys.argv = ['hivetune', *{name.split()!r}, '--json']\n"
        "from hivetune.cli.main import main\n"
        "def wait() -> None:\n    print('ready', file=sys.stderr, flush=True)\n"
        "    while True:\n        try:\n            time.sleep(600)\n        except Exception:\n            pass\n"
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


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve --port 0", "dashboard --port 0"])
def test_a_server_that_is_stopped_has_printed_one_document(command: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "hivetune", *command.split(), "--json"]
    environment = {**os.environ, "HIVETUNE_HOME": str(tmp_path / "home")}
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=tmp_path) as process:
        assert process.stdout is not None and "error" not in json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGINT, ""), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_python_still_imports_is_told_as_any_other(tmp_path: Path, number: int) -> None:
    """As a person does who sees a mistake in the line: it comes when the first third-party package is imported."""
    script = (
        "import builtins, os, sys\n"
        "import hivetune.cli.start\n"
        "imported = builtins.__import__\n"
        "def stopped(name, *rest):\n"
        f"    if name == 'typer':\n        os.kill(os.getpid(), {int(number)})\n"
        "    return imported(name, *rest)\n"
        "builtins.__import__ = stopped\n"
        "sys.argv = ['hivetune', 'runs', '--json']\n"
        "hivetune.cli.start.run()\n"
    )
    environment = {**os.environ, "HIVETUNE_HOME": str(tmp_path)}
    stopped = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert (stopped.returncode, stopped.stderr) == (128 + number, "hivetune: stopped\n")
    assert is_error(json.loads(stopped.stdout))


def test_hivetune_alone_shows_the_one_screen(tmp_path: Path) -> None:
    environment = {**os.environ, "HIVETUNE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "hivetune"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    asked = subprocess.run([*command, "status"], capture_output=True, text=True, check=True, env=environment)
    assert alone.stdout == asked.stdout
    assert "next: start with your own rows: hivetune init ROWS" in alone.stdout


def test_the_page_of_exit_codes_has_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    kinds = [HivetuneError, *HivetuneError.__subclasses__()]
    codes = {kind.exit_code for kind in kinds if kind is not Stopped} | {0, 130, 143}
    told = {int(code) for line in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in line.split(",")}
    assert told == codes
    assert all(re.search(rf"\b{code}\b", EXIT_CODES) for code in codes)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hivetune sho", ["show"]),
        ("hivetune forg", ["forget"]),
        ("hivetune train run.yaml --det", ["--detach"]),
        ("hivetune train run.yaml --set lora.r", ["lora.r="]),
        ("hivetune train run.yaml --set cycle.promote=", ["cycle.promote=auto", "cycle.promote=ask"]),
        ("hivetune plan rows.csv --model sm", ["smollm2-135m"]),
    ],
)
def test_bash_is_offered_what_fits(line: str, offered: list[str], tmp_path: Path) -> None:
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert complete("bash", asked, tmp_path).split() == offered


def test_other_shells_are_offered_the_same(tmp_path: Path) -> None:
    """They send the line in a variable of typer's own."""
    asked = {"_TYPER_COMPLETE_ARGS": "hivetune show la", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert complete("fish", asked, tmp_path) == "last\n"


def complete(shell: str, asked: dict[str, str], home: Path) -> str:
    """With the variables that the scripts of `hivetune --show-completion` set, and no others."""
    environment = {**os.environ, **asked, "_HIVETUNE_COMPLETE": f"complete_{shell}", "HIVETUNE_HOME": str(home)}
    command = [sys.executable, "-c", "from hivetune.cli.main import main; main()"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout

"""The command `check` as scripts see them: one document, exit codes, files."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import hivetune
from data.conftest import chat

from hivetune.cli.rows import problem_text


def data(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return hivetune(*arguments)


@pytest.fixture
def mixed(write_rows: Callable[..., Path]) -> Path:
    rows = [chat(f"What is {i}?", f"The number after {i - 1}.") for i in range(9)]
    return write_rows([*rows, "no json"])


def test_check_prints_one_document_in_the_form_of_the_contract(mixed: Path) -> None:
    finished = data("check", mixed, "--json")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert document["schema"] == 1
    assert (document["rows_in"], document["usable"], document["duplicates"]) == (10, 9, 0)
    assert document["rejected"] == {"bad-json": 1}
    assert document["set_aside"] == {}
    [problem] = document["problems"]
    assert (problem["source"], problem["reason"]) == (f"{mixed}:10", "bad-json")
    assert problem["hint"]
    assert "template" in document["not_run"]


def test_too_many_rejected_rows_exit_with_3_and_still_one_document(mixed: Path) -> None:
    finished = data("check", mixed, "--set", "data.max_rejected=0.05", "--json")
    assert finished.returncode == 3
    assert json.loads(finished.stdout)["usable"] == 9
    assert "max_rejected" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("name", ["two\nlines", "a\x1b[31mred", "tab\tbed", "back\rwards"])
def test_a_file_name_is_one_line_of_what_can_be_seen(name: str, tmp_path: Path) -> None:
    spelled = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(chat("What is it?", "A bee.")) + "\nno json\n")
    for path in (tmp_path / f"{name}.jsonl", tmp_path / f"{name}-missing.jsonl"):
        finished = data("check", path)
        said = finished.stdout + finished.stderr
        assert name not in said and str(tmp_path / spelled) in said
        assert all(c.isprintable() or c in "\n\t" for c in said)


@pytest.mark.slow
def test_empty_and_missing_input(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    empty = data("check", write_rows([]))
    assert empty.returncode == 3
    assert "no rows" in empty.stderr
    missing = data("check", tmp_path / "no.jsonl", "--json")
    assert missing.returncode == 2
    assert json.loads(missing.stdout)["error"]["type"] == "UsageError"
    nothing = data("check")
    assert nothing.returncode == 2


@pytest.mark.slow
def test_check_with_everything(write_rows: Callable[..., Path], chatml: Path, tmp_path: Path) -> None:
    rows = [{"q": f"What is {i}?", "a": f"The number after {i - 1}."} for i in range(20)]
    clean, page = tmp_path / "out" / "clean.jsonl", tmp_path / "out" / "report.html"
    finished = data(
        "check", write_rows([*rows, {"q": "x"}]), "--model", chatml, "--columns", "prompt=q,completion=a",
        "--max-length", "40", "--clean", clean, "--html", page,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "unknown-layout" in finished.stdout
    assert len(clean.read_text().splitlines()) == 20
    assert len((tmp_path / "out" / "clean.quarantine.jsonl").read_text().splitlines()) == 1
    assert page.read_text().startswith("<!doctype html>")


def test_what_is_written_is_for_its_user_alone_whatever_the_umask(mixed: Path, tmp_path: Path, own_home: Path) -> None:
    out = tmp_path / "out"
    before = os.umask(0)
    try:
        finished = data("check", mixed, "--clean", out / "clean.jsonl", "--html", out / "page" / "report.html")
    finally:
        os.umask(before)
    assert finished.returncode == 0, finished.stderr
    written = [out, *out.rglob("*"), *own_home.rglob("*")]
    assert len(written) >= 5
    open_to_others = {str(path): oct(path.stat().st_mode) for path in written if path.stat().st_mode & 0o077}
    assert open_to_others == {}


def test_places_with_the_same_words_take_one_line_and_secrets_never_do() -> None:
    same = [{"source": f"a.csv:{n}", "reason": "empty-turn", "hint": "fill it in"} for n in range(2, 42)]
    secrets = [{"source": f"a.csv:{n}", "reason": "redacted-secret", "hint": "a token; revoke it"} for n in range(6)]
    other = {"source": "a.csv:50", "reason": "empty-turn", "hint": "another"}
    lines, rows = problem_text([*secrets, *same, other])
    assert rows == 47
    assert lines[:6] == [f"a.csv:{n}: redacted-secret: a token; revoke it" for n in range(6)]
    assert lines[6:] == ["a.csv:2 and 39 more rows: empty-turn: fill it in", "a.csv:50: empty-turn: another"]


def test_collecting_with_nohup_goes_on_when_the_terminal_closes(tmp_path: Path) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text(json.dumps(chat("one?", "1")) + "\n")
    command = ["nohup", sys.executable, "-m", "hivetune", "collect", "--follow", log, "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as collecting:
        assert collecting.stdout is not None and json.loads(collecting.stdout.readline())["stored"] == 1
        collecting.send_signal(signal.SIGHUP)
        with open(log, "a") as file:
            file.write(json.dumps(chat("two?", "2")) + "\n")
        assert json.loads(collecting.stdout.readline())["stored"] == 2
        collecting.terminate()
        collecting.communicate(timeout=60)
    assert collecting.returncode == 143

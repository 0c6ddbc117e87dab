"""Wrong input of every kind, as people give it: one message with what, where and what next, and the documented code."""

import gzip
import json
import os
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import hivetune
from small_disk import fill
from test_damage import make_home, raise_it

from hivetune.base.database import open_database
from hivetune.run.status import shortest_name

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """(exit code, what was said) of a command line in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hivetune.cli.output.report_bug", raise_it)

    def ask(*arguments: str) -> tuple[int, str]:
        done = hivetune(*arguments)
        return done.returncode, done.stderr + done.stdout

    return ask


def make_files(folder: Path) -> None:
    rows = [{"prompt": f"What is {i}?", "completion": f"The number after {i - 1}."} for i in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "mine.yaml").write_text("model: smollm2-135m\ndata: {path: rows.jsonl}\n")
    (folder / "half.yaml").write_text("model: smollm2-135m\n")
    (folder / "folder.yaml").mkdir()
    (folder / "here").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "no.yaml").write_text("model: [" + "x, " * 200 + "x]\n")
    (folder / "lost.yaml").write_text("model: smollm2-135m\ndata: {path: rowz.jsonl}\n")
    (folder / "odd.csv").write_text("colour,weight\nred,1\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "tab.yaml").write_text("model: smollm2-135m\ndata:\n\tpath: rows.jsonl\n")
    (folder / "colon.yaml").write_text("model: smollm2-135m\ndata: a: b\n")
    (folder / "latin.yaml").write_bytes("model: é\n".encode("latin-1"))
    (folder / "circle").symlink_to("circle")
    (folder / "book.xlsx").write_bytes(b"PK\x03\x04" + bytes(26) + b"xl/workbook.xml" + bytes(90))
    (folder / "paper.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\n")
    (folder / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(b"SQLite format 3\0"))
    with sqlite3.connect(folder / "app.db") as database:
        database.execute("CREATE TABLE chats (question, answer)")
    database.close()


WRONG = [
    # configs and settings
    ("train folder.yaml", 2, "folder.yaml is a folder"),
    ("train no.yaml", 2, "'model': Input should be a valid string, got ['x', 'x'"),
    ("train half.yaml", 2, "'data' is missing\nhint: list all settings"),
    ("train lost.yaml", 2, "rowz.jsonl does not exist"),
    ("train mine.yaml --set lora=3", 2, "'lora' is a group of settings: set lora.r"),
    ("train mine.yaml --set data.path=", 2, "'data.path': choose one of: files, globs, folders"),
    (
        "train mine.yaml --set device=tpu",
        2,
        "'device': choose one of: device to train on: auto, cpu, cuda or cuda:N (AMD cards too); got 'tpu'",
    ),
    ("train mine.yaml --set lorra.r=8", 2, "--set lorra.r=8: unknown setting 'lorra', did you mean 'lora.r'?"),
    ("init rows.jsonl --set lora.r=x", 2, "--set lora.r=x: 'lora.r'"),
    ("init rowz.jsonl", 2, "rowz.jsonl does not exist"),
    ("init rows.jsonl --out here", 2, "here is a folder"),
    ("train tab.yaml", 2, "tab.yaml:3 is not YAML: while scanning for the next token"),
    ("train colon.yaml", 2, "colon.yaml:2 is not YAML: mapping values are not allowed in this context"),
    ("train latin.yaml", 2, "latin.yaml is not YAML: "),
    ("init circle", 2, "circle is a broken link"),
    ("plan rows.jsonl", 2, "hint: add --model smollm2-135m, or write a config: hivetune init rows.jsonl"),
    ("fetch nosuch", 2, "model nosuch not found: it is neither a folder nor a Hub id"),
    # plans
    ("plan mine.yaml --rows -5", 2, "Invalid value for '--rows'"),
    ("plan mine.yaml --cores 4", 2, "give --card too"),
    # files that hold no rows
    ("check book.xlsx", 2, "not a file of rows\nhint: unpack the archive; save each sheet as CSV"),
    ("check paper.pdf", 2, "paper.pdf is a PDF"),
    ("check model.gguf", 2, "hint: rows are JSONL, CSV, Parquet or SQLite"),
    ("check app.db", 2, "hint: hivetune collect 'sqlite:app.db?table=TABLE'"),
    ("check empty.jsonl", 3, "the files contain no rows"),
    ("check odd.csv --columns prompt=color,completion=weight", 3, "no column 'color'; did you mean 'colour'?"),
    ("collect rowz.jsonl", 2, "rowz.jsonl does not exist"),
    # what is elsewhere
    ("check https://example.org/rows.jsonl", 2, "curl -LO URL"),
    ("check someone/their-rows", 2, "hf download --repo-type dataset NAME"),
    ("init -", 2, "can be read once"),
    # a path of a user who does not exist
    ("init ~nobody-here.jsonl", 2, "~nobody-here.jsonl does not exist"),
    ("check rows.jsonl --model ~nobody-here/model", 2, "~nobody-here/model"),
    ("train rows.jsonl --model model.gguf", 2, "hint: give the folder or the Hub id of its safetensors"),
    ("chat ~nobody-here.gguf", 2, "~nobody-here.gguf"),
    # what would be overwritten, or cannot be written
    ("check rows.jsonl --clean rows.jsonl", 2, "rows.jsonl is also an input and would be overwritten"),
    ("check rows.jsonl --clean here", 2, "here is a folder"),
    ("check rows.jsonl --clean /sys/clean.jsonl", 2, "hivetune: /sys/clean.quarantine.jsonl: "),
    ("synth --out here", 2, "here is a folder"),
    # as root this took the place of /dev/null, for all programs of the machine
    ("check rows.jsonl --clean pipe", 2, "pipe is a device or pipe"),
    ("synth --out pipe", 2, "pipe is a device or pipe"),
    # options that would be left out in silence
    ("cycle status --once", 2, "cycle status takes no options\nhint: options belong to: hivetune cycle CONFIG"),
    ("cycle mine.yaml pause", 2, "cycle mine.yaml pause: a config takes no NAME"),
    # what is served
    ("serve --card foo", 2, "--card foo: not a card\nhint: give cuda:0"),
    # runs
    ("show last", 2, "there is no run 'last'\nhint: train the first one: hivetune train CONFIG"),
    ("chat none.gguf --prompt hi", 2, "none.gguf: No such file or directory\nhint: look at the path with ls"),
    ("chat helpdesk", 2, "there is no run, release or GGUF file 'helpdesk'"),
]


@pytest.mark.parametrize(("line", "code", "words"), WRONG)
def test_what_is_wrong_is_said_with_what_to_do(line: str, code: int, words: str, tmp_path: Path, call: Call) -> None:
    make_files(tmp_path)
    before = (tmp_path / "rows.jsonl").read_bytes()
    found, said = call(*line.split())
    assert (found, words in said) == (code, True), said
    assert "Traceback" not in said
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_a_command_that_is_proposed_can_be_pasted(tmp_path: Path, call: Call) -> None:
    make_files(tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path / "FAQ (final).jsonl")
    (tmp_path / "FAQ (final).yaml").write_text("")
    assert "or write a config: hivetune init 'FAQ (final).jsonl'" in call("train", "FAQ (final).jsonl")[1]
    assert "hint: train with it: hivetune train 'FAQ (final).yaml'" in call("init", "FAQ (final).jsonl")[1]


def test_a_name_that_is_not_utf_8(tmp_path: Path, call: Call) -> None:
    """It is checked; settings and the store, which have to hold it, refuse it."""
    make_files(tmp_path)
    name = os.fsdecode(b"rows\xff.jsonl")
    (tmp_path / "rows.jsonl").rename(tmp_path / name)
    assert call("check", name)[0] == 0
    code, said = call("init", name)
    assert (code, "its name is not UTF-8\nhint: rename it" in said) == (2, True), said
    assert call("train", name, "--model", "smollm2-135m")[0] == 2
    code, said = call("collect", name)
    assert (code, "'rows\\udcff.jsonl' can't be read" in said) == (2, True), said
    code, said = call("collect", str(tmp_path))
    assert "rows\\udcff.jsonl' is not read: its name is not UTF-8; rename it" in said and "bug" not in said


@pytest.mark.slow
def test_a_full_disk_is_the_one_that_is_named(
    tmp_path: Path, call: Call, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files(tmp_path)
    (tmp_path / "many.jsonl").write_text((tmp_path / "rows.jsonl").read_text() * 2000)
    (small_disk / "file").write_bytes(bytes(3_800_000))
    with monkeypatch.context() as temporary:
        temporary.setattr("tempfile.tempdir", str(small_disk))
        code, said = call("check", "many.jsonl")  # its children find the disk full
    assert (code, f"the disk of {small_disk}" in said, "set TMPDIR" in said) == (5, True, True), said
    fill(small_disk)
    code, said = call("check", "rows.jsonl", "--clean", str(small_disk / "clean.jsonl"))
    assert (code, f"{small_disk / 'clean.jsonl'} cannot be written: No space left" in said) == (5, True), said
    monkeypatch.setenv("HIVETUNE_HOME", str(small_disk / "home"))
    code, said = call("collect", "rows.jsonl")
    assert (code, "is full" in said or "No space left" in said, "damaged" in said) == (5, True, False), said


@pytest.mark.slow
def test_output_on_a_full_disk_is_said() -> None:
    """Python flushes it at its end, and would end with 120 and words of its own."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hivetune", "config"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, "the disk is full" in ended.stderr, "Exception" in ended.stderr) == (5, True, False)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as read:
        assert read.stdout is not None and read.stderr is not None
        read.stdout.close()
        assert read.stderr.read() == ""


@pytest.mark.slow
def test_input_that_was_closed_is_empty() -> None:
    """`hivetune check - <&-`, as some programs start others: Python's sys.stdin is None then."""
    command = f"{shlex.quote(sys.executable)} -m hivetune check - <&-"
    ended = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False
    )
    assert (ended.returncode, "the files contain no rows" in ended.stderr) == (3, True), ended.stderr


def test_a_home_that_is_a_file_is_said(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "file"
    home.write_text("")
    monkeypatch.setenv("HIVETUNE_HOME", str(home))
    assert call("runs") == (2, f"hivetune: the home {home} is a file\nhint: set HIVETUNE_HOME to a folder\n")


@pytest.mark.slow
def test_a_name_that_is_nearly_a_runs_name(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "home"))
    run = make_home(tmp_path / "home")
    with open_database() as database:
        database.execute("UPDATE runs SET path = ?", (str(run.rename(run.with_name("helpdesk-2f3a"))),))
    database.close()
    assert "hivetune releases helpdesk@1" in call("show", "helpdesk@1")[1]
    assert "did you mean helpdesk-2f3a? see the runs: hivetune runs" in call("show", "helpdsk-2f3a")[1]
    assert "did you mean last?" in call("show", "lasst")[1]
    assert shortest_name(run.with_name("helpdesk-2f3a")) == "helpdesk-2f3a"
    assert shortest_name(tmp_path / "FAQ (final)-2f3a") == f"'{tmp_path / 'FAQ (final)-2f3a'}'"

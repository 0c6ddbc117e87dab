"""What is shown is other people's text: it is read by a person, never obeyed by a terminal."""

import errno
import io
import json
import os
import re
import subprocess
import sys

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from hivetune.cli import output
from hivetune.cli.output import (
    MODE,
    Note,
    Table,
    answer,
    clean,
    emit,
    facts,
    present,
    progress,
    say,
    show,
    value_text,
    write,
)
from hivetune.errors import DataRefused

CLIPBOARD = "\x1b]52;c;ZWNobyBoZWxsbw==\x07"
EVIL = [CLIPBOARD, "\x9b2J", "\x1b[2J", "a\rb", "\x7f", "a\u202eb", "\udc9b.jsonl", "[link=http://x]y[/link]", "[/]"]


@given(st.text(st.characters(blacklist_categories=())))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    cleaned = clean(text)
    assert not any((ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 for c in cleaned)
    cleaned.encode()
    assert clean(cleaned) == cleaned


def test_ordinary_text_stays_as_it_is() -> None:
    text = "Grüße, 你好, שלום, 🙂\n\ttab"
    assert clean(text) == text


@pytest.mark.parametrize("evil", EVIL, ids=ascii)
@pytest.mark.parametrize("speak", [say, show, lambda text: present(Table("a b", [(text, 1)], text)), "progress"])
def test_every_way_to_speak_is_cleaned(
    evil: str, speak: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, where rich writes escapes of its own: those of the text are not among them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    if speak == "progress":
        with progress(evil, "rows") as report:
            report(1, 2)
    else:
        assert callable(speak)
        speak(evil)
    written = "".join(capsys.readouterr())
    shown = "".join(written.split())
    assert not any(bad in written for bad in ("\x1b]", "\x9b", "\x1b[2J", "\x7f", "\u202e"))
    assert "".join(clean(evil).split()) in shown


def test_the_document_is_clean_and_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODE, "json", True)
    emit({"columns": EVIL})
    written = capsys.readouterr().out
    assert clean(written) == written
    assert json.loads(written)["columns"] == EVIL


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_answer_is_cleaned_for_a_terminal_and_whole_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Terminal(), clean(CLIPBOARD)), (io.StringIO(), CLIPBOARD)):
        monkeypatch.setattr(sys, "stdout", stream)
        write(CLIPBOARD)
        assert stream.getvalue() == expected


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_loses_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    say("lost")
    with progress("lost too", "rows") as report:
        report(1, 1)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    monkeypatch.setattr(MODE, "json", True)
    with pytest.raises(OSError, match="space"):  # the document is what was asked for
        emit({"steps": 3})


def test_a_long_line_is_one_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say("x" * 500)
    assert capsys.readouterr().err == "x" * 500 + "\n"
    assert output.PLAIN_WIDTH < 500


def test_a_table_in_a_pipe_is_divided_by_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    present(Table("agent rows", [("coder\tof\nmine", 3), ("\x1b[31mtester", 41)], "two agents"))
    told = capsys.readouterr()
    assert told.out == "agent\trows\ncoder of mine\t3\n\\x1b[31mtester\t41\n"
    assert told.err == "two agents\n"


@pytest.mark.parametrize("columns", ["60", "80"])
def test_a_table_holds_on_a_narrow_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut: what does not fit goes on below."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", columns)
    why = "the answer repeats itself without end, so it is rejected and counted"
    present(Table("what reason rows why", [("rejected", "repeated-loop", 12345, why)]))
    lines = re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= int(columns)
    text = "".join(line.split("│")[-2].strip() + " " for line in lines if "│" in line)
    assert " ".join(text.split()) == why


def test_the_time_left_is_that_of_the_items_and_not_of_loading_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    report = output.plain_progress("answering", "items")
    for now[0], done, total in ((100.0, 1, 11), (120.0, 3, 11), (300.0, 1, 5), (320.0, 2, 5)):
        report(done, total)
    assert capsys.readouterr().err.splitlines() == [
        "answering: 1 of 11 items",
        "answering: 3 of 11 items, 80 s left",
        "answering: 1 of 5 items",
        "answering: 2 of 5 items, 60 s left",
    ]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "│ é\n".encode()),
        ({"PYTHONIOENCODING": "latin-1"}, b"\\u2502 \xe9\n"),
    ],
)
def test_no_encoding_of_a_terminal_is_a_fault(settings: dict[str, str], shown: bytes) -> None:
    script = "from hivetune.cli.output import settle_encodings, show; settle_encodings(); show('\\u2502 \\xe9')"
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **settings}, capture_output=True, check=True
    )
    assert ended.stdout == shown


def test_an_answer_is_its_document_or_its_lines_and_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns name a key or an attribute of each item, and the key how it is shown; notes go to stderr."""
    items = [{"name": "coder", "loss": 2.0, "memory_bytes": 10**9}, {"name": "tester", "loss": None, "memory_bytes": 5}]
    blocks = ("2 agents", Table("agent=name loss memory_bytes", items), Note("see: hivetune runs"))
    answer({"agents": items}, *blocks)
    told = capsys.readouterr()
    assert told.out == "2 agents\nagent\tloss\tmemory\ncoder\t2.000\t1.0 GB\ntester\t-\t5 B\n"
    assert told.err == "see: hivetune runs\n"
    monkeypatch.setattr(MODE, "json", True)
    with pytest.raises(typer.Exit) as ended:
        answer({"agents": items}, *blocks, error=DataRefused("too few"))
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert (ended.value.exit_code, document["agents"], document["error"]["message"]) == (3, items, "too few")
    assert told.err == "see: hivetune runs\nhivetune: too few\n"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("left_s", 150.0, "2 min"),
        ("latency_p50_s", 0.5321, "0.53 s"),
        ("disk_bytes", {"adapter": 10**6, "export": 0}, "adapter 1 MB, export 0 B"),
        ("tokens_per_second", 1234.4, "1234"),
        ("loss", 2.0, "2.000"),
        ("base_success", 0.25, "25%"),
        ("rows", 12345, "12,345"),
        ("pid", 12345, "12345"),
        ("fits", False, "no"),
        ("aliases", ("champion", "previous"), "champion, previous"),
        ("withdrawn", None, "-"),
        ("rejected", {}, "-"),
    ],
)
def test_the_key_decides_the_unit(key: str, value: object, text: str) -> None:
    assert value_text(key, value) == text


def test_facts_are_aligned_and_leave_out_what_is_not_there() -> None:
    document = {"state": "done", "loss_first": 2.0, "problem": "", "memory_bytes": 10**9}
    assert facts(document) == "state:      done\nloss first: 2.000\nmemory:     1.0 GB"
    assert facts(document, "state problem") == "state: done"

"""What is shown is other people's text: it is read by a person, never obeyed by a terminal."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from hivetune.cli import output
from hivetune.cli.judge import next_step
from hivetune.cli.output import (
    MODE,
    Note,
    Table,
    answer,
    clean,
    emit,
    explain,
    facts,
    present,
    progress,
    say,
    show,
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
    assert clean("Grüße, 你好, שלום, 🙂\n\ttab") == "Grüße, 你好, שלום, 🙂\n\ttab"


def tell(text: str) -> None:
    with progress(text, "rows") as report:
        report(1, 2)


@pytest.mark.parametrize("evil", EVIL, ids=ascii)
@pytest.mark.parametrize("speak", [say, show, lambda text: present(Table("a b", [(text, 1)], text)), tell])
def test_every_way_to_speak_is_cleaned(
    evil: str, speak: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, where rich writes escapes of its own: those of the text are not among them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    speak(evil)
    written = "".join(capsys.readouterr())
    assert not any(bad in written for bad in ("\x1b]", "\x9b", "\x1b[2J", "\x7f", "\u202e"))
    assert "".join(clean(evil).split()) in "".join(written.split())


def test_the_document_is_clean_and_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODE, "json", True)
    emit({"columns": EVIL})
    written = capsys.readouterr().out
    assert clean(written) == written and json.loads(written)["columns"] == EVIL


def test_another_home_is_proposed_for_files_of_the_home_only(own_home: Path, tmp_path: Path) -> None:
    """Somebody else's config is not read from another home either."""
    for path, proposed in ((own_home / "runs/one", True), (own_home.parent, True), (tmp_path / "mine.yaml", False)):
        hint = explain(PermissionError(errno.EACCES, "Permission denied", str(path))).hint
        assert f"namei -l {path}" in hint and ("HIVETUNE_HOME" in hint) == proposed


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
    tell("lost too")
    monkeypatch.setattr(sys, "stdout", FullDisk())
    monkeypatch.setattr(MODE, "json", True)
    with pytest.raises(OSError, match="space"):  # the document is what was asked for
        emit({"steps": 3})


def test_the_time_left_is_that_of_the_items_and_not_of_loading_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    report = output.plain_progress("answering", "items")
    for now[0], done, total in ((100.0, 1, 11), (120.0, 3, 11), (300.0, 1, 5)):
        report(done, total)
    told = ["answering: 1 of 11 items", "answering: 3 of 11 items, 80 s left", "answering: 1 of 5 items"]
    assert capsys.readouterr().err.splitlines() == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "│ é\n".encode()),
        ({"PYTHONIOENCODING": "latin-1"}, b"\\u2502 \xe9\n"),
    ],
)
def test_no_encoding_of_a_terminal_is_a_fault(settings: dict[str, str], shown: bytes) -> None:
    script = "from hivetune.cli.output import set_encodings, show; set_encodings(); show('\\u2502 \\xe9')"
    command, environment = [sys.executable, "-c", script], {**os.environ, **settings}
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == shown


def test_an_answer_is_its_document_or_its_lines_and_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns name a key of each item, a pipe gets tabs; notes and the title of a table go to stderr."""
    items = [{"name": "co\tder\x1b", "loss": 2.0, "memory_bytes": 10**9}, {"name": "x" * 500, "memory_bytes": 5}]
    blocks = ("2 agents", Table("agent=name loss memory_bytes", items, "all"), Note("see: hivetune runs"))
    answer({"agents": items}, *blocks)
    told = capsys.readouterr()
    assert told.out == f"2 agents\nagent\tloss\tmemory\nco der\\x1b\t2.000\t1.0 GB\n{'x' * 500}\t-\t5 B\n"
    assert told.err == "all\nsee: hivetune runs\n"
    monkeypatch.setattr(MODE, "json", True)
    with pytest.raises(typer.Exit) as ended:
        answer({"agents": items}, *blocks, error=DataRefused("too few"))
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert (ended.value.exit_code, document["agents"], document["error"]["message"]) == (3, items, "too few")
    assert told.err == "see: hivetune runs\nhivetune: too few\n"


def test_the_key_decides_the_unit() -> None:
    document = {
        "left_s": 150.0,
        "latency_p50_s": 0.5321,
        "disk_bytes": {"adapter": 10**6, "export": 0},
        "tokens_per_second": 1234.4,
        "base_success": 0.25,
        "rows": 12345,
        "pid": 12345,
        "fits": False,
        "aliases": ("champion", "previous"),
        "withdrawn": None,  # left out, as what is empty
        "rejected": {},
    }
    assert facts(document).splitlines() == [
        "left:              2 min",
        "latency p50:       0.53 s",
        "disk:              adapter 1 MB, export 0 B",
        "tokens per second: 1234",
        "base success:      25%",
        "rows:              12,345",
        "pid:               12345",
        "fits:              no",
        "aliases:           champion, previous",
    ]
    assert facts(document, "pid withdrawn") == "pid: 12345"


# What `hivetune eval` says at its end.

MORE = "hold out more rows (data.test)"
QUIET = "evaluate again when the machine is quiet: hivetune eval RUN"
UNCHECKED = {"name": "success", "required": True, "n": 0, "passed": None}


def unmet(name: str, needed: int | None) -> dict[str, Any]:
    return {"name": name, "required": True, "n": 3, "passed": False, "needed": needed}


@pytest.mark.parametrize(
    ("verdict", "metrics", "said"),
    [
        ("not-enough-evidence", [UNCHECKED], "checker"),  # more rows would be as unchecked as these
        ("not-enough-evidence", [{**UNCHECKED, "n": 9}], MORE),
        ("not-enough-evidence", [{**UNCHECKED, "required": False}], MORE),
        ("not-enough-evidence", [unmet("loss", 90)], MORE),
        ("not-enough-evidence", [unmet("latency_s", 9)], "answer more held-out rows (eval.prompts, data.test)"),
        ("not-enough-evidence", [unmet("loss", 90), unmet("latency_s", None)], f"{MORE}; {QUIET}"),
        ("abort", [UNCHECKED], "answers in eval.json"),
        ("abort", [unmet("loss", 90), unmet("latency_s", None)], QUIET),  # the times alone, whatever the rows teach
        ("abort", [unmet("loss", None), unmet("latency_s", None)], "answers in eval.json"),
    ],
)
def test_the_next_step_gives_what_the_open_metrics_lack(verdict: str, metrics: list[dict[str, Any]], said: str) -> None:
    assert said in next_step(verdict, metrics)

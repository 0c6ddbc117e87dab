"""Notices reach a real program; what fails is a problem, never an exception."""

import json
from pathlib import Path

import pytest

from hivetune.cycle import notify
from hivetune.cycle.notify import MAX_SENTENCE_CHARS, Notice, send_notice

NOTICE = Notice("rollback", "helpdesk@4", "12 of 60 answers failed; at most 5.0% was usual with helpdesk@3", 1.8e9)
SENTENCE = (
    "helpdesk@4 was rolled back: 12 of 60 answers failed; at most 5.0% was usual with helpdesk@3"  # one line for people
)


def program(folder: Path, text: str) -> str:
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_gets_its_own_words_and_the_document(tmp_path: Path) -> None:
    path = program(tmp_path, f'printf "%s|" "$@" > {tmp_path}/said; cat > {tmp_path}/read')
    assert send_notice(NOTICE, [path, "-t", "a b; touch x"]) == ""
    assert (tmp_path / "said").read_text() == "-t|a b; touch x|"
    document = json.loads((tmp_path / "read").read_text())
    assert document == {
        "schema": 1,
        "kind": "rollback",
        "release": "helpdesk@4",
        "reason": NOTICE.reason,
        "time": 1.8e9,
        "text": f"Hivetune: {SENTENCE}",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exit 3", "tell ended with 3"),
        ("exec <&-; sleep 60 & wait", "tell was ended after"),
        (None, "can't be started"),
    ],
)
def test_a_command_that_fails_hangs_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, problem: str
) -> None:
    monkeypatch.setattr(notify, "SEND_TIMEOUT_S", 1.0 if text and "sleep" in text else 20.0)
    path = program(tmp_path, text) if text else str(tmp_path / "missing")
    assert problem in send_notice(NOTICE, [path])


def test_a_sentence_is_one_printable_line() -> None:
    sentence = Notice("stuck", "helpdesk", "first\r\nBcc: x@example.org\x1b[2J" + "a" * 900).sentence
    assert sentence.startswith("the cycle of helpdesk can't continue: first Bcc: x@example.org")
    assert sentence.isprintable()
    assert len(sentence) == MAX_SENTENCE_CHARS

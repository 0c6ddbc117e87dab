"""Frozen questions: kept whole, never trained, forgotten with their people."""

import json
from pathlib import Path
from typing import Any

import pytest
from data.conftest import written

from hivetune.base.database import open_database
from hivetune.config import DataConfig
from hivetune.data.forget import forget
from hivetune.data.frozen import FrozenQuestion, freeze, frozen_folder, names_with_wins, own_questions, wins_of
from hivetune.data.prepare.prepare import check
from hivetune.errors import DataRefused, UsageError
from hivetune.records import Message

CHECKER = {"name": "contains_any", "any": ["yes"]}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "home"))


def win(text: str, **changes: Any) -> FrozenQuestion:
    return FrozenQuestion("win", "rows.jsonl:1", (Message("user", text),), CHECKER, release="helpdesk@1", **changes)


def test_a_win_is_read_as_it_was_written_and_kept_once() -> None:
    call = Message("assistant", "", tool_calls=({"type": "function", "function": {"name": "f", "arguments": {}}},))
    long = FrozenQuestion("win", "r:2", (Message("system", "s"), Message("user", "ü"), call), CHECKER, ({"a": 1},))
    assert freeze("helpdesk", [win("first"), long]) == 2
    assert freeze("helpdesk", [win("first")]) == 0
    assert wins_of("helpdesk") == sorted([win("first"), long], key=lambda one: one.key)
    assert names_with_wins() == ["helpdesk"] and wins_of("other") == []


def test_a_damaged_win_is_one_error() -> None:
    freeze("helpdesk", [win("first")])
    path = next(frozen_folder("helpdesk").glob("*.json"))
    path.write_text(path.read_text()[:-9])
    with pytest.raises(UsageError, match="damaged"):
        wins_of("helpdesk")


def test_rows_that_ask_a_frozen_question_are_set_aside(tmp_path: Path) -> None:
    """In other capitals and behind a system prompt too; a longer conversation only when it is the same as a whole."""
    own = FrozenQuestion(
        "win", "r:1", (Message("user", "hi"), Message("assistant", "hello"), Message("user", "and now?")), CHECKER
    )
    freeze("helpdesk", [win("Is it  raining in Bergen?"), own])
    rows = [
        {"prompt": "is it raining in bergen?", "completion": "It rains."},
        {
            "messages": [
                turn("system", "Be brief."),
                turn("user", "Is it raining in Bergen?"),
                turn("assistant", "Yes."),
            ]
        },
        {
            "messages": [
                turn("user", "hi"),
                turn("assistant", "hey"),
                turn("user", "and now?"),
                turn("assistant", "No."),
            ]
        },
        {
            "messages": [
                turn("user", "hi"),
                turn("assistant", "hey"),
                turn("user", "and you?"),
                turn("assistant", "No."),
            ]
        },
        {"prompt": "Is it raining in Oslo today?", "completion": "It does not."},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check(DataConfig(path=str(path), validation=0.0, test=0.0)).document
    assert report["set_aside"] == {"frozen-question": 3} and report["usable"] == 2
    assert written(path, validation=0.0, test=0.0)["passed"] == rows[3:]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_wins_go_with_whom_they_came_from() -> None:
    freeze("helpdesk", [win("a", user="ann"), win("b", user="bob"), win("c", session="s1"), win("d")])
    database = open_database()
    assert forget(database, "user", "ann").past_wins == 1
    assert forget(database, "session", "s1").past_wins == 1
    assert forget(database, "source", "rows.jsonl").past_wins == 2
    assert wins_of("helpdesk") == []


def test_own_questions_need_a_checker(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "Is it so?", "completion": "yes"}\n')
    with pytest.raises(DataRefused, match=r"own\.jsonl:1 has no checker"):
        own_questions([str(path)], None)
    found = own_questions([str(path)], CHECKER)
    assert [(one.origin, one.reference, one.checker) for one in found] == [("own", "yes", CHECKER)]
    path.write_text("{broken\n")
    with pytest.raises(DataRefused, match=r"own\.jsonl:1: bad-json"):
        own_questions([str(path)], CHECKER)

"""Logs with one message a line: the messages of a session become one conversation."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.chunks import read_rows
from hivetune.data.files import message_log
from hivetune.data.intake.files import plan_inputs
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused


def message(session: str, role: str, text: str, second: int, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "role": role, "message": text, "timestamp": f"2026-01-01T00:00:{second:02}Z", **more}


def read(tmp_path: Path, lines: list[Any]) -> list[Any]:
    """What is said in each row, or why it is refused."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    found: list[Any] = []
    for chunk in plan_inputs(str(path), tmp_path).chunks:
        for raw in read_rows(chunk):
            try:
                example = read_example(raw, {}).example
                found.append((example.session, [(m.role, m.content) for m in example.messages]))
            except RowRefused as error:
                found.append(error.reason)
    return found


def test_sessions_that_are_mixed(tmp_path: Path) -> None:
    log = [
        message("a", "user", "one", 1),
        message("b", "user", "two", 2),
        message("a", "assistant", "three", 3),
        "no JSON\n",
        message("b", "assistant", "four", 4),
    ]
    assert read(tmp_path, log) == [
        "bad-json",
        ("a", [("user", "one"), ("assistant", "three")]),
        ("b", [("user", "two"), ("assistant", "four")]),
    ]


def test_newest_first_is_turned_round(tmp_path: Path) -> None:
    log = [message("a", "assistant", "two", 2), message("a", "user", "one", 1)]
    assert read(tmp_path, log) == [("a", [("user", "one"), ("assistant", "two")])]


def test_messages_without_a_session_are_refused(tmp_path: Path) -> None:
    log = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert read(tmp_path, log) == ["one-message", "one-message"]


def test_messages_that_name_the_one_before_them_are_one_conversation(tmp_path: Path) -> None:
    log = [
        {"id": "x1", "parent_id": None, "role": "user", "content": "one"},
        {"id": "x2", "parent_id": "x1", "role": "assistant", "content": "two"},
        {"id": "x3", "parent_id": "x2", "role": "user", "content": "three"},
        {"id": "x4", "parent_id": "x3", "role": "assistant", "content": "four"},
    ]
    said = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    assert read(tmp_path, log) == [(None, said)]
    apart = [{**one, "parent_id": "elsewhere"} for one in log]
    assert read(tmp_path, apart) == ["one-message"] * 4


def test_a_session_that_was_given_out_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_log, "MAX_KEPT_CHARS", 300)
    log = [message("a", "user", "one", 1), message("a", "assistant", "two", 2)]
    log += [message("b", "user", "three", 3), message("b", "assistant", "four", 4), message("a", "user", "five", 5)]
    assert read(tmp_path, log) == [
        ("a", [("user", "one"), ("assistant", "two")]),
        "one-message",
        ("b", [("user", "three"), ("assistant", "four")]),
    ]


def test_results_of_calls_tell_that_lines_are_one_conversation(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    lines: list[dict[str, Any]] = [
        {"role": "user", "content": "which files are there?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "one.txt", "tool_call_id": "c1"},
        {"role": "assistant", "content": "There is one.txt."},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = [read_example(raw, {}) for chunk in plan_inputs(str(path), tmp_path).chunks for raw in read_rows(chunk)]
    assert [[m.role for m in row.example.messages] for row in rows] == [["user", "assistant", "tool", "assistant"]]


def test_calls_among_the_parts_tell_that_lines_are_one_conversation(tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "ls", "input": {}}
    log = [
        {"role": "user", "content": "what is here?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.py"}]},
        {"role": "assistant", "content": "One file."},
    ]
    said = [("user", "what is here?"), ("assistant", "I look."), ("tool", "a.py"), ("assistant", "One file.")]
    assert read(tmp_path, log) == [(None, said)]


def test_a_line_about_the_log_in_front_of_messages_in_parts(tmp_path: Path) -> None:
    """As Goose writes its sessions."""
    lines: list[Any] = [
        {"working_dir": "/srv", "description": "boats", "message_count": 2},
        {"role": "user", "created": 1, "content": [{"type": "text", "text": "what floats?"}]},
        {"role": "assistant", "created": 2, "content": [{"type": "text", "text": "Wood does."}]},
    ]
    assert [turns for _, turns in read(tmp_path, lines)] == [[("user", "what floats?"), ("assistant", "Wood does.")]]


def test_a_log_that_begins_with_messages_and_goes_on_otherwise_loses_no_row(tmp_path: Path) -> None:
    """What tells a log is the beginning of the file; more of it decides, and that took all of its rows away."""
    spoken = [message(f"s{i // 2}", ("user", "assistant")[i % 2], f"boots {i} " * 1000, i % 60) for i in range(40)]
    asked = [{"question": f"what is the size of boot {i}?", "answer": f"it is the size {i}"} for i in range(360)]
    found = read(tmp_path, [*spoken, *asked])
    assert found[:40] == ["one-message"] * 40
    assert found[-1] == (None, [("user", "what is the size of boot 359?"), ("assistant", "it is the size 359")])


def test_a_row_of_a_table_of_messages_that_can_not_be_read_says_why(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    talks = [(f"s{i}", *turn) for i in range(8) for turn in (("user", f"what is {i}?"), ("assistant", f"it is {i}"))]
    lines = ["session_id,role,content", *(",".join(fields) for fields in talks)]
    lines.insert(6, 's9,user,"a quote that nobody closes')
    path.write_text("\n".join(lines) + "\n")
    raws = [raw for chunk in plan_inputs(str(path), tmp_path).chunks for raw in read_rows(chunk)]
    problems = {raw.source: raw.problem.reason for raw in raws if raw.problem is not None}
    assert problems == {f"{path}:7": "csv-quote"}
    assert len(raws) == 9

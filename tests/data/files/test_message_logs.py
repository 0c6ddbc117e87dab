"""Logs with one message a line: the messages of a session become one conversation."""

import json
from pathlib import Path
from typing import Any

from hivetune.data.files.inputs import plan_inputs
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused


def message(session: str, role: str, text: str, second: int, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "role": role, "message": text, "timestamp": f"2026-01-01T00:00:{second:02}Z", **more}


def read(tmp_path: Path, lines: list[Any]) -> list[Any]:
    """What is said in each row, or why it is refused."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    found: list[Any] = []
    for raw in plan_inputs(str(path), tmp_path).rows():
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
    assert read(tmp_path, log) == ["unknown-layout", "unknown-layout"]


def test_a_log_that_begins_with_messages_and_goes_on_otherwise_loses_no_row(tmp_path: Path) -> None:
    """What tells a log is the beginning of the file."""
    spoken = [message(f"s{i // 2}", ("user", "assistant")[i % 2], f"boots {i} " * 1000, i % 60) for i in range(40)]
    asked = [{"question": f"what is the size of boot {i}?", "answer": f"it is the size {i}"} for i in range(360)]
    found = read(tmp_path, [*spoken, *asked])
    assert len(found) == 380
    assert [len(turns) for _, turns in found] == [2] * 380
    assert found[359] == (None, [("user", "what is the size of boot 359?"), ("assistant", "it is the size 359")])


def test_a_row_of_a_table_of_messages_that_can_not_be_read_says_why(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    talks = [(f"s{i}", *turn) for i in range(8) for turn in (("user", f"what is {i}?"), ("assistant", f"it is {i}"))]
    lines = ["session_id,role,content", *(",".join(fields) for fields in talks)]
    lines.insert(6, "s9,user,a comma, and nobody quoted it")
    path.write_text("\n".join(lines) + "\n")
    raws = list(plan_inputs(str(path), tmp_path).rows())
    problems = {raw.source: raw.problem.reason for raw in raws if raw.problem is not None}
    assert problems == {f"{path}:7": "csv-columns"}
    assert len(raws) == 9

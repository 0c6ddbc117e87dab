"""Every layout that docs/formats.md names is read as it says, and column maps reach what nobody guessed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data.conftest import chat

from hivetune.config import DataConfig
from hivetune.data.chunks import RawRow
from hivetune.data.conversation import read_conversation
from hivetune.data.mapping import map_columns
from hivetune.data.prepare.prepare import check
from hivetune.data.read import content_id, read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.snapshot import messages_from, messages_json
from hivetune.records import Example, Message

CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}
ROWS: dict[str, tuple[dict[str, Any], str, list[tuple[str, str]]]] = {
    "messages": (chat("q", "a"), "messages", [("user", "q"), ("assistant", "a")]),
    "parts": (chat([{"type": "text", "text": "q"}], "a"), "messages", [("user", "q"), ("assistant", "a")]),  # type: ignore
    "developer": (
        {"messages": [{"role": "developer", "content": "s"}, *chat("q", "a")["messages"]]},
        "messages",
        [("system", "s"), ("user", "q"), ("assistant", "a")],
    ),
    "tools": (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "bin", "tool_call_id": "c1"},
                {"role": "assistant", "content": "a"},
            ]
        },
        "messages",
        [("user", "q"), ("assistant", ""), ("tool", "bin"), ("assistant", "a")],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        "sharegpt",
        [("system", "s"), ("user", "q"), ("assistant", "a")],
    ),
    "sharegpt tools": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "ls", "arguments": {}}'},
                {"from": "observation", "value": "bin"},
                {"from": "gpt", "value": "a"},
            ],
            "tools": '[{"name": "ls"}]',
        },
        "sharegpt",
        [("user", "q"), ("assistant", ""), ("tool", "bin"), ("assistant", "a")],
    ),
    "prompt": ({"prompt": "q", "completion": "a"}, "prompt-completion", [("user", "q"), ("assistant", "a")]),
    "prompt lists": (
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        "prompt-completion",
        [("user", "q"), ("assistant", "a")],
    ),
    "alpaca": (
        {"instruction": "i", "input": "x", "output": "o", "history": [["h", "r"]]},
        "alpaca",
        [("user", "h"), ("assistant", "r"), ("user", "i\nx"), ("assistant", "o")],
    ),
    "alpaca bare": ({"instruction": "i", "input": "", "output": "o"}, "alpaca", [("user", "i"), ("assistant", "o")]),
    "agent": (
        {"agent": "ops", "task": "t", "output": "o", "success": True, "duration": 2.5},
        "agent",
        [("user", "t"), ("assistant", "o")],
    ),
    "tool": (
        {"user_query": "q", "tool_used": "shell", "command": "ls", "result": "bin", "success": True},
        "tool",
        [("user", "q"), ("assistant", "ls")],
    ),
    "question": ({"question": "q", "answer": "a"}, "question-answer", [("user", "q"), ("assistant", "a")]),
    "input": ({"input": "q", "output": "a"}, "input-output", [("user", "q"), ("assistant", "a")]),
    "text": ({"text": "t"}, "text", [("assistant", "t")]),
}


@pytest.mark.parametrize("name", ROWS)
def test_layouts(name: str) -> None:
    row, layout, expected = ROWS[name]
    found = read_conversation(row)
    assert found.layout == layout
    assert [(m.role, m.content) for m in found.messages] == expected


def read(row: dict[str, Any], **columns: str) -> Example:
    return read_example(RawRow("f:1", json.dumps(row).encode()), columns).example


def test_arguments_of_calls_become_objects() -> None:
    """OpenAI writes them as text, which a template would quote a second time."""
    example = read(ROWS["tools"][0])
    assert example.messages[1].tool_calls[0]["function"] == {"name": "ls", "arguments": {"path": "/"}}


def test_what_a_tool_said_is_not_to_be_learned() -> None:
    assert read({"user_query": "q", "tool": "web", "result": "r"}).untrusted
    assert not read({"user_query": "q", "tool": "web", "command": "c", "result": "r"}).untrusted
    assert read(chat("q", "a", origin="web")).untrusted


def test_facts_about_a_row() -> None:
    row = chat("q", "a", session_id=7, timestamp="2026-01-02T03:04:05Z", success="failed", tool="x", rating=-1)
    example = read({**row, "metadata": {"user_id": "u"}})
    assert (example.session, example.user, example.category, example.success) == ("7", "u", "x", False)
    assert example.time == 1767323045
    assert example.feedback == -1
    assert read({"question": "q", "answer": "a", "annotation": "incorrect"}).success is False


def test_a_column_map_wins_and_reaches_inside() -> None:
    row = {"data": {"q": "asked", "a": "said"}, "who": "ops", "messages": []}
    example = read(row, prompt="data.q", completion="data.a", agent="who", messages="nothing")
    assert [m.content for m in example.messages] == ["asked", "said"]
    assert example.agent == "ops"
    assert map_columns({"a.b": 1}, {"x": "a.b"}) == {"x": 1}


def test_an_object_that_the_user_calls_the_question_is_one() -> None:
    row = {
        "input": {"subject": "Door", "summary": "A door on the second floor is open.", "rule": 5710},
        "output": {"verdict": "no alarm", "why": "it is day"},
    }
    with pytest.raises(RowRefused) as refused:
        read(row)
    assert refused.value.hint.endswith("--columns prompt=input,completion=output")
    asked, answered = read(row, prompt="input", completion="output").messages
    assert (asked.content, answered.content) == (json.dumps(row["input"]), json.dumps(row["output"]))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": {"a": 1}}, "wrong-type"),
        ({"instruction": "i", "output": "o", "history": ["h"]}, "wrong-type"),
        ({"agent": "a", "task": "t"}, "no-answer"),
        ({"chosen": "a", "rejected": "b"}, "preference-row"),
        ({}, "unknown-layout"),
    ],
)
def test_refusals(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation(row)
    assert refused.value.reason == reason


def test_a_file_may_mix_layouts_and_the_report_says_so(write_rows: Callable[..., Path]) -> None:
    path = write_rows([ROWS["messages"][0], ROWS["alpaca"][0], ROWS["question"][0] | {"question": "other"}])
    report = check(DataConfig(path=str(path)))
    assert report.document["files"] == {str(path): {"messages": 1, "alpaca": 1, "question-answer": 1}}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_of_its_own_is_kept(field: str) -> None:
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2", field: "add them"}]
    said = read_conversation({"messages": turns})
    assert said.messages[1].reasoning == "add them"
    assert messages_from(messages_json(said.messages)) == said.messages
    assert content_id(said.messages) != content_id((said.messages[0], Message("assistant", "2")))

"""Logs of agents that are no named kind: events, parts in columns, calls and results between the turns."""

import json
from pathlib import Path
from typing import Any

from session_files import read, said, write

from hivetune.data.read import ExaminedRow


def test_a_log_of_an_agent_whose_parts_stand_as_text(tmp_path: Path) -> None:
    """A table of messages whose parts are JSON in a column, with the calls and results of Goose."""

    def line(role: str, time: int, *parts: dict[str, Any]) -> dict[str, Any]:
        return {"role": role, "content_json": json.dumps(parts), "created_timestamp": 1735689600 + time}

    call = {"status": "success", "value": {"name": "shell", "arguments": {"command": "ls"}}}
    lines = [
        line("user", 0, {"type": "text", "text": "List it."}),
        line("assistant", 1, {"type": "text", "text": "Yes."}, {"type": "toolRequest", "id": "t", "toolCall": call}),
        line("user", 2, {"type": "toolResponse", "id": "t", "toolResult": {"status": "error", "error": "no"}}),
        line("assistant", 3, {"type": "text", "text": "It fails."}),
    ]
    (row,) = read(write(tmp_path / "log.jsonl", lines), tmp_path).values()
    assert said(row) == [("user", "List it."), ("assistant", "Yes."), ("tool", "no"), ("assistant", "It fails.")]
    assert isinstance(row, ExaminedRow)
    assert row.example.messages[1].tool_calls[0]["function"]["name"] == "shell"


def test_events_of_an_agent_whose_answers_hold_their_calls(tmp_path: Path) -> None:
    """Thoughts and hooks are notes, the calls stand in the answers, also in those that say nothing else."""

    def line(kind: str, **data: Any) -> dict[str, Any]:
        return {"type": kind, "data": data, "id": kind, "timestamp": "2026-01-01T00:00:00Z"}

    request = {"toolCallId": "t1", "name": "view", "arguments": {"path": "a.py"}, "type": "function"}
    lines = [
        line("session.start", sessionId="s", context={"cwd": "/p"}),
        line("user.message", content="What is in the file a.py?"),
        line("assistant.reasoning", content="I have to look at that file."),
        line("assistant.message", content="", toolRequests=[request]),
        line("tool.execution_start", toolCallId="t1", toolName="view", arguments={"path": "a.py"}),
        line("hook.end", success=True),
        line("tool.execution_complete", toolCallId="t1", success=True, result={"content": "x = 1"}),
        line("assistant.message", content="It sets x to one.", toolRequests=[]),
        line("session.shutdown", shutdownType="routine"),
    ]
    (row,) = read(write(tmp_path / "events.jsonl", lines), tmp_path).values()
    assert said(row) == [
        *(("user", "What is in the file a.py?"), ("assistant", ""), ("tool", "x = 1")),
        ("assistant", "It sets x to one."),
    ]
    assert isinstance(row, ExaminedRow)
    assert [m.tool_call_id for m in row.example.messages if m.role == "tool"] == ["t1"]
    assert row.changed == ("program-notes",)


def test_a_log_of_an_agent_without_session_or_time(tmp_path: Path) -> None:
    """Calls and results stand between the turns of one conversation."""
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    lines = [
        {"role": "system", "content": "You use tools."},
        {"role": "user", "content": "Find the bug."},
        *({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "a.py"}),
        *({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "b.py"}),
        {"role": "assistant", "content": "There is none."},
    ]
    (row,) = read(write(tmp_path / "run.jsonl", lines), tmp_path).values()
    assert [role for role, _ in said(row)][1:] == ["user", *("assistant", "tool") * 2, "assistant"]


def test_activities_that_are_no_messages(tmp_path: Path) -> None:
    """A call and its result, logged as other activities of the same two, are not their words."""

    def line(kind: str, role: str, text: str) -> dict[str, Any]:
        return {"type": kind, "from": {"role": role}, "conversation": {"id": "c"}, "text": text}

    lines = [
        line("message", "user", "Add an endpoint."),
        line("invoke", "bot", "read_file"),
        line("event", "user", "def app(): this is the file"),
        line("message", "bot", "It is there now."),
    ]
    assert not any(isinstance(row, ExaminedRow) for row in read(write(tmp_path / "a.jsonl", lines), tmp_path).values())


def test_what_a_program_shows_is_no_text_to_learn(tmp_path: Path) -> None:
    lines = [
        {"ts": 1, "type": "say", "say": "task", "text": "Add an endpoint to the app."},
        {"ts": 2, "type": "ask", "ask": "tool", "text": '{"tool": "readFile", "path": "app.py"}'},
        {"ts": 3, "type": "tool_output", "session_id": "s", "text": "running the tests of the app"},
    ]
    assert set(read(write(tmp_path / "ui.jsonl", lines), tmp_path).values()) <= {"one-message", "unexplained-column"}


def test_events_of_the_newer_openhands(tmp_path: Path) -> None:
    call = {"id": "c1", "name": "terminal", "arguments": '{"command": "ls"}'}
    text = {"type": "text", "text": "I look."}
    lines = [
        {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": {"type": "text", "text": "Be brief."}},
        {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": "What is here?"}},
        {"kind": "ConversationStateUpdateEvent", "source": "environment", "key": "stats"},
        {"kind": "ActionEvent", "source": "agent", "thought": [text], "tool_call": call, "tool_call_id": "c1"},
        {
            **{"kind": "ObservationEvent", "source": "environment", "tool_call_id": "c1"},
            "observation": {"kind": "TerminalObservation", "content": [{"type": "text", "text": "a.py"}]},
        },
        {"kind": "MessageEvent", "source": "agent", "llm_message": {"role": "assistant", "content": "One file."}},
    ]
    (row,) = read(write(tmp_path / "events.jsonl", lines), tmp_path).values()
    assert said(row) == [
        *(("system", "Be brief."), ("user", "What is here?"), ("assistant", "I look."), ("tool", "a.py")),
        ("assistant", "One file."),
    ]

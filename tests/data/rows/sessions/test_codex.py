"""Sessions of Codex, from file to rows."""

from pathlib import Path
from typing import Any

from session_files import read, said, write

from hivetune.data.rows.read import ReadRow


def codex(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": "2025-10-01T10:00:00.000Z", "type": kind, "payload": payload}


def item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def test_codex(tmp_path: Path) -> None:
    arguments = '{"command": ["bash", "-lc", "ls"]}'
    call = {"type": "function_call", "name": "shell", "arguments": arguments, "call_id": "call_1"}
    events = [
        codex("session_meta", {"id": "0199", "timestamp": "2025-10-01T09:59:00Z", "cwd": "/p", "instructions": None}),
        codex("response_item", item("user", "<environment_context>cwd: /p</environment_context>")),
        codex("event_msg", {"type": "user_message", "message": "what is here?"}),
        codex("response_item", item("user", "what is here?")),
        codex("turn_context", {"cwd": "/p", "model": "gpt-5-codex"}),
        codex(
            "response_item",
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "look"}], "encrypted_content": "gAAA"},
        ),
        codex("response_item", call),
        codex("response_item", {"type": "function_call_output", "call_id": "call_1", "output": "a.py"}),
        codex("event_msg", {"type": "token_count", "info": {}}),
        codex("response_item", item("assistant", "One file.")),
        codex("response_item", item("user", "delete it")),
        codex("response_item", item("assistant", "Deleted.")),
        codex("event_msg", {"type": "thread_rolled_back", "num_turns": 1}),
        codex("response_item", item("user", "show it")),
        codex("response_item", item("assistant", "It says: x")),
        codex("event_msg", {"type": "turn_aborted", "reason": "interrupted"}),
        codex("response_item", item("user", "all of it")),
        codex("response_item", item("assistant", "x = 1")),
    ]
    rows = read(write(tmp_path / "rollout.jsonl", events), tmp_path)
    assert list(rows) == ["2"]
    row = rows["2"]
    assert isinstance(row, ReadRow)
    assert row.example.session == "0199"
    assert [(m.role, m.content, m.weight) for m in row.example.messages][-4:] == [
        ("user", "show it", 1),
        ("assistant", "It says: x", 0),
        ("user", "all of it", 1),
        ("assistant", "x = 1", 1),
    ]
    called = row.example.messages[1]
    assert called.reasoning == "look"
    assert called.tool_calls[0]["function"]["arguments"] == {"command": ["bash", "-lc", "ls"]}
    assert "Deleted." not in [m.content for m in row.example.messages]
    assert "other-branches" in row.changed


def test_codex_words_that_only_events_hold(tmp_path: Path) -> None:
    lines = [
        codex("session_meta", {"id": "0199", "timestamp": "2025-10-01T09:59:00Z", "cwd": "/p"}),
        codex("event_msg", {"type": "user_message", "message": "what is here?"}),
        codex("response_item", item("assistant", "One file.")),
        codex("event_msg", {"type": "user_message", "message": "and there?"}),
        codex("response_item", item("assistant", "Two.")),
    ]
    rows = read(write(tmp_path / "rollout.jsonl", lines), tmp_path)
    assert [said(row) for row in rows.values()] == [
        [("user", "what is here?"), ("assistant", "One file."), ("user", "and there?"), ("assistant", "Two.")]
    ]


def test_codex_that_ends_in_a_broken_call(tmp_path: Path) -> None:
    call = {"type": "function_call", "name": "shell", "arguments": "echo test"}
    events = [
        codex("session_meta", {"id": "0199", "timestamp": "2025-10-01T09:59:00Z", "cwd": "/p"}),
        codex("response_item", item("user", "what is here?")),
        codex("response_item", item("assistant", "One file.")),
    ]
    rows = read(write(tmp_path / "rollout.jsonl", [*events, codex("response_item", call)]), tmp_path)
    assert said(rows["2"]) == [("user", "what is here?"), ("assistant", "One file.")]
    assert isinstance(rows["2"], ReadRow)
    assert rows["2"].changed == ("trailing-turns",)
    behind = codex("response_item", item("user", "and there?")), codex("response_item", item("assistant", "Two."))
    rows = read(write(tmp_path / "rollout.jsonl", [*events, codex("response_item", call), *behind]), tmp_path)
    assert said(rows["2"])[-1] == ("assistant", "Two."), "in the middle it is read, and not learned"


def test_codex_in_its_first_form(tmp_path: Path) -> None:
    events = [
        {"id": "0198", "timestamp": "2025-07-01T00:00:00Z", "instructions": "Be brief.", "git": {"branch": "main"}},
        {"record_type": "state"},
        item("user", "hi"),
        item("assistant", "Hello."),
    ]
    rows = read(write(tmp_path / "rollout.jsonl", events), tmp_path)
    assert said(rows["3"]) == [("system", "Be brief."), ("user", "hi"), ("assistant", "Hello.")]


def test_codex_answers_that_only_events_hold(tmp_path: Path) -> None:
    """Texts of the assistant in events alone: before a call, behind its result, and as the end of the task."""
    call = {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}', "call_id": "c1"}
    lines = [
        codex("session_meta", {"id": "0199", "timestamp": "2025-10-01T09:59:00Z", "cwd": "/p"}),
        codex("event_msg", {"type": "user_message", "message": "what is here?"}),
        codex("event_msg", {"type": "agent_message", "message": "I look."}),
        codex("response_item", call),
        codex("response_item", {"type": "function_call_output", "call_id": "c1", "output": "a.py"}),
        codex("event_msg", {"type": "task_complete", "last_agent_message": "One file."}),
        codex("event_msg", {"type": "user_message", "message": "and there?"}),
        codex("event_msg", {"type": "agent_message", "message": "Done."}),
        codex("event_msg", {"type": "task_complete", "last_agent_message": "Done."}),
        codex("event_msg", {"type": "user_message", "content": "thanks"}),
        codex("event_msg", {"type": "agent_message", "message": "You are welcome."}),
        codex("response_item", item("assistant", "You are welcome.")),
    ]
    rows = read(write(tmp_path / "rollout.jsonl", lines), tmp_path)
    row = rows["2"]
    assert said(row) == [
        ("user", "what is here?"),
        ("assistant", "I look."),
        ("tool", "a.py"),
        ("assistant", "One file."),
        ("user", "and there?"),
        ("assistant", "Done."),
        ("user", "thanks"),
        ("assistant", "You are welcome."),
    ]
    assert isinstance(row, ReadRow)
    assert row.example.messages[1].tool_calls


def test_codex_answers_that_are_read_and_not_learned(tmp_path: Path) -> None:
    """What rests on a search whose results the log does not hold, a call that breaks off, an answer with its thoughts
    that the user stopped.
    """
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    broken = {"type": "function_call", "name": "shell", "arguments": "echo test", "call_id": "c1"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "no"}
    search = {"type": "file_search_call", "status": "completed", "queries": ["q"]}
    items = [
        *(item("user", "one?"), thought, search, item("assistant", "1")),
        *(item("user", "two?"), item("assistant", "try"), broken, output, item("assistant", "2")),
        *(item("user", "three?"), thought, item("assistant", "3, but")),
    ]
    end = [codex("event_msg", {"type": "turn_aborted"}), codex("response_item", item("user", "four?"))]
    lines = [codex("response_item", one) for one in items] + end + [codex("response_item", item("assistant", "4"))]
    rows = read(write(tmp_path / "rollout.jsonl", lines), tmp_path)
    row = rows["1"]
    assert isinstance(row, ReadRow)
    learned = [(m.content, m.weight) for m in row.example.messages if m.role == "assistant"]
    assert learned == [("1", 0), ("try", 0), ("2", 1), ("3, but", 0), ("4", 1)]
    assert row.example.messages[3].tool_calls[0]["function"]["arguments"] == {"input": "echo test"}


def test_codex_answers_that_all_rest_on_searches(tmp_path: Path) -> None:
    """Those of files are set aside; the answer says what a search of the web found."""
    for kind in ("file_search_call", "web_search_call"):
        search = {"type": kind, "status": "completed", "action": {"type": "search", "query": "q"}}
        items = [item("user", "one?"), item("assistant", "I look."), search, item("assistant", "1")]
        path = write(tmp_path / "rollout.jsonl", [codex("response_item", one) for one in items])
        (row,) = read(path, tmp_path).values()
        if kind == "file_search_call":
            assert row == "not-held"
        else:
            assert isinstance(row, ReadRow)
            assert [(m.content, m.weight) for m in row.example.messages] == [("one?", 1), ("I look.\n\n1", 1)]


def test_codex_what_is_told_between_two_questions_stands_in_front_of_them(tmp_path: Path) -> None:
    items = [item("user", "<env>"), item("developer", "Work alone."), item("user", "one?"), item("assistant", "1")]
    rows = read(write(tmp_path / "rollout.jsonl", [codex("response_item", one) for one in items]), tmp_path)
    (row,) = rows.values()
    assert isinstance(row, ReadRow)
    found = [(m.role, m.content) for m in row.example.messages]
    assert found == [("system", "Work alone."), ("user", "<env>\n\none?"), ("assistant", "1")]


def test_codex_thoughts_that_are_hidden(tmp_path: Path) -> None:
    hidden = {"type": "reasoning", "content": "not to be seen", "encrypted_content": "gAAA"}
    for summary, thought in (([{"type": "summary_text", "text": "look"}], "look"), ([], None)):
        events = [
            codex("session_meta", {"id": "0199"}),
            codex("response_item", item("user", "what is here?")),
            codex("response_item", {**hidden, "summary": summary}),
            codex("response_item", item("assistant", "One file.")),
        ]
        (row,) = read(write(tmp_path / "rollout.jsonl", events), tmp_path).values()
        assert isinstance(row, ReadRow)
        assert row.example.messages[-1].reasoning == thought


def test_codex_what_the_model_was_told_stands_in_two_places(tmp_path: Path) -> None:
    events = [
        codex("session_meta", {"id": "0199", "cwd": "/p", "base_instructions": {"text": "You write code."}}),
        codex("response_item", item("developer", "Ask before you write.")),
        codex("response_item", item("user", "what is here?")),
        codex("response_item", item("assistant", "One file.")),
    ]
    row = read(write(tmp_path / "rollout.jsonl", events), tmp_path)["2"]
    assert said(row) == [
        ("system", "You write code.\n\nAsk before you write."),
        ("user", "what is here?"),
        ("assistant", "One file."),
    ]

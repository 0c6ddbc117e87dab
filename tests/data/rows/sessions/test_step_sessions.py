"""Sessions of Gemini CLI and of Antigravity, one step a line."""

from pathlib import Path
from typing import Any

from session_files import read, said, write

from hivetune.data.rows.read import ReadRow

TIME = "2026-02-01T10:00:00Z"


def test_gemini_cli(tmp_path: Path) -> None:
    call = {"type": "tool_use", "tool_name": "read_file", "tool_id": "r1", "parameters": {"path": "a.md"}}
    failed = {"type": "tool_result", "tool_id": "r2", "status": "error", "error": {"message": "no such file"}}
    lines = [
        {"type": "init", "timestamp": TIME, "session_id": "s1", "model": "gemini-3-pro"},
        {"type": "message", "timestamp": TIME, "role": "user", "content": "what do the notes say?"},
        {"type": "message", "timestamp": TIME, "role": "assistant", "content": "I re", "delta": True},
        {"type": "message", "timestamp": TIME, "role": "assistant", "content": "ad them.", "delta": True},
        {**call, "timestamp": TIME},
        {"type": "tool_result", "timestamp": TIME, "tool_id": "r1", "status": "success", "output": "buy nails"},
        {**call, "tool_id": "r2", "timestamp": TIME},
        {**failed, "timestamp": TIME},
        {"type": "message", "timestamp": TIME, "role": "assistant", "content": "To buy nails.", "delta": True},
        {"type": "result", "timestamp": TIME, "status": "success", "stats": {"total_tokens": 9}},
    ]
    row = read(write(tmp_path / "out.jsonl", lines), tmp_path)["1"]
    assert said(row) == [
        ("user", "what do the notes say?"),
        ("assistant", "I read them."),
        ("tool", "buy nails"),
        ("assistant", ""),
        ("tool", "no such file"),
        ("assistant", "To buy nails."),
    ]
    assert isinstance(row, ReadRow)
    assert (row.layout, row.example.session) == ("gemini-cli", "s1")
    assert row.example.messages[1].tool_calls[0]["function"]["arguments"] == {"path": "a.md"}


def step(index: int, source: str, kind: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    said = {} if content is None else {"content": content}
    return {"step_index": index, "source": source, "type": kind, "status": "DONE", "created_at": TIME, **said, **more}


def request(text: str) -> str:
    return f"<USER_REQUEST>\n{text}\n</USER_REQUEST>\n<ADDITIONAL_METADATA>\nIt is noon.\n</ADDITIONAL_METADATA>"


def test_antigravity(tmp_path: Path) -> None:
    calls = [{"name": "view_file", "args": {"Path": '"a.md"', "Lines": "3"}}, {"name": "list_dir", "args": {}}]
    lines = [
        step(0, "USER_EXPLICIT", "USER_INPUT", request("what do the notes say?")),
        step(1, "SYSTEM", "CONVERSATION_HISTORY"),
        step(2, "SYSTEM", "EPHEMERAL_MESSAGE", "remember the plan"),
        step(3, "MODEL", "PLANNER_RESPONSE", thinking="look first", tool_calls=calls),
        step(4, "MODEL", "VIEW_FILE", "buy nails"),
        step(5, "MODEL", "LIST_DIRECTORY", "a.md"),
        step(6, "MODEL", "PLANNER_RESPONSE", "To buy nails."),
        step(7, "USER_EXPLICIT", "USER_INPUT", request("and then?")),
        step(8, "MODEL", "PLANNER_RESPONSE", "Nothing."),
        step(7, "USER_EXPLICIT", "USER_INPUT", request("how many?")),
        step(8, "MODEL", "PLANNER_RESPONSE", "They say\n<truncated 90 bytes>"),
        step(9, "SYSTEM", "CHECKPOINT", "We talked about nails."),
        step(10, "USER_EXPLICIT", "USER_INPUT", request("which ones?")),
        step(11, "MODEL", "PLANNER_RESPONSE", "Long ones."),
        step(12, "USER_EXPLICIT", "USER_INPUT", ""),
        step(13, "MODEL", "PLANNER_RESPONSE", "A nice picture."),
    ]
    rows = read(write(tmp_path / "transcript.jsonl", lines), tmp_path)
    first = rows["1"]
    assert isinstance(first, ReadRow)
    assert [(m.role, m.content, m.weight) for m in first.example.messages] == [
        ("user", "what do the notes say?", 1),
        ("assistant", "", 1),
        ("tool", "buy nails", 1),
        ("tool", "a.md", 1),
        ("assistant", "To buy nails.", 1),
        ("user", "how many?", 1),
        ("assistant", "They say\n<truncated 90 bytes>", 0),
    ]
    assert first.example.messages[1].tool_calls[0]["function"]["arguments"] == {"Path": "a.md", "Lines": 3}
    assert {"other-branches", "program-notes"} <= set(first.changed)
    assert said(rows["12"]) == [("user", "We talked about nails.\n\nwhich ones?"), ("assistant", "Long ones.")]

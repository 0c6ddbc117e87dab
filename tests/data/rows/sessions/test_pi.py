"""Sessions of pi and OpenClaw, from file to rows."""

from pathlib import Path
from typing import Any

from session_files import read, said, write

from hivetune.data.rows.read import ReadRow

HEAD = {"type": "session", "version": 3, "id": "s1", "timestamp": "2026-05-05T00:00:00Z", "cwd": "/srv"}


def entry(name: str, parent: str | None, kind: str = "message", **more: Any) -> dict[str, Any]:
    return {"type": kind, "id": name, "parentId": parent, "timestamp": "2026-05-05T00:00:01Z", **more}


def user(name: str, parent: str | None, text: str) -> dict[str, Any]:
    return entry(name, parent, message={"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1})


def answer(name: str, parent: str, *parts: Any, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    told = {"api": "openai-completions", "provider": "lab", "model": "m-1", "stopReason": "stop", "timestamp": 2}
    return entry(name, parent, message={"role": "assistant", "content": content, **told, **more})


def result(name: str, parent: str, call: str, text: str) -> dict[str, Any]:
    ids = {"toolCallId": call, "toolName": "bash", "isError": False, "timestamp": 3}
    return entry(name, parent, message={"role": "toolResult", "content": [{"type": "text", "text": text}], **ids})


CALL = {"type": "toolCall", "id": "c1", "name": "bash", "arguments": {"command": "ls"}}


def test_a_session_with_a_branch_that_was_given_up(tmp_path: Path) -> None:
    events = [
        HEAD,
        entry("m", None, "model_change", provider="lab", modelId="m-1"),
        user("a", "m", "which files are there?"),
        answer("b", "a", "I do not know."),
        answer("c", "a", {"type": "thinking", "thinking": "ls tells it"}, CALL, stopReason="toolUse"),
        result("d", "c", "c1", "one.txt"),
        answer("e", "d", "There is one.txt."),
        answer("f", "e", "There is one.txt.", provider="openclaw", model="delivery-mirror"),
        user("g", "f", "and what is in it?"),
        answer("h", "g", "It holds the", stopReason="length"),
    ]
    rows = read(write(tmp_path / "log.jsonl", events), tmp_path)
    row = rows["3"]
    assert isinstance(row, ReadRow)
    messages = row.example.messages
    assert [(m.role, m.content, m.weight) for m in messages] == [
        ("user", "which files are there?", 1),
        ("assistant", "", 1),
        ("tool", "one.txt", 1),
        ("assistant", "There is one.txt.", 1),
        ("user", "and what is in it?", 1),
        ("assistant", "It holds the", 0),
    ]
    assert messages[1].reasoning == "ls tells it"
    assert messages[1].tool_calls[0]["function"] == {"name": "bash", "arguments": {"command": "ls"}}
    assert "other-branches" in row.changed
    assert row.example.session == "s1"


def test_a_compaction_begins_a_new_row(tmp_path: Path) -> None:
    events = [
        HEAD,
        user("a", None, "paint the fence"),
        answer("b", "a", "It is green."),
        user("c", "b", "and the gate?"),
        answer("d", "c", "Also green."),
        entry("e", "d", "compaction", summary="fence painted", firstKeptEntryId="c", tokensBefore=9),
        user("f", "e", "and the door?"),
        answer("g", "f", "Red."),
    ]
    rows = read(write(tmp_path / "log.jsonl", events), tmp_path)
    assert list(rows) == ["2", "7"]
    assert [text for _, text in said(rows["2"])] == ["paint the fence", "It is green.", "and the gate?", "Also green."]
    row = rows["7"]
    assert isinstance(row, ReadRow)
    assert [(m.role, m.content, m.weight) for m in row.example.messages] == [
        ("user", "fence painted\n\nand the gate?", 1),
        ("assistant", "Also green.", 0),
        ("user", "and the door?", 1),
        ("assistant", "Red.", 1),
    ]


def test_below_a_broken_line_a_row_begins(tmp_path: Path) -> None:
    events = [
        HEAD,
        user("a", None, "paint the fence"),
        answer("b", "a", "It is green."),
        '{"type":"message","id":"c","parentId":"b","mess\n',
        answer("d", "c", "Also green."),
        user("e", "d", "and the door?"),
        answer("f", "e", "Red."),
    ]
    rows = read(write(tmp_path / "log.jsonl", events), tmp_path)
    assert [text for _, text in said(rows["2"])] == ["paint the fence", "It is green."]
    assert rows["4"] == "broken-line"
    assert [text for _, text in said(rows["5"])] == ["and the door?", "Red."]

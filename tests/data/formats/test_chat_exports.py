"""Exports of chat programs in which something stands that no export holds: a tool's results, an image, a cut answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.chunks import RawRow
from hivetune.data.conversation import read_conversation
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused

Turn = dict[str, Any]


def chatgpt(*messages: Turn) -> dict[str, Any]:
    """A conversation of ChatGPT's export."""
    mapping: dict[str, Any] = {"root": {"id": "root", "message": None, "parent": None, "children": ["0"]}}
    for number, message in enumerate(messages):
        below = [str(number + 1)] if number + 1 < len(messages) else []
        above = str(number - 1) if number else "root"
        mapping[str(number)] = {"id": str(number), "message": message, "parent": above, "children": below}
    return {"title": "t", "mapping": mapping, "current_node": str(len(messages) - 1), "create_time": 1.0}


def message(role: str, text: Any, kind: str = "text", **more: Any) -> Turn:
    content = {"content_type": kind, "parts": text if isinstance(text, list) else [text]}
    return {"author": {"role": role, **more.pop("author", {})}, "content": content, "recipient": "all", **more}


def claude(*messages: tuple[str, Any]) -> dict[str, Any]:
    turns = [{"uuid": str(n), "sender": who, "text": "", "content": said} for n, (who, said) in enumerate(messages)]
    return {"uuid": "c", "name": "n", "chat_messages": turns}


def text(said: str) -> Turn:
    return {"type": "text", "text": said}


def said(row: dict[str, Any]) -> tuple[list[tuple[str, str, float]], tuple[str, ...]]:
    found = read_conversation(row)
    return [(m.role, m.content, m.weight) for m in found.messages], found.changed


PAIR = (message("user", "what floats?"), message("assistant", "Wood does."))
FILES = (
    message("user", "and what is the news?"),
    message("assistant", "search('news')", "code", recipient="file_search"),
    message("tool", "", author={"name": "file_search"}),
    message("assistant", "A boat sank."),
)


def test_marks_of_sources_that_are_there_are_meant() -> None:
    row = {
        "prompt": "Cite as [citation:1].\n[citation:1] Wood floats.\nWhat floats?",
        "completion": "Wood [citation:1].",
    }
    found = read_example(RawRow("f:1", json.dumps(row).encode()), {})
    assert (found.example.messages[-1].content, found.changed) == ("Wood [citation:1].", ())


def test_an_export_is_used_for_its_plain_conversations(tmp_path: Path) -> None:
    picture = message("user", [{"content_type": "image_asset_pointer"}], "multimodal_text")
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([chatgpt(*PAIR), chatgpt(*FILES), chatgpt(picture, PAIR[1])]))
    document = check(DataConfig(path=str(path))).document
    assert (document["usable"], document["rejected"], document["set_aside"]) == (1, {}, {"not-held": 2})


CODE = {"name": "floats", "type": "code/python", "content": "def floats(): ...\n"}
CREATED = message("tool", "Successfully created text document 'Floats'.", author={"name": "canmore.create_textdoc"})


def test_a_session_ends_before_its_first_image() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    messages = [
        {"role": "user", "content": "open the page"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]},
        {"role": "assistant", "content": "It is blue."},
    ]
    found = read_conversation({"hivetune_session": "claude-code", "messages": messages})
    assert [(m.role, len(m.tool_calls)) for m in found.messages] == [("user", 0), ("assistant", 1)]
    assert found.changed == ("ends-before-media",)
    with pytest.raises(RowRefused, match="unsupported-content"):
        read_conversation({"hivetune_session": "claude-code", "messages": [{"role": "user", "content": [image]}]})


def test_what_a_program_notes_on_its_run_is_no_turn() -> None:
    """As mini-swe-agent ends the messages of a run."""
    turns = [
        {"role": "user", "content": "mend it"},
        {"role": "assistant", "content": "Done."},
        {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}},
    ]
    assert said({"messages": turns, "info": {}, "trajectory_format": "f"})[0] == [
        ("user", "mend it", 1),
        ("assistant", "Done.", 1),
    ]


def test_a_message_of_slack_is_no_text() -> None:
    with pytest.raises(RowRefused, match="one-message"):
        read_conversation({"type": "message", "user": "U1", "text": "The boat leaves at noon.", "ts": "1.2"})


def test_groks_export(tmp_path: Path) -> None:
    turns = [("human", "what floats?"), ("assistant", "Wood does.")]
    replies = [{"response": {"_id": str(n), "message": text, "sender": who}} for n, (who, text) in enumerate(turns)]
    talk = {"conversation": {"id": "c", "title": "Boats", "summary": ""}, "responses": replies}
    path = tmp_path / "prod-grok-backend.json"
    path.write_text(json.dumps({"conversations": [talk, talk], "projects": [], "tasks": []}), encoding="utf-8")
    found = [example_of(raw).messages for raw in rows_of_files(str(path))]
    assert [[m.content for m in messages] for messages in found] == [["what floats?", "Wood does."]] * 2


TOOL = {"kind": "toolInvocationSerialized", "toolId": "readFile"}


def test_a_result_as_amp_writes_it() -> None:
    call = {"type": "tool_use", "id": "c", "name": "Bash", "input": {"cmd": "ls"}, "complete": True}
    run = {"status": "done", "result": {"output": "a.py", "exitCode": 0}}
    turns = [
        {"role": "user", "content": [text("which files?")]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "toolUseID": "c", "run": run}]},
        {"role": "assistant", "content": [text("One: a.py")]},
    ]
    assert [line for _, line, _ in said({"id": "T-1", "messages": turns})[0]] == [
        "which files?",
        "",
        "a.py",
        "One: a.py",
    ]


def test_a_text_in_pieces() -> None:
    """As Telegram writes a text that is bold in part, or has a link in it."""
    pieces = ["It leaves at ", {"type": "bold", "text": "noon"}, "."]
    turns = [("Ann", "When does it leave?"), ("Harbour Bot", pieces), ("Ann", "thanks"), ("Harbour Bot", "Gladly.")]
    messages = [{"id": n, "type": "message", "from": who, "text": what} for n, (who, what) in enumerate(turns)]
    found, _ = said({"name": "Harbour Bot", "type": "bot_chat", "id": 5, "messages": messages})
    assert [(role, line) for role, line, *_ in found][:2] == [
        ("user", "When does it leave?"),
        ("assistant", "It leaves at noon."),
    ]


def test_a_chat_of_open_webui_may_stand_without_what_the_program_knows_of_it() -> None:
    """Also where a database gives all of its columns: a `chat` that is null ended the check of all rows."""
    nodes = {
        "a": {"id": "a", "parentId": None, "role": "user", "content": "what is the size of the boot?"},
        "b": {"id": "b", "parentId": "a", "role": "assistant", "content": "It is the size 42."},
    }
    history = {"messages": nodes, "currentId": "b"}
    for row in ({"history": history}, {"chat": None, "history": history}):
        assert [turn.content for turn in read_conversation(row).messages] == [n["content"] for n in nodes.values()]

"""Sessions of Claude Code, from file to rows."""

import json
from pathlib import Path
from typing import Any

from session_files import read, said, write

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.rows.read import ReadRow


class Claude:
    """Lines as Claude Code writes them."""

    def __init__(self) -> None:
        self.number = 0

    def event(self, kind: str, content: Any, parent: str | None, **more: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"role": kind, "content": content}
        if kind == "assistant":
            message |= {"id": more.pop("id", f"msg_{self.number}"), "type": "message", "stop_reason": None}
            message["model"] = more.pop("model", "claude-sonnet-4")
        return {
            "parentUuid": parent,
            "isSidechain": more.pop("side", False),
            "userType": "external",
            "cwd": "/home/dev/project",
            "sessionId": "3f1c",
            "version": "2.0.1",
            "gitBranch": "main",
            "type": kind,
            "message": message,
            "uuid": f"u{self.number}",
            "timestamp": "2025-10-01T10:00:00.000Z",
            **more,
        }


def tool_use(call_id: str, command: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": {"command": command}}


def tool_result(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


def test_claude_code(tmp_path: Path) -> None:
    """A command of the program, a thought, two calls at once, an edited prompt and an error of the API."""
    log = Claude()
    events = [
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {"trackedFileBackups": {}}},
        log.event("user", "<command-name>/clear</command-name>", None),  # u1
        log.event("user", "list the tests", "u1"),  # u2: edited later
        log.event("assistant", [{"type": "text", "text": "There are none."}], "u2"),  # u3
        log.event("user", "run the tests", "u1"),  # u4
        log.event("assistant", [{"type": "thinking", "thinking": "pytest, surely"}], "u4", id="msg_a"),  # u5
        log.event("assistant", [{"type": "text", "text": "Running."}], "u5", id="msg_a"),  # u6
        log.event("assistant", [tool_use("t1", "pytest")], "u6", id="msg_a"),  # u7
        log.event("assistant", [tool_use("t2", "ruff check")], "u7", id="msg_a"),  # u8
        log.event("user", [tool_result("t1", "1 failed")], "u7"),  # u9: beside the path
        log.event("user", [tool_result("t2", "clean")], "u8"),  # u10
        log.event("assistant", [{"type": "text", "text": "API Error: 529"}], "u10", isApiErrorMessage=True),  # u11
        log.event("assistant", [{"type": "text", "text": "One test fails."}], "u11"),  # u12
    ]
    rows = read(write(tmp_path / "session.jsonl", events), tmp_path)
    assert list(rows) == ["3"]
    row = rows["3"]
    assert isinstance(row, ReadRow)
    assert row.layout == "claude-code"
    assert row.example.session == "3f1c"
    assert said(row) == [
        ("user", "run the tests"),
        ("assistant", "Running."),
        ("tool", "1 failed"),
        ("tool", "clean"),
        ("assistant", "One test fails."),
    ]
    answer = row.example.messages[1]
    assert answer.reasoning == "pytest, surely"
    assert [call["id"] for call in answer.tool_calls] == ["t1", "t2"]
    assert row.changed == ("other-branches", "program-notes")


def test_claude_code_pieces_of_one_answer_and_sessions_between_each_other(tmp_path: Path) -> None:
    log = Claude()
    asked = log.event("user", "List it.", None)
    pieces = [log.event("assistant", [{"type": "text", "text": text}], asked["uuid"], id="m") for text in ("a.", "b.")]
    other = {**log.event("user", "Who?", None), "sessionId": "other"}
    replies = {**log.event("assistant", "She.", other["uuid"]), "sessionId": "other"}
    again = {**asked, "message": {"role": "user", "content": "Something else."}}
    rows = read(write(tmp_path / "log.jsonl", [asked, pieces[0], other, pieces[1], replies, again]), tmp_path)
    assert [[text for _, text in said(row)] for row in rows.values()] == [["List it.", "a.b."], ["Who?", "She."]]
    assert all(isinstance(row, ReadRow) and "other-branches" not in row.changed for row in rows.values())


def test_claude_code_does_not_learn_what_the_user_stopped(tmp_path: Path) -> None:
    log = Claude()
    refusal = "The user doesn't want to proceed with this tool use. The tool use was rejected."
    events = [
        log.event("user", "delete everything", None),
        log.event("assistant", [tool_use("t1", "rm -rf .")], "u1"),
        log.event("user", [tool_result("t1", refusal)], "u2"),
        log.event("user", [{"type": "text", "text": "[Request interrupted by user for tool use]"}], "u3"),
        log.event("user", "list it first", "u4"),
        log.event("assistant", [{"type": "text", "text": "Here: a, b."}], "u5"),
    ]
    row = read(write(tmp_path / "session.jsonl", events), tmp_path)["1"]
    assert isinstance(row, ReadRow)
    assert [(m.role, m.weight) for m in row.example.messages if m.role == "assistant"] == [
        ("assistant", 0),
        ("assistant", 1),
    ]


def test_claude_code_subagents_compactions_and_broken_lines(tmp_path: Path) -> None:
    log = Claude()
    events = [
        log.event("user", "explore", None),
        log.event("user", "find the parser", None, side=True),
        log.event("assistant", [{"type": "text", "text": "In parse.py."}], "u2", side=True),
        log.event("assistant", [{"type": "text", "text": "Explored."}], "u1"),
        '{"parentUuid": "u4", "sessio\n',
        {"type": "system", "subtype": "compact_boundary", "parentUuid": None, "uuid": "c", "sessionId": "3f1c"},
        log.event("user", "Summary so far.", "c", isCompactSummary=True),
        log.event("user", "go on", "u5"),
        log.event("assistant", [{"type": "text", "text": "Done."}], "u6"),
    ]
    rows = read(write(tmp_path / "session.jsonl", events), tmp_path)
    assert rows["5"] == "broken-line"
    assert said(rows["1"]) == [("user", "explore"), ("assistant", "Explored.")]
    assert said(rows["2"]) == [("user", "find the parser"), ("assistant", "In parse.py.")]
    assert said(rows["7"]) == [("user", "Summary so far.\n\ngo on"), ("assistant", "Done.")]


def test_claude_code_side_chains_in_a_tree_and_lines_that_lost_their_type(tmp_path: Path) -> None:
    """A subagent's conversation hangs on the main one: it is no retry. A line without `type` says who speaks inside."""
    log = Claude()
    untyped = log.event("assistant", [tool_use("t1", "ls")], "u2")
    del untyped["type"]
    events = [
        untyped | {"parentUuid": "u2"},
        log.event("user", "list the files", None),  # u2
        log.event("user", [tool_result("t1", "a.py")], "u1"),  # u3
        log.event("user", "read a.py for me", "u3", side=True),  # u4
        log.event("assistant", [{"type": "text", "text": "It is empty."}], "u4", side=True),  # u5
        log.event("assistant", [{"type": "text", "text": "One file."}], "u3"),  # u6
    ]
    rows = read(write(tmp_path / "session.jsonl", [events[1], events[0], *events[2:]]), tmp_path)
    assert said(rows["1"]) == [
        ("user", "list the files"),
        ("assistant", ""),
        ("tool", "a.py"),
        ("assistant", "One file."),
    ]
    assert said(rows["4"]) == [("user", "read a.py for me"), ("assistant", "It is empty.")]
    assert isinstance(rows["1"], ReadRow)
    assert rows["1"].changed == ()


def test_one_line_of_a_session_is_not_a_row(tmp_path: Path) -> None:
    line = json.dumps(Claude().event("user", "hello", None))
    path = write(tmp_path / "rows.jsonl", ['{"prompt": "a", "completion": "b"}\n' * 30, line + "\n"])
    assert read(path, tmp_path)["31"] == "session-line"


def test_a_log_is_checked_from_its_file(tmp_path: Path) -> None:
    """Rows in equal what came of them, and the report names the log."""
    log = Claude()
    events = [log.event("user", "hi there", None), log.event("assistant", [{"type": "text", "text": "Hello."}], "u1")]
    path = write(tmp_path / "s.jsonl", events)
    report = check(DataConfig(path=str(path))).document
    assert report["rows_in"] == report["usable"] == 1
    assert report["files"] == {str(path): {"claude-code": 1}}


def test_claude_code_copies_without_ids(tmp_path: Path) -> None:
    """Lines that keep only what was said: a subagent apart, a call whose result was left out, a result of no call."""

    def line(kind: str, content: Any, **more: Any) -> dict[str, Any]:
        return {"type": kind, "timestamp": "2026-01-01T00:00:00Z", "message": {"content": content}, **more}

    events = [
        line("user", "what is wrong?"),
        line("assistant", [{"type": "text", "text": "I look."}, {"type": "tool_use", "name": "Read", "input": {}}]),
        line("user", "find the parser", isSidechain=True),
        line("assistant", [{"type": "text", "text": "In parse.py."}], isSidechain=True),
        line("assistant", [{"type": "text", "text": "A typo."}]),
        line("user", "go on"),
        line("user", [tool_result("t9", "lost")]),
        line("assistant", [{"type": "text", "text": "Done."}]),
    ]
    rows = read(write(tmp_path / "session.jsonl", events), tmp_path)
    assert said(rows["3"]) == [("user", "find the parser"), ("assistant", "In parse.py.")]
    assert said(rows["1"]) == [
        *(("user", "what is wrong?"), ("assistant", "I look."), ("tool", ""), ("assistant", "A typo.")),
        *(("user", "go on"), ("assistant", "Done.")),
    ]
    assert isinstance(rows["1"], ReadRow)
    assert rows["1"].changed == ("call-without-result", "result-without-call")


def test_claude_code_lines_of_a_message_alone(tmp_path: Path) -> None:
    events = [
        {"sessionId": "3f1c", "type": "session_start", "timestamp": "2026-01-01T00:00:00Z"},
        *({"message": {"role": "user", "content": text}, "timestamp": "2026-01-01T00:00:01Z"} for text in ("a", "b")),
        {"message": {"role": "assistant", "content": [tool_use("t1", "ls")]}, "timestamp": "2026-01-01T00:00:02Z"},
        {"message": {"role": "user", "content": [tool_result("t1", "x")]}, "timestamp": "2026-01-01T00:00:03Z"},
        {"message": {"role": "assistant", "content": "One."}, "timestamp": "2026-01-01T00:00:04Z"},
    ]
    rows = read(write(tmp_path / "session.jsonl", events), tmp_path)
    assert [said(row) for row in rows.values()] == [
        [("user", "a\n\nb"), ("assistant", ""), ("tool", "x"), ("assistant", "One.")]
    ]


def test_claude_code_copies_with_next_to_nothing(tmp_path: Path) -> None:
    """Lines of a type and a message alone; and those that call the user human."""
    bare = [
        {"type": "system", "cwd": "/p"},
        {"type": "user", "message": {"role": "user", "content": "one?"}},
        {"type": "assistant", "message": {"role": "assistant", "content": [{"type": "text", "text": "1"}]}},
    ]
    human = [
        {"type": "human", "message": {"content": "two?"}, "uuid": "a", "timestamp": "2026-01-01T00:00:00Z"},
        {"type": "assistant", "message": {"content": "2"}, "uuid": "b", "timestamp": "2026-01-01T00:00:01Z"},
    ]
    for events, wanted in (
        (bare, [("user", "one?"), ("assistant", "1")]),
        (human, [("user", "two?"), ("assistant", "2")]),
    ):
        (row,) = read(write(tmp_path / "session.jsonl", events), tmp_path).values()
        assert said(row) == wanted


def test_claude_code_results_in_lines_of_their_own(tmp_path: Path) -> None:
    """A line whose type is that of its block: with a message around it, or without."""
    asked = {"type": "user", "message": {"role": "user", "content": "one?"}, "sessionId": "s"}
    called = {
        "type": "assistant",
        "message": {"role": "assistant", "content": [tool_use("t1", "ls")]},
        "sessionId": "s",
    }
    end = {"type": "assistant", "message": {"role": "assistant", "content": "One."}, "sessionId": "s"}
    result = tool_result("t1", "x")
    around = {"type": "tool_result", "message": {"role": "tool_result", "content": [result]}, "sessionId": "s"}
    wanted = [("user", "one?"), ("assistant", ""), ("tool", "x"), ("assistant", "One.")]
    for events in (
        [asked, called, around, end],
        [asked, called, result, end],
        [asked, tool_use("t1", "ls"), result, end],
    ):
        (row,) = read(write(tmp_path / "session.jsonl", events), tmp_path).values()
        assert said(row) == wanted


def test_a_conversation_begins_behind_clear(tmp_path: Path) -> None:
    log = Claude()
    events = [
        log.event("user", "what floats?", None),  # u1
        log.event("assistant", [{"type": "text", "text": "Wood does."}], "u1"),  # u2
        log.event("user", "<command-name>/clear</command-name>", "u2"),  # u3
        log.event("user", "and what sinks?", "u3"),  # u4
        log.event("assistant", [{"type": "text", "text": "A stone does."}], "u4"),
    ]
    rows = read(write(tmp_path / "log.jsonl", events), tmp_path)
    assert [said(row) for row in rows.values()] == [
        [("user", "what floats?"), ("assistant", "Wood does.")],
        [("user", "and what sinks?"), ("assistant", "A stone does.")],
    ]


def test_qwen_code_writes_the_same_tree_with_other_parts(tmp_path: Path) -> None:
    def line(number: int, kind: str, role: str, *parts: Any) -> dict[str, Any]:
        names = {"uuid": str(number), "parentUuid": str(number - 1) if number else None, "sessionId": "s"}
        return {**names, "type": kind, "timestamp": "2026-01-01T10:00:00Z", "message": {"role": role, "parts": parts}}

    call = {"functionCall": {"id": "c", "name": "list", "args": {"path": "."}}}
    result = {"functionResponse": {"id": "c", "name": "list", "response": {"output": "a.py"}}}
    events = [
        line(0, "user", "user", {"text": "which files?"}),
        line(1, "assistant", "model", {"text": "a list", "thought": True}, call),
        line(2, "tool_result", "user", result),
        line(3, "assistant", "model", {"text": "One: a.py"}),
    ]
    row = read(write(tmp_path / "log.jsonl", events), tmp_path)["1"]
    assert said(row) == [("user", "which files?"), ("assistant", ""), ("tool", "a.py"), ("assistant", "One: a.py")]
    assert isinstance(row, ReadRow)
    answer = row.example.messages[1]
    assert (answer.reasoning, len(answer.tool_calls)) == ("a list", 1)


def test_a_line_may_stand_above_its_parent(tmp_path: Path) -> None:
    """A result may stand above its call, a note above the answer that it is about."""
    log = Claude()
    asked = log.event("user", "read both notes", None)  # u1
    first = log.event("assistant", [tool_use("t1", "cat a")], "u1", id="msg_a")  # u2
    second = log.event("assistant", [tool_use("t2", "cat b")], "u2", id="msg_a")  # u3
    of_second = log.event("user", [tool_result("t2", "b says no")], "u3")  # u4
    of_first = log.event("user", [tool_result("t1", "a says yes")], "u2")  # u5
    answer = log.event("assistant", [{"type": "text", "text": "They disagree."}], "u4")  # u6
    note = {"type": "system", "parentUuid": "u6", "uuid": "n1", "sessionId": "3f1c", "subtype": "turn_duration"}
    go_on = [
        log.event("user", "who is right?", "n1"),
        log.event("assistant", [{"type": "text", "text": "a is."}], "u7"),
    ]
    rows = read(
        write(tmp_path / "log.jsonl", [asked, first, of_second, of_first, second, note, answer, *go_on]), tmp_path
    )
    assert list(rows) == ["1"]
    assert said(rows["1"]) == [
        ("user", "read both notes"),
        ("assistant", ""),
        ("tool", "b says no"),
        ("tool", "a says yes"),
        ("assistant", "They disagree."),
        ("user", "who is right?"),
        ("assistant", "a is."),
    ]


def test_a_piece_of_a_session_is_read_from_its_first_question(tmp_path: Path) -> None:
    log = Claude()
    events = [
        log.event("user", [tool_result("t9", "3 passed")], "lost"),
        log.event("assistant", [{"type": "text", "text": "All pass."}], "u1"),
        log.event("user", "commit it", "u2"),
        log.event("assistant", [{"type": "text", "text": "Committed."}], "u3"),
        log.event("user", [tool_result("t8", "clean")], "lost too"),
        log.event("assistant", [{"type": "text", "text": "Nothing to do."}], "u5"),
    ]
    rows = read(write(tmp_path / "log.jsonl", events), tmp_path)
    assert said(rows["1"]) == [("user", "commit it"), ("assistant", "Committed.")]
    assert rows["5"] == "no-question"


def test_a_thought_that_no_answer_follows_is_left_out(tmp_path: Path) -> None:
    log = Claude()
    events = [
        log.event("user", "list the files", None),
        log.event("assistant", [{"type": "thinking", "thinking": "", "signature": "x"}], "u1"),
        log.event("user", "only the tests", "u2"),
        log.event("assistant", [{"type": "text", "text": "test_a.py"}], "u3"),
        log.event("user", "and the docs", "u4"),
        log.event("assistant", [{"type": "thinking", "thinking": "where are they"}], "u5"),
    ]
    row = read(write(tmp_path / "log.jsonl", events), tmp_path)["1"]
    assert said(row) == [("user", "list the files\n\nonly the tests"), ("assistant", "test_a.py")]
    assert isinstance(row, ReadRow)
    assert "lone-thought" in row.changed


def test_nul_in_what_a_tool_printed(tmp_path: Path) -> None:
    log = Claude()
    events = [
        log.event("user", "what is in it?", None),
        log.event("assistant", [tool_use("t1", "cat x.bin")], "u1"),
        log.event("user", [tool_result("t1", "ab\0c")], "u2"),
        log.event("assistant", [{"type": "text", "text": "Bytes."}], "u3"),
    ]
    row = read(write(tmp_path / "log.jsonl", events), tmp_path)["1"]
    assert said(row)[2] == ("tool", "ab\ufffdc")
    assert isinstance(row, ReadRow)
    assert "nul-in-result" in row.changed


def test_what_a_command_of_the_users_own_is_given_is_asked(tmp_path: Path) -> None:
    """Behind it stands the page that the command stands for; behind a command of the program what that printed."""
    log = Claude()

    def command(name: str, given: str) -> str:
        return f"<command-message>{name} is running</command-message>\n<command-name>/{name}</command-name>\n{given}"

    page = [{"type": "text", "text": "Look at the diff and list what is wrong.\nARGUMENTS: the parser"}]
    events = [
        log.event("user", command("model", "<command-args>opus</command-args>"), None),  # u1
        log.event("user", "<local-command-stdout>Set model to opus</local-command-stdout>", "u1"),  # u2
        log.event("user", command("review", "<command-args>the parser\nand its tests</command-args>"), "u2"),  # u3
        log.event("user", page, "u3", isMeta=True),  # u4
        log.event("assistant", [{"type": "text", "text": "One bug in it."}], "u4"),  # u5
        log.event("user", command("commit", "<command-args></command-args>"), "u5"),  # u6
        log.event("user", [{"type": "text", "text": "Commit."}], "u6", isMeta=True),  # u7
        log.event("user", "mend it first", "u7"),  # u8
        log.event("assistant", [{"type": "text", "text": "Mended."}], "u8"),  # u9
    ]
    (row,) = read(write(tmp_path / "session.jsonl", events), tmp_path).values()
    assert isinstance(row, ReadRow)
    assert said(row) == [
        ("user", "the parser\nand its tests"),
        ("assistant", "One bug in it."),
        ("user", "mend it first"),
        ("assistant", "Mended."),
    ]

"""Sessions of coding agents and logs of servers, in the form that each program writes, from file to rows."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.intake.files import plan_inputs
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import ReadRow, read_example, read_rows
from hivetune.data.rows.sessions.rendered import turns_of


def read(path: Path, tmp_path: Path) -> dict[str, ReadRow | str]:
    """Each row of a file by its place: what was read, or the reason why not."""
    found: dict[str, ReadRow | str] = {}
    spill = tmp_path / "spill"
    spill.mkdir(exist_ok=True)
    for chunk in plan_inputs(str(path), spill).chunks:
        for raw in read_rows(chunk):
            place = raw.source.rpartition(":")[2]
            try:
                found[place] = read_example(raw, {})
            except RowRefused as error:
                found[place] = error.reason
    return found


def said(row: ReadRow | str) -> list[tuple[str, str]]:
    assert isinstance(row, ReadRow), row
    return [(m.role, m.content) for m in row.example.messages]


def write(path: Path, events: Sequence[Any]) -> Path:
    path.write_text("".join(e if isinstance(e, str) else json.dumps(e) + "\n" for e in events), encoding="utf-8")
    return path


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
    assert rows["5"] == "bad-json"
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
    assert rows["2"] == "bad-tool-call", "in the middle, what follows may stand on it"


def test_codex_in_its_first_form(tmp_path: Path) -> None:
    events = [
        {"id": "0198", "timestamp": "2025-07-01T00:00:00Z", "instructions": "Be brief.", "git": {"branch": "main"}},
        {"record_type": "state"},
        item("user", "hi"),
        item("assistant", "Hello."),
    ]
    rows = read(write(tmp_path / "rollout.jsonl", events), tmp_path)
    assert said(rows["3"]) == [("system", "Be brief."), ("user", "hi"), ("assistant", "Hello.")]


LLAMA_LOG = (
    "build: 5000 (abc) with cc for x86_64-linux-gnu\n"
    "srv    load_model: loading model 'm.gguf'\n"
    "srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 200\n"
    'srv  log_server_r: request:  {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "stream": false}\n'
    'srv  log_server_r: response: {"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant",'
    '"content":"Four."}}],"created":1,"model":"m","object":"chat.completion"}\n'
    'srv  log_server_r: request:  {"content": "tokenize me"}\n'
    'srv  log_server_r: response: {"tokens":[1,2]}\n'
    'srv  log_server_r: request:  {"messages": [{"role": "user", "content": "And 3?"}], "stream": true}\n'
    "srv  log_server_r: response: \n"
)


def test_llama_server(tmp_path: Path) -> None:
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(LLAMA_LOG.encode()))
    rows = read(path, tmp_path)
    assert said(rows["4"]) == [("user", "What is 2 + 2?"), ("assistant", "Four.")]
    assert rows["8"] == "no-answer"
    assert len(rows) == 2


PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIt's 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
VLLM_LOG = (
    "INFO 08-06 12:00:00 [api_server.py:1] vLLM API server version 0.10.0\n"
    f"INFO 08-06 12:00:01 [logger.py:39] Received request chatcmpl-1: prompt: {PROMPT!r}, params: SamplingParams(n=1)\n"
    f"DEBUG 08-06 12:00:02 [logger.py:40] Request chatcmpl-2 details: prompt: {PROMPT!r}, prompt_token_ids: [1]\n"
    "INFO 08-06 12:00:03 [logger.py:60] Generated response chatcmpl-2: output: 'Four, of', output_token_ids: [7], "
    "finish_reason: length\n"
    'INFO 08-06 12:00:04 [logger.py:60] Generated response chatcmpl-1 (streaming complete): output: "It\'s four.", '
    "output_token_ids: None, finish_reason: stop\n"
    "INFO 08-06 12:00:05 [logger.py:39] Received request chatcmpl-3: prompt: 'x <|weird|> y', params: S()\n"
    "INFO 08-06 12:00:06 [logger.py:60] Generated response chatcmpl-3: output: 'z', finish_reason: stop\n"
)


def test_vllm(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(VLLM_LOG)
    rows = read(path, tmp_path)
    assert said(rows["2"]) == [("system", "Be brief."), ("user", "It's 2 + 2?"), ("assistant", "It's four.")]
    assert rows["3"] == "cut-off-answer"
    assert rows["6"] == "unknown-layout"


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            [("user", "Hi")],
        ),
        ("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", [("user", "Hi")]),
        ("<s>[INST] Hi [/INST] Hello</s>[INST] Bye [/INST]", [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", [("user", "Hi")]),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe answer", None),
        ("<|im_start|>user\nHi<|im_end|>\nstray text", None),
        ("Once upon a time", None),
    ],
)
def test_prompts_back_to_turns(prompt: str, turns: list[tuple[str, str]] | None) -> None:
    found = turns_of(prompt)
    assert (found and [(turn["role"], turn["content"]) for turn in found]) == turns


def test_a_log_is_checked_from_its_file(tmp_path: Path) -> None:
    """Rows in equal what came of them, and the report names the log."""
    log = Claude()
    events = [log.event("user", "hi there", None), log.event("assistant", [{"type": "text", "text": "Hello."}], "u1")]
    path = write(tmp_path / "s.jsonl", events)
    report = check(DataConfig(path=str(path))).document
    assert report["rows_in"] == report["usable"] == 1
    assert report["files"] == {str(path): {"claude-code": 1}}


def batch(identity: str, text: str) -> dict[str, Any]:
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": identity, "method": "POST", "url": "/v1/chat/completions", "body": body}


def batch_answer(identity: str, text: str) -> dict[str, Any]:
    body = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": text}}]}
    response = {"status_code": 200, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": identity, "response": response, "error": None}


def test_batch_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "batch").mkdir()
    write(tmp_path / "batch" / "in.jsonl", [batch("a", "Which river?"), batch("b", "Which sea?"), batch("c", "Who?")])
    failed = {"custom_id": "c", "response": None, "error": {"message": "expired"}}
    lost = batch_answer("z", "Nobody asked.")
    write(tmp_path / "batch" / "out.jsonl", [batch_answer("a", "The Seine."), lost, failed])
    found: dict[str, Any] = {}
    for chunk in plan_inputs(str(tmp_path / "batch"), tmp_path).chunks:
        for raw in read_rows(chunk):
            place = Path(raw.source).name
            try:
                found[place] = said(read_example(raw, {}))
            except RowRefused as error:
                found[place] = error.reason
    assert found == {
        "in.jsonl:2": "no-answer",
        "out.jsonl:1": [("user", "Which river?"), ("assistant", "The Seine.")],
        "out.jsonl:2": "earlier-turns-missing",
        "out.jsonl:3": "failed",
    }


def test_batches_of_anthropic_and_ids_of_two_questions(tmp_path: Path) -> None:
    (tmp_path / "batch").mkdir()
    params = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Which river?"}]}
    message = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "The Seine."}]}
    write(tmp_path / "batch" / "a.jsonl", [{"custom_id": "a", "params": params}, {"custom_id": "b", "params": params}])
    write(tmp_path / "batch" / "b.jsonl", [{"custom_id": "b", "params": {**params, "messages": []}}])
    results = [{"custom_id": one, "result": {"type": "succeeded", "message": message}} for one in "ab"]
    write(tmp_path / "batch" / "c.jsonl", results)
    report = check(DataConfig(path=str(tmp_path / "batch"))).document
    assert report["usable"] == 1
    assert report["rejected"] == {"no-answer": 2, "earlier-turns-missing": 1}

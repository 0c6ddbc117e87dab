"""Exports of chat programs in which something stands that no export holds: a tool's results, an image, a cut answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.read import RawRow, read_example

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


def test_an_answer_that_rests_on_a_tool_is_read_and_not_learned() -> None:
    turns, changed = said(chatgpt(*PAIR, *FILES, message("user", "thanks"), message("assistant", "Gladly.")))
    assert [weight for _, _, weight in turns] == [1, 1, 1, 0, 1, 1]
    assert turns[3] == ("assistant", "A boat sank.", 0)
    assert changed == ()
    with pytest.raises(RowRefused, match="not-held"):
        read_conversation(chatgpt(*FILES))


def test_an_answer_that_a_search_of_the_web_was_made_for() -> None:
    """It says what was found, behind marks of its sources; a mark may hold words of the sentence."""
    question = message("user", "and the news?")
    calls = [
        message("assistant", "search('news')", "code", recipient="web.run"),
        message("tool", "", author={"name": "web.run"}),
    ]
    entity = '\ue200entity\ue202["city","Bonn","a town"]\ue201'
    answers = {
        f"A boat sank in {entity} \ue200cite\ue202turn0search1\ue202turn0news2\ue201.": "A boat sank in Bonn.",
        "See \ue200url\ue202the news\ue202turn0search1\ue201.": "See the news.",
        "A boat [citation:2] sank\u30103\u2020source\u3011. :contentReference[oaicite:1]{index=1}": "A boat sank.",
    }
    for answer, learned in answers.items():
        found = read_example(
            RawRow("f:1", json.dumps(chatgpt(question, *calls, message("assistant", answer))).encode()), {}
        )
        assert [(m.content, m.weight) for m in found.example.messages] == [("and the news?", 1), (learned, 1)]
        assert found.changed == ("source-marks",)


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


def test_what_a_model_of_chatgpt_thinks_is_no_tool() -> None:
    thought = message("tool", "**Floating**\n\nWhat is light floats.", author={"name": "a8km123"})
    found = read_conversation(chatgpt(PAIR[0], thought, PAIR[1])).messages
    assert [(m.content, m.weight) for m in found] == [("what floats?", 1), ("Wood does.", 1)]
    assert found[1].reasoning == "**Floating**\n\nWhat is light floats."


@pytest.mark.parametrize(
    ("rating", "learned"), [("original", "Bonn."), ("new", "In Bonn."), ("same", "In Bonn."), ("skip", "Bonn.")]
)
def test_the_preferred_of_two_compared_answers(rating: str, learned: str) -> None:
    turns = [message("user", "Where?"), message("assistant", "Here."), message("user", "Which town?")]
    answers = {"original_turn": [message("assistant", "Bonn.")], "new_turn": [message("assistant", "In Bonn.")]}
    compared = {**answers, "completion_comparison_rating": rating}
    row = {
        "id": "r",
        "input": {"prompt_convo": {"id": "c", "messages": turns}},
        "output": {"feedback_step_2": compared},
    }
    newer = {"id": "r", "content": {"input": row["input"], "output": row["output"]}, "storage_protocol": "z"}
    for one in (row, newer):
        found, changed = said(one)
        assert [text for _, text, _ in found] == ["Where?", "Here.", "Which town?", learned]
        assert changed == ("other-branches",)


CODE = {"name": "floats", "type": "code/python", "content": "def floats(): ...\n"}
CREATED = message("tool", "Successfully created text document 'Floats'.", author={"name": "canmore.create_textdoc"})


def test_a_document_beside_the_conversation_is_a_part_of_the_answer() -> None:
    call = message("assistant", json.dumps(CODE), recipient="canmore.create_textdoc")
    turns, _ = said(
        chatgpt(PAIR[0], message("assistant", "As code:"), call, CREATED, message("assistant", "It floats."))
    )
    answer = "As code:\n\n```python\ndef floats(): ...\n```\n\nIt floats."
    assert turns == [("user", "what floats?", 1), ("assistant", answer, 1)]


def test_a_document_that_was_not_created_is_not_learned() -> None:
    call = message("assistant", json.dumps(CODE), recipient="canmore.create_textdoc")
    failed = message("tool", "It failed.", author={"name": "canmore.create_textdoc"})
    with pytest.raises(RowRefused, match="not-held"):
        read_conversation(chatgpt(PAIR[0], call, failed, message("assistant", "It floats.")))


def test_a_compared_answer_that_does_not_end() -> None:
    cut = {"new_turn": [message("assistant", "In Bo", end_turn=False)], "completion_comparison_rating": "new"}
    row = {"input": {"prompt_convo": {"messages": [PAIR[0]]}}, "output": {"feedback_step_2": cut}}
    with pytest.raises(RowRefused, match="cut-off-answer"):
        read_conversation({"id": "r", **row})


def test_an_answer_that_was_continued_is_not_learned() -> None:
    parts = (message("assistant", "Wo", status="finished_partial_completion"), message("assistant", "od does."))
    turns, _ = said(chatgpt(*PAIR, PAIR[0], *parts))
    assert turns[1] == ("assistant", "Wood does.", 1)
    assert {weight for role, _, weight in turns[3:]} == {0}


def test_a_note_in_chatgpts_memory_is_none() -> None:
    note = (message("assistant", "likes boats", recipient="bio"), message("tool", "noted", author={"name": "bio"}))
    turns, _ = said(chatgpt(message("user", "I like boats"), *note, message("assistant", "Good to know.")))
    assert turns == [("user", "I like boats", 1), ("assistant", "Good to know.", 1)]


def test_an_answer_that_was_stopped_is_not_learned() -> None:
    stopped = message("assistant", "It has a", metadata={"finish_details": {"type": "interrupted"}})
    turns, _ = said(chatgpt(*PAIR, message("user", "more"), stopped, message("user", "shorter"), PAIR[1]))
    assert [weight for _, _, weight in turns] == [1, 1, 1, 0, 1, 1]
    with pytest.raises(RowRefused, match="cut-off-answer"):
        read_conversation(chatgpt(PAIR[0], stopped))


def test_a_conversation_ends_before_its_first_image() -> None:
    image = [{"content_type": "image_asset_pointer", "asset_pointer": "file-service://1"}, "what is this?"]
    picture = message("user", image, "multimodal_text")
    turns, changed = said(chatgpt(*PAIR, picture, message("assistant", "A boat.")))
    assert turns == [("user", "what floats?", 1), ("assistant", "Wood does.", 1)]
    assert changed == ("ends-before-media",)
    drawn = (message("assistant", "{}", recipient="dalle.text2im"), message("tool", image, "multimodal_text"))
    turns, changed = said(chatgpt(*PAIR, message("user", "draw it"), *drawn, message("user", "bluer"), PAIR[1]))
    assert turns[:2] == [("user", "what floats?", 1), ("assistant", "Wood does.", 1)]
    assert changed == ("ends-before-media", "trailing-turns")


def test_what_was_spoken_is_a_text() -> None:
    spoken = [{"content_type": "audio_transcription", "text": "what floats?"}, {"content_type": "audio_asset_pointer"}]
    turns, _ = said(chatgpt(message("user", spoken, "multimodal_text"), PAIR[1]))
    assert turns == [("user", "what floats?", 1), ("assistant", "Wood does.", 1)]


def test_claudes_own_tools() -> None:
    search = [{"type": "tool_use", "name": "drive_search", "input": {}}, {"type": "tool_result", "content": []}]
    row = claude(
        ("human", [text("what floats?")]),
        ("assistant", [text("Wood does.")]),
        ("human", [text("and the news?")]),
        ("assistant", [text("I look."), *search, text("A boat sank.")]),
        ("human", [text("thanks")]),
        ("assistant", [text("Gladly.")]),
    )
    turns, _ = said(row)
    assert [weight for _, _, weight in turns] == [1, 1, 1, 0, 1, 1]


def test_claudes_files_whose_text_the_export_holds() -> None:
    row = claude(("human", [text("sum it up")]), ("assistant", [text("It is about wood.")]))
    row["chat_messages"][0]["files"] = [{"file_name": "a.pdf"}]
    with pytest.raises(RowRefused):
        read_conversation(row)
    row["chat_messages"][0]["attachments"] = [{"file_name": "a.pdf", "extracted_content": "Wood floats."}]
    turns, _ = said(row)
    assert turns == [("user", "Wood floats.\n\nsum it up", 1), ("assistant", "It is about wood.", 1)]


def test_open_webui_and_ai_studio() -> None:
    turns = [
        {"role": "user", "content": "what floats?"},
        {"role": "assistant", "content": "Wood does.", "done": True},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "It", "done": False},
        {"role": "user", "content": "see the file", "files": [{"id": "f"}]},
        {"role": "assistant", "content": "I see.", "done": True},
    ]
    found, changed = said({"chat": {"messages": turns}})
    assert found == [
        ("user", "what floats?", 1),
        ("assistant", "Wood does.", 1),
        ("user", "more", 1),
        ("assistant", "It", 0),
    ]
    assert changed == ("ends-before-media",)
    chunks = [
        {"role": "user", "text": "what floats?"},
        {"role": "model", "text": "Wood does.", "finishReason": "STOP"},
        {"role": "user", "driveDocument": {"id": "d"}},
        {"role": "model", "text": "I see.", "finishReason": "STOP"},
    ]
    found, changed = said({"chunkedPrompt": {"chunks": chunks}})
    assert [line for _, line, _ in found] == ["what floats?", "Wood does."]
    assert changed == ("ends-before-media",)


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


def deepseek(*messages: Turn) -> dict[str, Any]:
    mapping: dict[str, Any] = {"root": {"id": "root", "parent": None, "children": ["0"], "message": None}}
    for number, one in enumerate(messages):
        below = [str(number + 1)] if number + 1 < len(messages) else []
        above = str(number - 1) if number else "root"
        moment = {"inserted_at": f"2025-01-01T10:0{number}:00+08:00", "model": "m", "files": []}
        mapping[str(number)] = {"id": str(number), "parent": above, "children": below, "message": {**moment, **one}}
    return {"id": "d", "title": "Boats", "inserted_at": "2025-01-01T10:00:00+08:00", "mapping": mapping}


def test_deepseek_in_fragments_and_before_them() -> None:
    def in_fragments(*parts: tuple[str, Any]) -> Turn:
        return {"fragments": [{"type": kind, "content": content} for kind, content in parts]}

    row = deepseek(
        in_fragments(("REQUEST", "what floats?")),
        in_fragments(("THINK", "density"), ("RESPONSE", "Wood does.")),
        in_fragments(("REQUEST", "and the news?")),
        in_fragments(("SEARCH", "pages"), ("RESPONSE", "A boat sank.")),
    )
    found = read_conversation(row)
    assert [(m.role, m.content, m.reasoning, m.weight) for m in found.messages] == [
        ("user", "what floats?", None, 1),
        ("assistant", "Wood does.", "density", 1),
        ("user", "and the news?", None, 1),
        ("assistant", "A boat sank.", None, 1),
    ]
    older = deepseek(
        {"role": "USER", "content": "what floats?"},
        {"role": "ASSISTANT", "content": "Wood does.", "reasoning_content": "density"},
    )
    assert read_conversation(older).messages == found.messages[:2]


def test_code_of_chatgpt_that_ran_is_a_call() -> None:
    code = message("assistant", [], "code", recipient="python")
    code["content"] = {"content_type": "code", "language": "unknown", "text": "print(6 * 7)"}
    printed = message("tool", [], "execution_output", author={"name": "python"})
    printed["content"] = {"content_type": "execution_output", "text": "42\n"}
    refused = message("tool", "explain that you can't", "system_error", author={"name": "python"})
    asked, counts, answer = (
        message("user", "6 * 7?"),
        message("assistant", "I count."),
        message("assistant", "It is 42."),
    )
    apology = message("assistant", "I can't count now.")
    found = read_conversation(
        chatgpt(asked, counts, code, printed, answer, message("user", "8 * 7?"), code, refused, apology)
    )
    assert [(m.role, m.content, len(m.tool_calls), m.weight) for m in found.messages] == [
        ("user", "6 * 7?", 0, 1),
        ("assistant", "I count.", 1, 1),
        ("tool", "42\n", 0, 1),
        ("assistant", "It is 42.", 0, 1),
        ("user", "8 * 7?", 0, 1),
        ("assistant", "I can't count now.", 0, 0),
    ]
    assert found.messages[1].tool_calls[0]["function"] == {"name": "python", "arguments": {"input": "print(6 * 7)"}}
    with pytest.raises(RowRefused, match="not-held"):
        read_conversation(chatgpt(asked, code, answer))


def test_documents_and_calls_of_claude() -> None:
    def artifact(command: str, content: str, **more: str) -> Turn:
        return {
            "type": "tool_use",
            "name": "artifacts",
            "input": {"id": "a", "command": command, "content": content, **more},
        }

    def gave(*texts: str) -> Turn:
        return {"type": "tool_result", "name": "artifacts", "content": [text(one) for one in texts]}

    page = artifact("create", "<p>hi</p>\n", type="text/html")
    again = artifact("rewrite", "<p>hello</p>")
    count = {"type": "tool_use", "name": "repl", "input": {"code": "6 * 7"}}
    found = read_conversation(
        claude(
            ("human", [text("a page")]),
            ("assistant", [text("Here it is:"), page, gave("OK"), text("It greets.")]),
            ("human", [text("longer")]),
            ("assistant", [again, gave("OK")]),
            ("human", [text("6 * 7?")]),
            ("assistant", [text("I count."), count, gave("42"), text("It is 42.")]),
            ("human", [text("8 * 7?")]),
            ("assistant", [text("I count."), count, gave(), text("It is 56.")]),
        )
    ).messages
    assert [(m.role, m.content, m.weight, len(m.tool_calls)) for m in found if m.role != "user"] == [
        ("assistant", "Here it is:\n\n```html\n<p>hi</p>\n```\n\nIt greets.", 1, 0),
        ("assistant", "```html\n<p>hello</p>\n```", 1, 0),
        ("assistant", "I count.", 1, 1),
        ("tool", "42", 1, 0),
        ("assistant", "It is 42.", 1, 0),
        ("assistant", "I count.\n\nIt is 56.", 0, 0),
    ]


def copilot(*requests: Turn) -> dict[str, Any]:
    return {"requesterUsername": "ann", "responderUsername": "GitHub Copilot", "requests": list(requests)}


def request(asked: str, *parts: Any, **more: Any) -> Turn:
    return {"requestId": asked, "message": {"text": asked, "parts": []}, "response": list(parts), **more}


def test_a_system_prompt_of_chatgpt_in_fields() -> None:
    told = message("system", "", "system_content")
    told["content"] = {"content_type": "system_content", "model_identity_desc": "You are Bee.", "instructions": None}
    found = read_conversation(chatgpt(told, message("user", "hi"), message("assistant", "Hello.")))
    assert [m.content for m in found.messages] == ["You are Bee.", "hi", "Hello."]


TOOL = {"kind": "toolInvocationSerialized", "toolId": "readFile"}


def test_a_chat_of_copilot() -> None:
    name = {"kind": "inlineReference", "inlineReference": {"path": "/src/a.py", "scheme": "file"}}
    folder = {"kind": "inlineReference", "inlineReference": {"path": "/src/lib/", "scheme": "file"}}
    see = [{"value": "See "}, name, {"value": " in "}, folder, {"value": "."}, {"kind": "undoStop", "id": "u"}]
    requests = [
        request("what?", {"kind": "progressTask"}, isCanceled=True),
        request("what sorts?", *see),
        request("read it", {"value": "I look."}, TOOL, {"value": "It sorts."}),
        request("and then?", {"value": "It pri"}, isCanceled=True),
        request("and now?", {"value": "It prin"}, modelState={"value": 2}),
        request("where?", {"value": "Look at "}, {"kind": "inlineReference", "inlineReference": {}}, {"value": "."}),
        request("thanks", {"value": "Gladly."}),
    ]
    turns, _ = said(copilot(*requests))
    assert turns[0] == ("user", "what sorts?", 1)
    assert [(text, weight) for role, text, weight in turns if role == "assistant"] == [
        ("See `a.py` in `lib`.", 1),
        ("I look.It sorts.", 0),
        ("It pri", 0),
        ("It prin", 0),
        ("Look at .", 0),
        ("Gladly.", 1),
    ]


def test_an_agent_of_copilot_round_by_round() -> None:
    call = {"id": "c__vscode-1", "name": "read_file", "arguments": '{"path": "a.py"}'}
    rounds = [
        {"response": "I look.", "toolCalls": [call], "thinking": {"id": "t", "text": "where is it?"}},
        {"response": "[a.py](src/a.py) sorts.", "toolCalls": []},
    ]
    pieces = [{"type": 2, "text": "def go():", "lineBreakBefore": False}, {"type": 2, "text": "sort()"}]
    pieces[1]["lineBreakBefore"] = True
    held = {call["id"]: {"content": [{"value": {"node": {"type": 1, "children": pieces}}}]}}
    shown = [{"value": "I look."}, TOOL, {"value": " sorts."}]

    def worked(results: Any) -> Turn:
        return request("what does it do?", *shown, result={"metadata": {"toolCallRounds": rounds, **results}})

    found = read_conversation(copilot(worked({"toolCallResults": held}))).messages
    assert [(m.role, m.content, m.reasoning, len(m.tool_calls)) for m in found] == [
        ("user", "what does it do?", None, 0),
        ("assistant", "I look.", "where is it?", 1),
        ("tool", "def go():\nsort()", None, 0),
        ("assistant", "[a.py](src/a.py) sorts.", None, 0),
    ]
    with pytest.raises(RowRefused, match="not-held"):
        read_conversation(copilot(worked({})))


def test_a_question_to_copilot_about_an_image() -> None:
    image = {"variables": [{"kind": "image", "name": "pasted"}]}
    requests = [request("hi", {"value": "Hello."}), request("what is this?", {"value": "A boat."}, variableData=image)]
    assert [text for _, text, _ in said(copilot(*requests))[0]] == ["hi", "Hello."]


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
    assert [(role, line) for role, line, _ in found][:2] == [
        ("user", "When does it leave?"),
        ("assistant", "It leaves at noon."),
    ]

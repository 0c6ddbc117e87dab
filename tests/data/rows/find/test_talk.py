"""Conversations that no layout knows: trees of edits, streams of events, transcripts; where in doubt, refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.checks.rules import check_messages
from hivetune.data.intake.files import plan_inputs
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.find.nest import place_name, place_of_rows, split_record
from hivetune.data.rows.find.talk.branches import kept_branch
from hivetune.data.rows.layouts.mapped import map_columns
from hivetune.data.rows.read import RawRow, ReadRow, read_example, read_rows

ASKED, FIRST, EDITED, BETTER = "Where is my parcel?", "At the depot.", "Where is parcel 7?", "Parcel 7 is in Bonn."
KEPT = [("user", EDITED), ("assistant", BETTER)]
TREE = [
    {"id": "q1", "parent_id": None, "role": "user", "text": ASKED},
    {"id": "a1", "parent_id": "q1", "role": "assistant", "text": FIRST},
    {"id": "q2", "parent_id": None, "role": "user", "text": EDITED},
    {"id": "a2", "parent_id": "q2", "role": "assistant", "text": "I do not know."},
    {"id": "a3", "parent_id": "q2", "role": "assistant", "text": BETTER},
]


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in read_conversation(row).messages]


def read_file(tmp_path: Path, lines: list[dict[str, Any]], name: str = "rows.jsonl") -> list[ReadRow | str]:
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found: list[ReadRow | str] = []
    for chunk in plan_inputs(str(path), tmp_path).chunks:
        for raw in read_rows(chunk):
            try:
                found.append(read_example(raw, {}))
            except RowRefused as refused:
                found.append(refused.reason)
    return found


def spoken(read: ReadRow | str) -> list[tuple[str, str]] | str:
    return read if isinstance(read, str) else [(m.role, m.content) for m in read.example.messages]


def test_the_branch_that_was_written_last_is_kept() -> None:
    found = read_conversation({"thread": TREE})
    assert [(m.role, m.content) for m in found.messages] == KEPT
    assert "other-branches" in found.changed
    assert kept_branch(TREE[:2]) == [0, 1]


def test_times_tell_the_last_branch_where_the_order_does_not() -> None:
    turned = [{**one, "created_at": number} for number, one in enumerate(TREE, 1)][::-1]
    assert said({"thread": turned}) == KEPT
    with pytest.raises(RowRefused):
        read_conversation({"thread": TREE[::-1]})  # without times nobody knows


def test_a_few_quoted_messages_are_no_tree() -> None:
    talk = [{"id": str(i), "role": ("user", "assistant")[i % 2], "text": f"Turn number {i}."} for i in range(6)]
    talk[5]["reply_to"] = "0"
    assert len(said({"thread": talk})) == 6


def test_messages_inside_each_other() -> None:
    def reply(role: str, text: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"role": role, "text": text, "replies": list(replies), **more}

    worse, best = reply("assistant", FIRST, rank=1), reply("assistant", BETTER, rank=0)
    assert said({"tree_id": "t", "prompt": reply("prompter", EDITED, best, worse)}) == KEPT
    later = {"sender": "bot", "text": BETTER, "children": []}
    asked = {"sender": "user", "text": EDITED, "children": [{"sender": "bot", "text": FIRST, "children": []}, later]}
    assert said({"messages": [asked]}) == KEPT


def test_a_table_of_messages_with_parents(tmp_path: Path) -> None:
    read = read_file(tmp_path, [{**one, "conversation_id": "c", "ts": number} for number, one in enumerate(TREE)])
    assert [spoken(one) for one in read] == [KEPT]
    assert isinstance(read[0], ReadRow)
    assert "other-branches" in read[0].changed


def event(kind: str, session: str = "s", **payload: Any) -> dict[str, Any]:
    return {"session_id": session, "type": kind, "payload": payload}


STREAM = [
    event("session_started", client="web"),
    event("user_message", text=EDITED),
    event("assistant.delta", text="Parcel"),
    event("tool_call", name="find", arguments={"parcel": 7}, call_id="c1"),
    event("tool_result", call_id="c1", output="Bonn"),
    event("assistant.message", content=BETTER),
    event("error", message="The connection was closed by the other side."),
]
WITH_CALL = [("user", EDITED), ("assistant", ""), ("tool", "Bonn"), ("assistant", BETTER)]


def test_a_stream_of_several_kinds_of_events(tmp_path: Path) -> None:
    other = [{**one, "session_id": "t"} for one in (STREAM[0], STREAM[1], STREAM[5])]
    mixed = [one for pair in zip(STREAM[:3], other, strict=True) for one in pair] + STREAM[3:]
    read = read_file(tmp_path, mixed)
    assert [spoken(one) for one in read] == [WITH_CALL, KEPT]
    assert isinstance(read[0], ReadRow)
    assert "program-notes" in read[0].changed
    assert read[0].example.messages[1].tool_calls[0]["function"] == {"name": "find", "arguments": {"parcel": 7}}
    assert said({"log": STREAM}) == WITH_CALL


@pytest.mark.parametrize(
    "strange",
    [
        event("narrator", text="And then the parcel was found."),  # nobody knows who speaks
        event("tool_call", description="looks up the parcel of a user"),  # a call without its arguments
    ],
)
def test_a_kind_that_nobody_knows_refuses_the_stream(tmp_path: Path, strange: dict[str, Any]) -> None:
    found = [spoken(one) for one in read_file(tmp_path, [STREAM[1], strange, STREAM[5]])]
    assert all(isinstance(one, str) for one in found), found


@pytest.mark.parametrize(
    "text",
    [
        f"Customer: {EDITED}\nAgent: {BETTER}",
        f"[Patient]: {EDITED}\n[Doctor]: {BETTER}\n",
        f"**User:** {EDITED}\n\n**Assistant:** {BETTER}",
        f"User\uff1a{EDITED}\nBot\uff1a{BETTER}",
    ],
)
@pytest.mark.parametrize("column", ["transcript", "text"])
def test_a_conversation_as_one_text(text: str, column: str) -> None:
    found = read_conversation({column: text, "id": 4})
    assert [(m.role, m.content) for m in found.messages] == KEPT
    assert "turns-from-text" in found.changed


def test_lines_that_each_name_their_speaker_may_follow_each_other() -> None:
    assert len(said({"transcript": f"User: {ASKED}\nUser: {EDITED}\nBot: {BETTER}"})) == 2


@pytest.mark.parametrize(
    "text",
    [
        f"Customer: {EDITED}\nAgent: {BETTER}\ntool: {{}}\nAgent: Yes.",  # what the agent read is in no turn
        f"Customer: {EDITED}\nAgent: {BETTER}\nAnn: Me too.\nAnn: Hello?",  # somebody else
        f"User: {EDITED}\nUser: it says\nUser name wrong\nBot: {BETTER}",  # a line of the text, or a turn
        "Ann: Where is it?\nBob: There.",
    ],
)
def test_a_text_that_may_be_no_conversation(text: str) -> None:
    with pytest.raises(RowRefused):
        read_conversation({"transcript": text})


def test_a_document_that_lists_conversations() -> None:
    talk = [{"role": "user", "content": EDITED}, {"role": "assistant", "content": BETTER}]
    record = {"conversations": [{"id": "1", "title": "New", "messages": talk}, {"id": "2", "messages": []}]}
    place = place_of_rows([record])
    assert place_name(place) == "conversations[]"
    assert said(split_record(record, place)[0]) == KEPT
    assert place_of_rows([{"conversation": talk}]) == ()  # a row is no list of rows


def test_a_file_of_messages_that_names_no_session(tmp_path: Path) -> None:
    talk = [{"role": role, "content": text} for role, text in KEPT]
    greeted = [{"role": "assistant", "content": "Hello."}, *talk, *talk]
    assert spoken(read_file(tmp_path, greeted)[0]) == [*KEPT, *KEPT]
    # two examples for a prompt, as far as anybody can tell
    assert [spoken(one) for one in read_file(tmp_path, [*talk, *talk], "examples.jsonl")] == ["one-message"] * 4


def test_a_text_with_marks_in_it_is_asked_about() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"id": "1", "text": "It is in Bonn today.", "entities": [{"start": 9, "label": "town"}]})


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def rows_of(path: Path) -> list[Any]:
    """What is said in each row of a file, with the number of calls, or why it is refused."""
    found: list[Any] = []
    for chunk in plan_inputs(str(path), path.parent).chunks:
        for raw in read_rows(chunk):
            try:
                said = read_example(raw, {}).example.messages
            except RowRefused as refused:
                found.append(refused.reason)
                continue
            check_messages(said)
            found.append([(m.role, m.content, len(m.tool_calls)) for m in said])
    return found


ASKS = {"role": "user", "content": "Where is it?"}
TOLD = [("user", "Where is it?", 0), ("assistant", "There.", 0)]


def test_a_call_that_holds_its_result() -> None:
    """The text of the turn was said when the call was done, unless the next turn goes on."""
    call = {"toolName": "look", "args": {"what": "it"}, "result": {"place": "there"}}
    turn = {"role": "assistant", "content": "There.", "toolCalls": [call]}
    called = [("user", "Where is it?", 0), ("assistant", "", 1), ("tool", '{"place": "there"}', 0)]
    assert told({"messages": [ASKS, turn]}) == [*called, ("assistant", "There.", 0)]
    first = {**turn, "content": "I will look."}
    after = {"role": "assistant", "content": "There."}
    went_on = [called[0], ("assistant", "I will look.", 1), called[2], ("assistant", "There.", 0)]
    assert told({"messages": [ASKS, first, after]}) == went_on
    assert told({"messages": [ASKS, {**after, "toolCalls": [{}]}]}) == TOLD  # a program's empty places
    with pytest.raises(RowRefused, match="bad-tool-call"):
        told({"messages": [ASKS, {**turn, "toolCalls": [call, {"toolName": "look", "args": {}}]}]})


def told(row: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(m.role, m.content, len(m.tool_calls)) for m in read_conversation(row).messages]


def test_events_of_openhands(tmp_path: Path) -> None:
    """One answer of a provider holds two calls; what the program says of its own state is no part of it."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "run", "arguments": f'{{"command": "ls {i}"}}'}}
        for i in range(2)
    ]
    response = {"id": "r1", "choices": [{"message": {"role": "assistant", "content": "I look.", "tool_calls": calls}}]}
    about = [{"function_name": "run", "tool_call_id": f"c{i}", "model_response": response} for i in range(2)]
    events = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "You are an agent."}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "Where is it?"}},
        {"id": 2, "source": "user", "action": "recall", "args": {"query": "Where is it?"}},
        {"id": 3, "source": "environment", "observation": "recall", "content": "Added context of the place"},
        *(
            {"id": 4 + i, "source": "agent", "action": "run", "args": {}, "tool_call_metadata": one}
            for i, one in enumerate(about)
        ),
        *(
            {"id": 6 + i, "source": "agent", "observation": "run", "content": f"file {i}", "tool_call_metadata": one}
            for i, one in enumerate(about)
        ),
        {"id": 8, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {}},
        {"id": 9, "source": "agent", "action": "finish", "args": {"final_thought": "There."}},
    ]
    said = [
        ("system", "You are an agent.", 0),
        ("user", "Where is it?", 0),
        ("assistant", "I look.", 2),
        ("tool", "file 0", 0),
        ("tool", "file 1", 0),
        ("assistant", "There.", 0),
    ]
    assert rows_of(written(tmp_path / "events.json", json.dumps(events))) == [said]
    row = {"instance_id": "a-1", "history": events, "instance": {"hints_text": "It was there before."}, "error": None}
    assert told({**row, "test_result": {"git_patch": "a patch of the file"}}) == said
    older = [
        {"source": "user", "action": "message", "args": {"content": "Where is it?"}},
        {"source": "agent", "action": "run", "args": {"command": "ls", "thought": "I look."}},
        {"source": "agent", "observation": "run", "content": "file 0"},
        {"source": "agent", "action": "message", "args": {"content": "There."}},
    ]
    assert told({"trajectory": older}) == [said[1], ("assistant", "I look.", 1), said[3], said[5]]


@pytest.mark.parametrize(
    ("name", "lines", "read"),
    [
        ("5.json", ["求助者：我很难过。", "支持者：为什么？"], True),
        ("5.json", [{"role": "client", "content": "I am sad."}, {"role": "counselor", "content": "Why?"}], True),
        ("chat_history.json", [ASKS, {"role": "assistant", "content": "There."}], True),
        ("rows.json", [ASKS, {"role": "assistant", "content": "There."}], False),  # examples for a prompt
        (
            "history.json",
            [{"type": "human", "data": {"content": "Who?"}}, {"type": "ai", "data": {"content": "I."}}],
            True,
        ),
    ],
)
def test_a_file_that_is_one_conversation(tmp_path: Path, name: str, lines: list[Any], read: bool) -> None:
    found = rows_of(written(tmp_path / name, json.dumps(lines, ensure_ascii=False)))
    if read:
        ((one, other),) = found
        assert (one[0], other[0]) == ("user", "assistant")
    else:
        assert found == ["one-message", "one-message"]


def test_turns_of_two_people_that_nobody_names() -> None:
    assert told({"dialog": "Where is it? __eou__ There. __eou__"}) == TOLD
    assert told({"dialog": ["Where is it?", "There.", "And that?"]}) == TOLD


def test_what_a_program_did_between_two_people() -> None:
    pairs = [["customer", "Where is it?"], ["action", "Account is shown"], ["agent", "There."]]
    found = read_conversation({"original": pairs})
    assert [(m.role, m.content) for m in found.messages] == [("user", "Where is it?"), ("assistant", "There.")]
    assert "program-notes" in found.changed


def test_columns_that_only_choose_and_lists_of_answers() -> None:
    asked = {"question": "Where is it?", "answer": "There."}
    assert told({**asked, "persona": "general", "sources_json": '["a page of the book"]'}) == TOLD
    (_, question, _), _ = told({**asked, "persona": "You are a guide of the old town."})
    assert "guide of the old town" in question  # written for the model, so given with the question
    several = {"question": "Where is it?", "answer": ["There.", "Here."]}
    with pytest.raises(RowRefused) as refused:
        told(several)
    assert "--columns prompt=question,completion=answer.0" in refused.value.hint
    mapped = map_columns(several, {"prompt": "question", "completion": "answer.0"})
    assert [m.content for m in read_conversation(mapped, mapped=True).messages] == ["Where is it?", "There."]


def test_completions_of_ai21() -> None:
    row = {"prompt": {"text": "Where is it?", "tokens": []}, "completions": [{"data": {"text": "There."}}]}
    assert told(row) == TOLD
    row["completions"][0]["finishReason"] = {"reason": "length"}  # type: ignore[index]
    with pytest.raises(RowRefused, match="cut-off-answer"):
        told(row)


def test_a_prompt_that_a_template_wrote_is_no_question() -> None:
    """Learned as it stands, the model would read its own answer before it gives it."""
    asked = "<start_of_turn>user\nWhere is it?<end_of_turn>\n<start_of_turn>model\n"
    row = {"instruction": "Where is it?", "input": "", "output": "There."}
    assert told({**row, "prompt": asked + "There.<end_of_turn>"}) == TOLD
    assert told({"prompt": asked, "completion": "There."}) == TOLD


def test_a_call_with_its_result_among_events(tmp_path: Path) -> None:
    events = [
        {"timestamp": "2026-01-01T10:00:00Z", "type": "user_message", "text": "Where is it?"},
        {
            "timestamp": "2026-01-01T10:00:01Z",
            "type": "mcp_call",
            "tool": "look",
            "arguments": {"a": "b"},
            "result": "x",
        },
        {"timestamp": "2026-01-01T10:00:02Z", "type": "assistant_message", "text": "There."},
    ]
    called = [TOLD[0], ("assistant", "", 1), ("tool", "x", 0), TOLD[1]]
    assert rows_of(written(tmp_path / "events.json", json.dumps(events))) == [called]
    with pytest.raises(RowRefused, match="one-message"):
        told(events[0])  # one message is no text to learn whole


TURNS = [ASKS, {"role": "assistant", "content": "There."}]
OTHERS = [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "It is she."}]


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"u1": TURNS, "u2": [], "u3": OTHERS}, "[]"),
        ({"a": {"title": "x", "messages": TURNS}, "b": {"title": "y", "messages": TURNS, "id": 1}}, "[]"),
        ({"sessions": [{"messages": TURNS}, *({"messages": []},) * 9]}, "sessions[]"),
        ({"questions": [{"question": "Where is it?", "answer": "There."}] * 2}, "questions[]"),
        ({f"Where is it, the {i}?": "It is over there." for i in range(4)}, "{questions}"),
        ({"name": "a b", "city": "c", "street": "d e", "note": "It was over there."}, ""),
    ],
)
def test_places_of_conversations(record: dict[str, Any], place: str) -> None:
    assert place_name(place_of_rows([record])) == place
    if place:
        assert read_conversation(split_record(record, place_of_rows([record]))[0]).messages[-1].role == "assistant"


def test_no_conversation_is_lost_below_numbered_names() -> None:
    """They were taken for names with one prefix, and without it all of them had one name."""
    with pytest.raises(RowRefused, match="unknown-layout"):
        told({"u1": TURNS, "u2": OTHERS})


def test_weak_names_of_answers() -> None:
    assert told({"question": "Where is it?", "friendlyBotReply": "There."}) == TOLD
    assert told({"issue_description": "Where is it?", "resolution": "There."}) == TOLD
    assert told({"ticket": "Where is it?", "category": "There."}) == TOLD
    with pytest.raises(RowRefused):
        told({"ticket": "Where is it?", "category": "There.", "priority": "high"})  # fields of a ticket


def test_a_log_may_begin_with_a_line_about_itself(tmp_path: Path) -> None:
    lines = [{"_type": "metadata", "created": "2026-01-01"}, *({**one, "timestamp": 1.0} for one in TURNS)]
    found = rows_of(written(tmp_path / "chat.jsonl", "\n".join(map(json.dumps, lines))))
    assert [(m[0], m[1]) for m in found[0]] == [("user", "Where is it?"), ("assistant", "There.")]


def test_messages_whose_columns_are_named_in_another_language_or_not_at_all(tmp_path: Path) -> None:
    for role, content in (("tipo", "mensagem"), ("rôle", "texte"), ("who_it_was", "what_it_was")):
        lines = [{"when": 1.0, role: one["role"], content: f"{one['content']} And why so?"} for one in TURNS * 3]
        for name, text in (("chat.json", json.dumps(lines)), ("chat.jsonl", "\n".join(map(json.dumps, lines)))):
            told_rows = rows_of(written(tmp_path / name, text))
            assert [(m[0], m[1]) for m in told_rows[0]] == [
                (m["role"], f"{m['content']} And why so?") for m in TURNS * 3
            ]


def test_a_row_that_is_a_list_of_lines() -> None:
    lines = ["Customer: Where is it?", None, "Salesman: At the depot."]
    found = read_example(RawRow("a:1", json.dumps(lines).encode()), {}).example
    assert [(m.role, m.content) for m in found.messages] == [("user", "Where is it?"), ("assistant", "At the depot.")]

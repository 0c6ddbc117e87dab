"""Every column that looks like content is in the conversation, or the row is refused with the column's name."""

import json
from typing import Any

import pytest

from hivetune.data.conversation import read_conversation
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused

PASSAGE = "The Seine flows through the middle of the city."
QUESTION, ANSWER = "Which river flows through Paris?", "The Seine."

# Rows in which something would be lost or learned wrongly if they were read: before, all were trained with exit 0.
ASKED_ABOUT: dict[str, tuple[dict[str, Any], str]] = {
    "prompt and text": ({"prompt": QUESTION, "text": ANSWER}, "prompt"),
    "a text with two classes": ({"text": PASSAGE, "sentiment": "positive", "emotion": "joy"}, "sentiment"),
    "a text with what its class is of": ({"text": PASSAGE, "label": "good", "aspect": "width"}, "label"),
    "a text with a translation": ({"text": PASSAGE, "german": "Die Seine fließt mitten durch die Stadt."}, "german"),
    "a text with code": ({"task_id": 2, "text": "Write a function.", "code": "def f(): ...", "test_list": []}, "code"),
    "choices of an exam": ({"question": QUESTION, "choices": ["Seine", "Rhine"], "answer": 0}, "choices"),
    "options in columns": ({"question": QUESTION, "option_a": "The river Seine", "answer": "A"}, "option_a"),
    "two answers": ({"prompt": QUESTION, "completion": ANSWER, "response": "It is the Rhine."}, "response"),
    "a passage beside a prompt and its input": ({"prompt": QUESTION, "input": PASSAGE, "response": ANSWER}, "input"),
    "documents beside messages": (
        {
            "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
            "documents": [{"title": "Seine", "text": PASSAGE}],
        },
        "documents",
    ),
    "the answer that was right": (
        {"question": QUESTION, "answer": "The Rhine.", "correct": "It is the Seine."},
        "correct",
    ),
    "what a span of a trace says beside its call": (
        {
            "span_attributes": {"type": "llm"},
            "input": [{"role": "user", "content": QUESTION}],
            "output": ANSWER,
            "passage": PASSAGE,
        },
        "passage",
    ),
    "a second system prompt": (
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": ANSWER},
            ],
            "rules": "Never name a river without its length.",
        },
        "rules",
    ),
    "Chinese": ({"prompt": QUESTION, "completion": ANSWER, "备注说明": "塞纳河流经巴黎市中心很长"}, "备注说明"),
}


@pytest.mark.parametrize("name", ASKED_ABOUT)
def test_a_column_that_nobody_explains_is_asked_about(name: str) -> None:
    row, column = ASKED_ABOUT[name]
    with pytest.raises(RowRefused) as refused:
        read_conversation(row)
    assert refused.value.reason == "unexplained-column"
    assert f"'{column}'" in refused.value.hint
    assert "--columns" in refused.value.hint


SPLIT = [("user", QUESTION), ("assistant", ANSWER)]
USABLE: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "instruction, response": ({"instruction": QUESTION, "response": ANSWER}, SPLIT),
    "instruction, context, response, category": (
        {"instruction": QUESTION, "context": PASSAGE, "response": ANSWER, "category": "closed_qa"},
        [("user", f"{QUESTION}\n{PASSAGE}"), ("assistant", ANSWER)],
    ),
    "question, response": ({"id": "flan.1", "system_prompt": "", "question": QUESTION, "response": ANSWER}, SPLIT),
    "query, response": ({"query": QUESTION, "response": ANSWER, "type": "GSM_Rephrased"}, SPLIT),
    "question, context, answer": (
        {"question": QUESTION, "context": PASSAGE, "answer": ANSWER},
        [("user", f"{QUESTION}\n{PASSAGE}"), ("assistant", ANSWER)],
    ),
    "inputs, targets": ({"inputs": QUESTION, "targets": ANSWER, "language": "English"}, SPLIT),
    "problem, solution": ({"lang": "en", "problem": QUESTION, "solution": ANSWER}, SPLIT),
    "user, assistant": ({"system": "", "user": QUESTION, "assistant": ANSWER}, SPLIT),
    "capitals": ({"Question": QUESTION, "Response": ANSWER}, SPLIT),
    "camels": ({"userPrompt": QUESTION, "modelOutput": ANSWER, "createdAt": "2024-01-01"}, SPLIT),
    "a prompt that is there twice": (
        {
            "prompt": QUESTION,
            "prompt_id": "f0",
            "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
        },
        SPLIT,
    ),
    "the row as one text beside it": (
        {"instruction": QUESTION, "input": "", "output": ANSWER, "text": f"### Ask:\n{QUESTION}\n### Say:\n{ANSWER}"},
        SPLIT,
    ),
    "scores, ids and headers": (
        {
            "conversation_id": "a",
            "conversation": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
            "header": {"user-agent": "Mozilla/5.0 (X11; Linux) Gecko Firefox"},
            "openai_moderation": [{"flagged": False, "categories": {"hate": False}}],
            "language": "English",
            "helpfulness": 4,
        },
        SPLIT,
    ),
    "an answer that is JSON": (
        {"prompt": "Give the river as JSON.", "completion": '{"response": "Seine"}'},
        [("user", "Give the river as JSON."), ("assistant", '{"response": "Seine"}')],
    ),
    "an answer that is a JSON list": (
        {"instruction": "List the rivers.", "input": "", "output": '[{"name": "Seine"}]'},
        [("user", "List the rivers."), ("assistant", '[{"name": "Seine"}]')],
    ),
    "an answer in a list that is JSON": (
        {"messages": [{"role": "user", "content": QUESTION}], "response": '{"message": {"content": 1}}'},
        [("user", QUESTION), ("assistant", '{"message": {"content": 1}}')],
    ),
    "texts in turn": ({"id": "0", "data": [QUESTION, ANSWER]}, SPLIT),
    "turns with both sides": ({"conversation": [{"input": QUESTION, "output": ANSWER}], "source": "x"}, SPLIT),
    "a document with its origin": (
        {"text": PASSAGE, "url": "https://example.org/a b c", "timestamp": "2020-01-01", "title": "The Seine in Paris"},
        [("assistant", PASSAGE)],
    ),
    "roles in capitals": (
        {"messages": [{"role": "User", "content": QUESTION}, {"role": "AI", "content": ANSWER}]},
        SPLIT,
    ),
    "the model's role": (
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "model", "content": ANSWER}]},
        SPLIT,
    ),
}


@pytest.mark.parametrize("name", USABLE)
def test_rows_that_are_fine_are_read(name: str) -> None:
    row, expected = USABLE[name]
    assert [(m.role, m.content) for m in read_conversation(row).messages] == expected


def test_a_question_with_its_calls() -> None:
    row = {
        "id": 1,
        "query": "Where is it raining?",
        "tools": json.dumps([{"name": "rain", "description": "Rain", "parameters": {"area": {"type": "str"}}}]),
        "answers": json.dumps([{"name": "rain", "arguments": {"area": "here"}}]),
    }
    found = read_conversation(row)
    assert [m.role for m in found.messages] == ["user", "assistant"]
    assert found.messages[1].tool_calls[0]["function"] == {"name": "rain", "arguments": {"area": "here"}}
    assert found.tools[0]["function"]["name"] == "rain"


def test_thoughts_in_a_column_of_their_own() -> None:
    found = read_conversation({"Question": QUESTION, "Complex_CoT": "Paris lies on it.", "Response": ANSWER})
    assert (found.messages[1].reasoning, found.messages[1].content) == ("Paris lies on it.", ANSWER)


def test_who_names_the_columns_is_taken_at_their_word() -> None:
    row = {"wording": "It was asked in May.", "question": QUESTION, "answer": ANSWER, "userId": "u"}
    raw = RawRow("f:1", json.dumps(row).encode())
    with pytest.raises(RowRefused):
        read_example(raw, {"session": "userId"})
    found = read_example(raw, {"prompt": "question", "completion": "answer"})
    assert [m.content for m in found.example.messages] == [QUESTION, ANSWER]
    assert read_example(RawRow("f:1", b'{"text": "a", "label": 1}'), {"text": "text"}).layout == "text"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"messages": [{"role": "user", "content": "q"}], "chosen": [{"role": "assistant"}], "rejected": [{}]},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"value": "a"}, "rejected": {"value": "b"}},
        {"question": "q", "chosen_response": "a", "rejected_response": "b"},
    ],
)
def test_preferences_are_named_as_such(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation(row)
    assert refused.value.reason == "preference-row"
    assert "chosen" in refused.value.hint


def turns(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def test_turns_are_put_in_order_and_it_is_said() -> None:
    found = read_conversation(turns(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")))
    assert [(m.role, m.content) for m in found.messages] == [("user", "a\n\nb"), ("assistant", "c\n\nd")]
    assert found.changed == ("merged-turns",)
    found = read_conversation(turns(("assistant", "Welcome!"), ("user", "a"), ("assistant", "c"), ("user", "d")))
    assert [(m.role, m.content) for m in found.messages] == [("user", "a"), ("assistant", "c")]
    assert set(found.changed) == {"leading-answer", "trailing-turns"}
    twice = read_conversation(turns(("user", "a"), ("assistant", "c"), ("assistant", "c")))
    assert twice.messages[-1].content == "c"


def test_turns_with_different_weights_and_open_calls_are_not_joined() -> None:
    row = turns(("user", "a"), ("assistant", "b"), ("assistant", "c"))
    row["messages"][1]["weight"] = 0
    assert len(read_conversation(row).messages) == 3
    row = turns(("user", "a"), ("assistant", ""), ("assistant", "c"))
    row["messages"][1]["tool_calls"] = [{"function": {"name": "ls", "arguments": "{}"}}]
    assert len(read_conversation(row).messages) == 3


def test_an_answer_without_a_question_is_no_text() -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation(turns(("system", "s"), ("assistant", "b")))
    assert refused.value.reason == "role-order"


@pytest.mark.parametrize(
    ("row", "session", "user"),
    [
        ({"sessionId": "s", "userId": "u"}, "s", "u"),
        ({"conversationId": 7.0, "user_id": 3.0}, "7", "3"),
        ({"trace_id": "t", "metadata": {"userId": "u"}}, "t", "u"),
        ({"session": {"id": "s"}, "user": {"id": "u", "name": "n"}}, "s", "u"),
        ({"Session ID": "s", "User-ID": "u"}, "s", "u"),
        ({"attributes": {"session.id": "s", "enduser.id": "u"}}, "s", "u"),
        ({"info": {"user": "u"}, "threadId": {"$oid": "5f"}}, "5f", "u"),
        ({"conversation_id": 12.5, "user": None}, "12.5", None),
    ],
)
def test_ids_under_the_names_that_programs_give_them(row: dict[str, Any], session: str, user: str | None) -> None:
    example = read_example(RawRow("f:1", json.dumps({"prompt": "q", "completion": "a", **row}).encode()), {}).example
    assert (example.session, example.user) == (session, user)


def test_what_a_user_said_is_not_who_they_are() -> None:
    row = {"user": QUESTION, "assistant": ANSWER, "session_id": "s"}
    example = read_example(RawRow("f:1", json.dumps(row).encode()), {}).example
    assert (example.session, example.user) == ("s", None)


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nWhich river?<|im_end|>\n<|im_start|>assistant\nThe Seine.<|im_end|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhich river?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nThe Seine.<|eot_id|>",
    ],
)
def test_a_text_that_is_a_chat_is_read_as_one(text: str) -> None:
    found = read_conversation({"text": text})
    assert [(m.role, m.content) for m in found.messages] == [("user", "Which river?"), ("assistant", "The Seine.")]
    assert found.changed == ("turns-from-text",)


@pytest.mark.parametrize(
    "text",
    [
        "<s>[INST] Which river? [/INST] The Seine.</s>",
        "<start_of_turn>user\nWhich river?<end_of_turn>\n<start_of_turn>model\nThe Seine.<end_of_turn>",
        "<|im_start|>user\na<|im_end|> stray <|im_start|>assistant\nb<|im_end|>",
        "text before [INST] a [/INST] b",
    ],
)
def test_a_text_with_marks_that_cannot_be_told_apart_is_refused(text: str) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation({"text": text})
    assert refused.value.reason == "rendered-text"


@pytest.mark.parametrize(
    "text",
    [
        "User: the manual of our device",
        "He said: User: no",
        "plain words",
        "# How to ask\n### Question: one?\n### Answer: two.",
        "Q: one?\nA: two.\nQ: three?\nA: four.",
        "Some words.\nQuestion: one?\nAnswer: two.",
        "Question: what is the answer: one or two?",
        "<html>one</html>\n<body>two</body>",
    ],
)
def test_documents_stay_documents(text: str) -> None:
    assert [(m.role, m.content) for m in read_conversation({"text": text}).messages] == [("assistant", text)]


@pytest.mark.parametrize("names", [("tool", "args"), ("tool_name", "tool_input"), ("function_name", "arguments")])
def test_a_call_in_two_columns_is_the_answer(names: tuple[str, str]) -> None:
    name, arguments = names
    said = read_conversation({"prompt": QUESTION, name: "map", arguments: {"river": "Seine"}})
    assert said.messages[-1].tool_calls[0]["function"] == {"name": "map", "arguments": {"river": "Seine"}}


def test_a_preference_row_in_a_trace_is_named_as_such() -> None:
    row = {"span_attributes": {"type": "llm"}, "input": QUESTION, "output": ANSWER, "chosen": ANSWER, "rejected": "No."}
    with pytest.raises(RowRefused, match="preference-row"):
        read_conversation(row)

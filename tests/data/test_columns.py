"""Rows by the exact names of their columns, the facts beside them, and turns in an order that templates know."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.columns import extract
from hivetune.data.formats import read_conversation
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused

QUESTION, ANSWER = "Which river flows through Paris?", "The Seine."
SPLIT = [("user", QUESTION), ("assistant", ANSWER)]
USABLE: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "instruction, response": ({"instruction": QUESTION, "response": ANSWER}, SPLIT),
    "instruction, context, response": (
        {"instruction": QUESTION, "context": "A map.", "response": ANSWER},
        [("user", f"{QUESTION}\nA map."), ("assistant", ANSWER)],
    ),
    "an instruction without an input": ({"instruction": QUESTION, "input": "<noinput>", "output": ANSWER}, SPLIT),
    "question, response": ({"system_prompt": "", "question": QUESTION, "response": ANSWER}, SPLIT),
    "problem, solution": ({"problem": QUESTION, "solution": ANSWER}, SPLIT),
    "inputs, targets": ({"inputs": QUESTION, "targets": ANSWER}, SPLIT),
    "user, assistant": ({"system": "", "user": QUESTION, "assistant": ANSWER}, SPLIT),
    "capitals": ({"Question": QUESTION, "Response": ANSWER}, SPLIT),
    "an answer that is JSON": (
        {"prompt": "As JSON.", "completion": '[{"name": "Seine", "type": "river"}]'},
        [("user", "As JSON."), ("assistant", '[{"name": "Seine", "type": "river"}]')],
    ),
    "an answer beside messages": ({"messages": [{"role": "user", "content": QUESTION}], "response": ANSWER}, SPLIT),
    "roles in capitals": (
        {"messages": [{"role": "User", "content": QUESTION}, {"role": "AI", "content": ANSWER}]},
        SPLIT,
    ),
}


@pytest.mark.parametrize("name", USABLE)
def test_rows_of_published_names_are_read(name: str) -> None:
    row, expected = USABLE[name]
    assert [(m.role, m.content) for m in read_conversation(row).messages] == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"frage": QUESTION, "antwort": ANSWER}, "unknown-layout"),
        ({"prompt": QUESTION, "chosen": ANSWER, "rejected": "The Rhine."}, "preference-row"),
        ({"prompt": QUESTION, "completion": ANSWER, "image": "a.png"}, "unsupported-content"),
        ({"question": QUESTION, "answer": ["The Seine", "Seine"]}, "wrong-type"),
        ({"role": "user", "content": QUESTION}, "one-message"),
        ({"text": "<s>[INST] Which river? [/INST] The Seine.</s>"}, "rendered-text"),
        ({"text": "<|im_start|>user\na<|im_end|> stray <|im_start|>assistant\nb<|im_end|>"}, "rendered-text"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}]}, "role-order"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation(row)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nWhich river?<|im_end|>\n<|im_start|>assistant\nThe Seine.<|im_end|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhich river?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nThe Seine.<|eot_id|>",
    ],
)
def test_exact_chatml_and_llama_3_are_read_as_turns(text: str) -> None:
    found = read_conversation({"text": text})
    assert [(m.role, m.content) for m in found.messages] == [("user", "Which river?"), ("assistant", "The Seine.")]
    assert found.changed == ("turns-from-text",)


def turns(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def test_turns_are_put_in_order_and_it_is_said() -> None:
    found = read_conversation(turns(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")))
    assert [(m.role, m.content) for m in found.messages] == [("user", "a\n\nb"), ("assistant", "c\n\nd")]
    assert found.changed == ("merged-turns",)
    found = read_conversation(turns(("assistant", "Welcome!"), ("user", "a"), ("assistant", "c"), ("user", "d")))
    assert [(m.role, m.content) for m in found.messages] == [("user", "a"), ("assistant", "c")]
    assert set(found.changed) == {"leading-answer", "trailing-turns"}


def test_turns_with_different_weights_and_open_calls_are_not_joined() -> None:
    row = turns(("user", "a"), ("assistant", "b"), ("assistant", "c"))
    row["messages"][1]["weight"] = 0
    assert len(read_conversation(row).messages) == 3
    row = turns(("user", "a"), ("assistant", ""), ("assistant", "c"))
    row["messages"][1]["tool_calls"] = [{"function": {"name": "ls", "arguments": "{}"}}]
    assert len(read_conversation(row).messages) == 3


@pytest.mark.parametrize(
    ("row", "session", "user"),
    [
        ({"sessionId": "s", "userId": "u"}, "s", "u"),
        ({"conversationId": 7.0, "user_id": 3.0}, "7", "3"),
        ({"trace_id": "t", "metadata": {"userId": "u"}}, "t", "u"),
        ({"session": {"id": "s"}, "user": {"id": "u", "name": "n"}}, "s", "u"),
        ({"Session ID": "s", "User-ID": "u"}, "s", "u"),
        ({"info": {"user": "u"}, "threadId": {"$oid": "5f"}}, "5f", "u"),
        ({"conversation_id": 12.5, "user": None}, "12.5", None),
        ({"user": QUESTION, "assistant": ANSWER, "session_id": "s"}, "s", None),
    ],
)
def test_ids_under_the_names_that_programs_give_them(row: dict[str, Any], session: str, user: str | None) -> None:
    fields = extract(row)
    assert (fields.session, fields.user) == (session, user)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (
            [{"frage": f"Wo ist {n}?", "antwort": f"In {n}."} for n in range(6)],
            {"prompt": "frage", "completion": "antwort"},
        ),
        (
            [{"subject": f"Lift {n} stands", "resolution": f"Door {n} freed", "id": n} for n in range(6)],
            {"prompt": "subject", "completion": "resolution"},
        ),
        (
            [
                {"talk": [{"who": "Ana", "words": f"Where is {n}?"}, {"who": "Ben", "words": "There."}]}
                for n in range(6)
            ],
            {"messages": "talk", "role": "who", "text": "words", "assistant": "Ben"},
        ),
        (
            [{"items": [{"q": f"Where is {n}{k}?", "a": f"In {n}{k}."} for k in range(2)]} for n in range(3)],
            {"rows": "items[]", "prompt": "q", "completion": "a"},
        ),
    ],
)
def test_an_unknown_table_needs_the_one_line_that_is_printed(
    rows: list[dict[str, Any]], columns: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = check(DataConfig(path=str(path))).document
    assert document["usable"] == 0
    assert document["unclear"][str(path)][0]["columns"] == columns
    assert document["unclear"][str(path)][0]["line"] in document["problems"][0]["hint"]
    assert not check(DataConfig(path=str(path), columns=columns)).document["rejected"]

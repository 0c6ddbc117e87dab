"""Parts of turns, and conversations of sessions and help desks: what a row says of itself is not believed."""

from typing import Any

import pytest

from hivetune.data.formats import read_conversation
from hivetune.data.pieces.answers import read_answer, refuse_pieces
from hivetune.data.pieces.sessions import read_session, without_markup
from hivetune.data.pieces.turns import read_messages, read_turn
from hivetune.data.reasons import RowRefused


def test_a_row_cannot_name_a_reason_that_nobody_knows() -> None:
    """The report looks up the meaning of each reason; an unknown one ended the check as a bug."""
    turns = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "In Bonn."}]
    read = read_session({"hivetune_session": "x", "messages": turns, "left_out": ["unheard", ["a"], "program-notes"]})
    assert read.changed == ("program-notes",)


def test_text_with_signs_that_are_no_tags_stays() -> None:
    assert without_markup("if a < b and c > d, use <stdio.h>") == "if a < b and c > d, use <stdio.h>"
    assert without_markup("<p>a &lt; b</p><p>c</p>") == "a < b\nc"


@pytest.mark.parametrize("mark", ["weight", "train", "trainable", "loss_weight"])
def test_a_turn_that_is_marked_is_read_and_not_learned(mark: str) -> None:
    for value in (0, 0.0, False):
        assert read_turn({"role": "assistant", "content": "In Bonn.", mark: value})[0].weight == 0
    assert read_turn({"role": "assistant", "content": "In Bonn.", mark: 1})[0].weight == 1


@pytest.mark.parametrize("key", ["content", "output", "result", "response", "tool_result"])
def test_the_result_of_a_tool_under_each_name(key: str) -> None:
    """A result whose name is not known is empty, and an answer to nothing would be learned."""
    [read] = read_messages(
        [{"role": "tool", "content": [{"type": "tool_result", "tool_call_id": "c", key: "9"}]}], None
    )
    assert (read.content, read.tool_call_id) == ("9", "c")


def test_what_is_said_behind_a_result_is_a_message_of_its_own() -> None:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {"at": "sky"}}
    parts = [{"type": "text", "text": "I look."}, call, {"type": "tool_result", "tool_use_id": "c", "content": "blue"}]
    read = read_turn({"role": "assistant", "content": [*parts, {"type": "text", "text": "It is blue."}]})
    assert [(m.role, m.content, len(m.tool_calls)) for m in read] == [
        ("assistant", "I look.", 1),
        ("tool", "blue", 0),
        ("assistant", "It is blue.", 0),
    ]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"content": "Behind the", "stop_type": "limit"}, "cut-off-answer"),
        ({"candidates": [{"content": {"parts": [{"text": "a"}]}, "finishReason": "SAFETY"}]}, "failed"),
        ({"candidates": [{"content": {"parts": [{"inlineData": {"data": "x"}}]}}]}, "unsupported-content"),
        ({"error": {"message": "busy"}}, "failed"),
        ({"choices": []}, "no-answer"),
        ({"words": 1}, "unknown-layout"),
    ],
)
def test_an_answer_that_nobody_should_learn(response: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused) as refused:
        read_answer(response)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        "data: Behind \ndata: the library.\n",
        '{"m": "a", "done": false}\n{"done": true}',
        '{"type": "message_start", "message": {}}\n{"type": "ping"}\n{"type": "message_stop"}',
    ],
)
def test_the_pieces_of_an_unknown_stream_are_no_answer(text: str) -> None:
    with pytest.raises(RowRefused):
        refuse_pieces(text)
    for answer in ("data: a", "id: 5\nname: b", '{"a": 1}\n{"a": 2}'):
        refuse_pieces(answer)


@pytest.mark.parametrize("body", ["base64:AAAAQAAA", "event: ping", "Behind the library."])
def test_a_recorded_body_that_is_no_object_is_no_answer(body: str) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation(
            {"request": {"messages": [{"role": "user", "content": "Where?"}]}, "response": {"body": body}}
        )
    assert refused.value.reason == "unknown-layout"

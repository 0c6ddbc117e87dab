"""Each check refuses what it names and leaves real text alone."""

from collections.abc import Sequence
from dataclasses import replace
from pydoc_data.topics import topics

import pytest

from hivetune.data.checks.rules import check_messages, check_roles, control_token_check, has_mojibake
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def turns(roles: str) -> tuple[Message, ...]:
    """s u a t: one message each; A is an answer that calls a tool."""
    names = {"s": "system", "u": "user", "a": "assistant", "A": "assistant", "t": "tool"}
    call = ({"function": {"name": "f", "arguments": {}}},)
    return tuple(Message(names[r], f"text {i}", tool_calls=call if r == "A" else ()) for i, r in enumerate(roles))  # type: ignore[arg-type]


def test_what_a_tool_printed_is_read_as_it_is() -> None:
    user, call, result, answer = turns("uAta")
    check_messages([user, call, replace(result, content="half \ufffd"), answer])
    with pytest.raises(RowRefused):
        check_messages([user, call, result, replace(answer, content="half \ufffd")])


@pytest.mark.parametrize("roles", ["ua", "sua", "uaua", "uAta", "suAtAta", "uAtta", "a", "uasua", "usa", "ssua"])
def test_orders_that_conversations_have(roles: str) -> None:
    check_roles(turns(roles))


REFUSED = {
    "role-order": ("uu", "uaa", "au", "sa", "uas", "suasa", "uata", "ut", "uau", "uAt"),
    "empty-turn": ("", "u", "su"),
}


@pytest.mark.parametrize(("reason", "roles"), [(reason, one) for reason, some in REFUSED.items() for one in some])
def test_orders_that_they_have_not(reason: str, roles: str) -> None:
    with pytest.raises(RowRefused) as refused:
        check_roles(turns(roles))
    assert refused.value.reason == reason


def test_a_tools_answer_without_a_call_says_where_the_call_belongs() -> None:
    with pytest.raises(RowRefused) as refused:
        check_roles(turns("uata"))
    assert refused.value.hint == "message 3: tool after assistant, which has no tool_calls: write the call there"


def refused(messages: Sequence[Message]) -> str | None:
    try:
        check_messages(messages)
    except RowRefused as error:
        return error.reason
    return None


def test_no_check_fires_on_the_language_reference() -> None:
    """Every page of Python's language reference as an answer: grammar, tables, code, quotes of all kinds."""
    found = {name: refused((Message("user", name), Message("assistant", text))) for name, text in topics.items()}
    assert {name: reason for name, reason in found.items() if reason} == {}


def test_control_tokens_in_text_and_in_calls() -> None:
    check = control_token_check(["<|end|>", "<s>"])
    check((Message("user", "if a <s b and <|en|>"),))
    with pytest.raises(RowRefused, match="control-token"):
        check((Message("user", "a<|end|>b"),))
    with pytest.raises(RowRefused, match="control-token"):
        call = {"function": {"name": "f", "arguments": {"x": ["<s>"]}}}
        check((Message("assistant", "", tool_calls=(call,)),))
    control_token_check([])((Message("user", "anything"),))


def test_answers_that_look_odd_are_answers() -> None:
    """A zero matrix, an unchanged sentence, a tag in a text: no check knows better than who asked."""
    zeros = "\n".join(["0 0 0 0 0 0 0 0 0 0"] * 20)
    for asked, answer in (("A zero matrix", zeros), ("Correct: It is so.", "It is so."), ("7", "49"), ("?", "TBD")):
        assert refused([Message("user", asked), Message("assistant", answer)]) is None


def test_wrongly_decoded_text_is_counted() -> None:
    for text, wrong in (
        ("caf\u00c3\u00a9", True),
        ("don\u00e2\u20ac\u2122t", True),
        ("CAF\u00c9 \u00e0 S\u00c3O", False),
    ):
        messages = [Message("user", "?"), Message("assistant", text)]
        assert has_mojibake(messages) is wrong and refused(messages) is None

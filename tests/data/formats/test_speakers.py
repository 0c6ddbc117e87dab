"""Conversations that name their speakers: the user says once who answers."""

import json

import pytest

from hivetune.data.pieces.sessions import conversation
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused


def talk(*turns: tuple[str, str]) -> RawRow:
    turned = [{"speaker": speaker, "content": text} for speaker, text in turns]
    return RawRow("talk:1", str(conversation("slack", turned)).encode())


PAIR = talk(("Ana", "Where is it?"), ("Ben", "In Bonn."), ("Ana", "Thanks."))


def test_who_answers_is_named_once() -> None:
    said = read_example(PAIR, {"assistant": "Ben"}).example.messages
    assert [(m.role, m.content) for m in said] == [("user", "Where is it?"), ("assistant", "In Bonn.")]


def test_without_a_name_the_speakers_are_told() -> None:
    for columns in ({}, {"assistant": "Bert"}):
        with pytest.raises(RowRefused, match="who-answers") as refused:
            read_example(PAIR, columns)
        assert refused.value.hint == "Ana (2), Ben (1): say who answers, as in --columns assistant=Ben"


def test_of_several_who_ask_each_keeps_the_name() -> None:
    raw = talk(("Ana", "Where?"), ("Cem", "And when?"), ("Ben", "In Bonn, at noon."))
    said = read_example(raw, {"assistant": "Ben"}).example.messages
    assert [m.content for m in said] == ["Ana: Where?\n\nCem: And when?", "In Bonn, at noon."]
    assert json.loads(raw.payload)["hivetune_session"] == "slack"

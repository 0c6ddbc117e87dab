"""Exports of help desks: who asked, who answered, what nobody but the desk was to read."""

from typing import Any

import pytest
from data.rows.find.parcel_talk import columns_for

from hivetune.data.pieces.markup import without_markup
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.layouts.table import read_layout


def part(kind: str, body: str | None, part_type: str = "comment") -> dict[str, Any]:
    return {"part_type": part_type, "body": body, "author": {"type": kind, "name": "Somebody", "email": "a@b.example"}}


def intercom(*parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "conversation",
        "id": "7",
        "title": "A title of four words",
        "source": {"body": "<p>Where is<br>it?</p>", "author": {"type": "user", "name": "Ana"}, "subject": ""},
        "conversation_parts": {"conversation_parts": list(parts), "total_count": len(parts)},
    }


def test_intercom_without_its_notes_and_tags() -> None:
    row = intercom(
        part("bot", "<p>A person answers soon.</p>"),
        part("admin", None, "assignment"),
        part("admin", "<p>third one this week</p>", "note"),
        part("admin", "<p>Here &amp; there.</p>"),
        part("user", "<p>Thanks!</p>"),
    )
    said = read_layout(row)
    assert [(m.role, m.content, m.weight) for m in said.messages] == [
        ("user", "Where is\nit?", 1.0),
        ("assistant", "A person answers soon.", 0.0),
        ("assistant", "Here & there.", 1.0),
    ]
    assert (said.layout, said.changed) == ("intercom", ("internal-notes", "markup", "trailing-turns"))


def test_intercom_that_cannot_be_learned() -> None:
    with pytest.raises(RowRefused, match="no-answer"):
        read_layout(intercom(part("user", "<p>Hello?</p>")))
    with pytest.raises(RowRefused, match="unsupported-content"):
        read_layout(intercom(part("admin", '<p><img src="x.png"></p>')))
    with pytest.raises(RowRefused, match="unknown-role"):
        read_layout(intercom(part("operator-7", "<p>Hello.</p>")))


def test_zendesk_by_who_requested() -> None:
    comments = [
        {"author_id": 5, "body": "Where is it?", "html_body": "<div>Where is it?</div>", "public": True},
        {"author_id": 9, "body": "ask Tom", "public": False},
        {"author_id": 9, "body": "Here.", "public": True},
    ]
    row = {
        "id": 1,
        "subject": "where it is now",
        "description": "Where is it?",
        "requester_id": 5,
        "comments": comments,
    }
    said = read_layout(row)
    assert [(m.role, m.content) for m in said.messages] == [("user", "Where is it?"), ("assistant", "Here.")]
    assert said.changed == ("internal-notes", "markup")


def test_text_with_signs_that_are_no_tags_stays() -> None:
    assert without_markup("if a < b and c > d, use <stdio.h>") == "if a < b and c > d, use <stdio.h>"
    assert without_markup("<p>a &lt; b</p><p>c</p>") == "a < b\nc"


def test_the_advice_never_swaps_who_is_known() -> None:
    turns = [{"who": who, "text": f"some words that {who} said"} for who in ("staff", "user", "staff")]
    found = columns_for({"log": turns})
    assert found is None or found["user_role"] == "user"

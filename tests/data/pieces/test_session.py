"""Conversations of sessions and help desks: what a row says of itself is not believed; messages in HTML are texts."""

from hivetune.data.pieces.session import read_session, without_markup


def test_a_row_cannot_name_a_reason_that_nobody_knows() -> None:
    """The report looks up the meaning of each reason; an unknown one ended the check as a bug."""
    turns = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "In Bonn."}]
    read = read_session({"hivetune_session": "x", "messages": turns, "left_out": ["unheard", ["a"], "program-notes"]})
    assert read.changed == ("program-notes",)


def test_text_with_signs_that_are_no_tags_stays() -> None:
    assert without_markup("if a < b and c > d, use <stdio.h>") == "if a < b and c > d, use <stdio.h>"
    assert without_markup("<p>a &lt; b</p><p>c</p>") == "a < b\nc"

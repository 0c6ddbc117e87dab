"""Columns that the user names: several of them as one side of a conversation, and what is no text as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.mapping import check_columns, parse_columns, write_columns
from hivetune.data.prepare.prepare import check
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, UsageError

TICKET = {
    "title": "Lift",
    "ticket": "The lift of house 4 stands still.",
    "category": "lift",
    "priority": 2,
    "urgent": True,
    "parts": ["door", "motor"],
    "at": {"house": 4, "floor": None},
}


def pair(row: dict[str, Any], **columns: str) -> tuple[str, str]:
    asked, answered = read_example(RawRow("a:1", json.dumps(row).encode()), columns).example.messages
    assert (asked.role, answered.role) == ("user", "assistant")
    return asked.content, answered.content


def refused(row: dict[str, Any], **columns: str) -> RowRefused:
    with pytest.raises(RowRefused) as caught:
        pair(row, **columns)
    return caught.value


def test_several_columns_are_no_answer() -> None:
    several = refused(TICKET, prompt="ticket", completion="category+priority")
    assert several.reason == "unknown-layout"
    assert several.hint.startswith("the row has no column 'category+priority'; ")
    chosen = "{category: category, priority: priority}"
    assert pair(TICKET, prompt="ticket", completion=chosen)[1] == '{"category": "lift", "priority": 2}', "JMESPath"


def test_several_columns_are_one_question() -> None:
    asked, answered = pair(TICKET, prompt="title+ticket+parts", completion="category")
    assert asked == 'title: Lift\nticket: The lift of house 4 stands still.\nparts: ["door", "motor"]'
    assert answered == "lift"
    untitled = {**TICKET, "title": ""}
    assert pair(untitled, prompt="title+ticket", completion="category")[0] == f"ticket: {TICKET['ticket']}"


def test_a_column_that_is_really_called_so_goes_first() -> None:
    row = {"ticket": TICKET["ticket"], "name": "Ada", "team": "lifts", "name+team": "Ada of the lifts"}
    assert pair(row, prompt="ticket", completion="name+team")[1] == "Ada of the lifts"


def test_what_is_no_text_is_an_answer_as_json() -> None:
    assert pair(TICKET, prompt="ticket", completion="at")[1] == '{"house": 4, "floor": null}'
    assert pair(TICKET, prompt="ticket", completion="to_string(urgent)")[1] == "true"
    said = {"said": {"text": "It stands still.", "house": 4}, "category": "lift"}
    assert json.loads(pair(said, prompt="said", completion="category")[0]) == said["said"]
    message = refused(TICKET, prompt="ticket", completion="parts")
    assert message.hint == "completion holds 2 texts: --columns completion=completion[0] learns the first"


def test_a_column_that_is_not_there_is_named() -> None:
    missing = refused(TICKET, prompt="ticket+titel", completion="category")
    assert (missing.reason, missing.hint) == (
        "unknown-layout",
        "the row has no column 'titel'; did you mean 'title'?",
    )
    empty = {**TICKET, "category": None, "parts": ""}
    assert refused(empty, prompt="ticket", completion="category").reason == "empty-turn"
    assert refused({**TICKET, "title": "", "ticket": ""}, prompt="title+ticket", completion="category").reason == (
        "empty-turn"
    )


THREAD = {
    "thread": [
        {"author": "Ana", "body": "Where is it?"},
        {"author": "Desk", "body": "In Bonn."},
        {"author": "Cem", "body": "Thanks."},
        {"author": "Desk", "body": "Gladly."},
    ],
    "state": {"outcome": "Resolved"},
}


def said(row: dict[str, Any], **columns: str) -> list[tuple[str, str]]:
    example = read_example(RawRow("a:1", json.dumps(row).encode()), columns).example
    return [(message.role, message.content) for message in example.messages]


def test_a_list_of_turns_with_its_fields_and_who_answers() -> None:
    columns = {"messages": "thread", "role": "author", "text": "body"}
    assert said(THREAD, **columns, assistant="Desk") == [
        ("user", "Ana: Where is it?"),
        ("assistant", "In Bonn."),
        ("user", "Cem: Thanks."),
        ("assistant", "Gladly."),
    ]
    for more in ({}, {"assistant": "Dask"}):
        with pytest.raises(RowRefused) as refused:
            said(THREAD, **columns, **more)
        assert refused.value.reason == "who-answers"
        assert refused.value.hint.endswith("say who answers, as in --columns assistant=Desk")


def test_a_filter_a_constant_and_paths() -> None:
    columns = {"prompt": "thread[0].body", "completion": "thread[1].body", "where": "state.outcome=resolved"}
    found = said(THREAD, **columns, system="'Answer in one sentence.'")
    assert found == [("system", "Answer in one sentence."), ("user", "Where is it?"), ("assistant", "In Bonn.")]
    with pytest.raises(RowRefused, match="filtered"):
        said(THREAD, **{**columns, "where": "state.outcome=open"})


def test_rows_inside_of_records_need_no_other_column(tmp_path: Path) -> None:
    """The place of the rows was ignored where it was named alone, and a place without rows was: the record was read."""
    path = tmp_path / "records.jsonl"
    pairs = [{"prompt": f"asked {n}", "completion": f"answered {n}"} for n in range(4)]
    records = [{"items": pairs[:2]}, {"items": pairs[2:]}, {"items": [], **pairs[0]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for columns in ({}, {"prompt": "prompt", "completion": "completion"}):
        report = check(DataConfig(path=str(path), columns={"rows": "items", **columns})).document
        assert (report["usable"], report["rejected"]) == (4, {"unknown-layout": 1})
        assert report["problems"][0]["hint"] == "no rows at 'items', as rows= says"


def test_columns_of_the_command_line() -> None:
    assert parse_columns("prompt=a+b, completion=c[0].d") == {"prompt": "a+b", "completion": "c[0].d"}
    assert parse_columns("system='One, two.',where=x=y") == {"system": "'One, two.'", "where": "x=y"}
    with pytest.raises(UsageError, match="not of the form"):
        parse_columns("prompt")
    with pytest.raises(UsageError, match="there is no field 'promt'"):
        check_columns({"promt": "a"})


@pytest.mark.parametrize(
    "name",
    ["Frage, kurz", "Ann's text", 'Ben\'s "reply"', "it [reply", "a=b", "c:\\d", "two\nlines", "a+b"],
)
def test_any_name_of_a_column_can_be_written(name: str) -> None:
    columns = {"prompt": name, "completion": "thread[0].body", "where": "state=open", "system": "'Don\\'t guess, ask.'"}
    assert parse_columns(write_columns(columns)) == columns
    assert pair({name: "Where is it?", "told": "In Bonn."}, prompt=name, completion="told") == (
        "Where is it?",
        "In Bonn.",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt=a,completion=b,where=x=1,where=y=2", "where is mapped twice"),
        ("prompt=title,prompt=body,completion=b", "prompt is mapped twice"),
        ("prompt,completion=b", "not of the form"),
    ],
)
def test_what_would_be_dropped_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_columns(text)


@pytest.mark.parametrize(
    ("field", "own"),
    [
        ("session", "session_id"),
        ("user", "User ID"),
        ("time", "timestamp"),
        ("agent", "agent_name"),
        ("session", "session"),
    ],
)
def test_the_users_column_goes_before_others_of_that_meaning(field: str, own: str) -> None:
    row = {"prompt": "Where is it?", "completion": "In Bonn.", own: "1", "mine": "2"}
    columns = {"prompt": "prompt", "completion": "completion", field: "mine"}
    example = read_example(RawRow("a:1", json.dumps(row).encode()), columns).example
    assert str(getattr(example, field)).startswith("2")
    raw = RawRow("store", json.dumps(row).encode(), stored={field: "1"})
    assert str(getattr(read_example(raw, columns).example, field)).startswith("2")


def test_a_mapped_weight_is_obeyed(tmp_path: Path) -> None:
    """Rows of weight 0 were trained."""
    path = tmp_path / "rows.jsonl"
    rows = [{"ask": f"Where is box {i}?", "told": f"In room {i}.", "w": w} for i, w in enumerate((0, "0", 1, 0.5))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "ask", "completion": "told", "weight": "w"}
    report = check(DataConfig(path=str(path), columns=columns, near_duplicates=0)).document
    assert (report["usable"], report["rejected"]) == (1, {"no-trained-token": 2, "wrong-type": 1})


@pytest.mark.parametrize(
    ("field", "column", "hint"),
    [
        ("session", "tiket", "did you mean 'ticket'?"),
        ("success", "solved.well", "it has ask, told, ticket"),
        ("system", "You are brief.", "quotes of its own: \"'You are brief.'\""),
    ],
)
def test_a_mapping_that_fits_no_row_is_refused(field: str, column: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"ask": f"Where is box {i}?", "told": f"In room {i}.", "ticket": i} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(path), columns={"prompt": "ask", "completion": "told", field: column}, near_duplicates=0)
    with pytest.raises(
        DataRefused, match=f"no row has the column '{column}', which data.columns names as {field}"
    ) as no:
        check(data).refuse(0.2)
    assert hint in no.value.hint
    with path.open("a") as file:  # one row that has it, without a value, is enough
        file.write(json.dumps({**rows[0], column: None}) + "\n")
    check(data).refuse(0.2)


def test_system_prompts_of_agents_that_no_row_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Where is box {i}?", "completion": f"In room {i}."} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(path), system_prompts={"desk": "You are brief."}, near_duplicates=0)
    with pytest.raises(DataRefused, match="no row has an agent of") as refused:
        check(data).refuse(0.2)
    assert "agent='NAME'" in refused.value.hint
    check(data.model_copy(update={"columns": {"agent": "'desk'"}})).refuse(0.2)
    path.write_text("".join(json.dumps({**row, "agent": "help"}) + "\n" for row in rows))
    with pytest.raises(DataRefused) as refused:
        check(data).refuse(0.2)
    assert refused.value.hint == "rows have: help"


def test_a_column_that_is_read_as_a_fact_is_not_called_unread(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("ask,told,Ticket\n" + "".join(f"Where is box {n}?,In room {n}.,T{n}\n" for n in range(4)))
    columns = {"prompt": "ask", "completion": "told"}
    for named, unread in (({}, ["Ticket"]), ({"session": "Ticket"}, [])):
        report = check(DataConfig(path=str(path), columns={**columns, **named})).document
        assert [one["column"] for one in report["understood"][str(path)][0]["not_read"]] == unread


def test_a_setting_for_a_fact_that_no_row_tells_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Where is box {i}?", "completion": f"In room {i}."} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(path), near_duplicates=0, balance="category")
    fact = "category"
    with pytest.raises(DataRefused, match=f"no row has the {fact} for data") as refused:
        check(data).refuse(0.2)
    assert refused.value.hint == f"map it: --columns {fact}=COLUMN"
    path.write_text("".join(json.dumps({**row, fact: "2026-11-27"}) + "\n" for row in rows))
    check(data).refuse(0.2)


def test_the_reason_for_most_unused_rows_is_named(tmp_path: Path) -> None:
    """One row with an empty answer was blamed for all that a filter had left out."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": f"Where is box {i}?", "completion": f"In room {i}." if i else "", "state": "new"} for i in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataRefused, match="none of 9 rows is usable, mostly filtered") as refused:
        check(DataConfig(path=str(path), columns={"where": "state=old"})).refuse(0.2)
    assert refused.value.hint.endswith(": state is 'new': not read by where=state=old")

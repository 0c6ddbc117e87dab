"""Columns that the user names: by one mapping line each row is read as `mapped.jsonl` says, or refused with a hint."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.mapping import check_columns, parse_columns, write_columns
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import SAMPLE_ROWS
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, UsageError

CASES = [json.loads(line) for line in Path(__file__).with_name("mapped.jsonl").read_text(encoding="utf-8").splitlines()]
BOXES = [{"ask": f"Where is box {i}?", "told": f"In room {i}.", "ticket": i} for i in range(5)]
MAPPED = {"prompt": "ask", "completion": "told"}
NAMED = [{"prompt": row["ask"], "completion": row["told"]} for row in BOXES]


def checked(folder: Path, rows: list[Any], **data: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return check(DataConfig(path=str(path), near_duplicates=0, **data))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_row_by_a_mapping(number: int) -> None:
    case = CASES[number]
    raw = RawRow("a:1", json.dumps(case["row"]).encode())
    if "refused" in case:
        with pytest.raises(RowRefused) as refused:
            read_example(raw, case["columns"])
        assert refused.value.reason == case["refused"]
        assert refused.value.hint.startswith(case.get("hint", ""))
        return
    example = read_example(raw, case["columns"]).example
    assert [message.content for message in example.messages] == case["said"]
    for field, value in case.get("facts", {}).items():
        assert getattr(example, field) == value
        stored = RawRow("store", raw.payload, stored={field: "1"})  # the user's column goes before the store's, too
        assert getattr(read_example(stored, case["columns"]).example, field) == value


def test_a_mapping_of_the_users_files_is_none_of_captured_rows() -> None:
    """A cycle on a mapped table refused each correction that came over the gateway."""
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In Bonn."}]
    payload = json.dumps({"messages": turns, "answered_by": "desk@1", "client": "a"}).encode()
    captured = RawRow("gateway:desk@1", payload, stored={"feedback": 1.0})
    assert len(read_example(captured, MAPPED).example.messages) == 2


def test_a_hint_names_only_columns_of_the_row() -> None:
    with pytest.raises(RowRefused) as refused:
        read_example(RawRow("a:1", b'{"left": "a"}'), {"assistant": "Ben"})
    assert refused.value.hint.startswith("no prompt or answer column recognised among left; ")


def test_rows_inside_of_records_need_no_other_column(tmp_path: Path) -> None:
    """The place of the rows was ignored where it was named alone, and a place without rows was: the record was read."""
    records = [{"items": NAMED[:2]}, {"items": NAMED[2:4]}, {"items": [], **NAMED[0]}]
    for columns in ({}, {"prompt": "prompt", "completion": "completion"}):
        report = checked(tmp_path, records, columns={"rows": "items", **columns}).document
        assert (report["usable"], report["rejected"]) == (4, {"unknown-layout": 1})
        assert report["problems"][0]["hint"] == "the record has no rows at 'items': correct rows= in the mapping"


@pytest.mark.parametrize(
    "name", ["Frage, kurz", "Ann's text", 'Ben\'s "reply"', "it [reply", "a=b", "c:\\d", "two\nlines", "a+b"]
)
def test_any_name_of_a_column_can_be_written(name: str) -> None:
    name_written = json.dumps(name) if "+" in name else name  # a+b are two columns
    columns = {
        "prompt": name_written,
        "completion": "thread[0].body",
        "where": "state=open",
        "system": "'Don\\'t, ask.'",
    }
    assert parse_columns(write_columns(columns)) == columns
    row = {name: "Where is it?", "told": "In Bonn."}
    example = read_example(
        RawRow("a:1", json.dumps(row).encode()), {"prompt": name_written, "completion": "told"}
    ).example
    assert [message.content for message in example.messages] == ["Where is it?", "In Bonn."]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt", "not of the form"),
        ("prompt,completion=b", "not of the form"),
        ("prompt=a,completion=b,where=x=1,where=y=2", "where is mapped twice"),
        ("prompt=title,prompt=body,completion=b", "prompt is mapped twice"),
        ("promt=a", "there is no field 'promt'"),
        ("prompt=a,completion=b,where=x", "'x' is not a condition"),
        ("prompt=a,role=b", "messages is not mapped"),
    ],
)
def test_what_would_be_dropped_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_columns(parse_columns(text))


def refusal(found: Any) -> DataRefused:
    with pytest.raises(DataRefused) as refused:
        found.refuse(0.2)
    return refused.value


@pytest.mark.parametrize(
    ("field", "column", "hint"),
    [
        ("session", "tiket", "did you mean 'ticket'?"),
        ("success", "solved.well", "it has ask, told, ticket"),
        ("system", "You are brief.", "quotes of its own: \"'You are brief.'\""),
    ],
)
def test_a_mapping_that_fits_no_row_is_refused(field: str, column: str, hint: str, tmp_path: Path) -> None:
    columns = {**MAPPED, field: column}
    refused = refusal(checked(tmp_path, BOXES, columns=columns))
    assert str(refused).startswith(f"no row has the column '{column}', which data.columns names as {field}")
    assert hint in refused.hint
    # One row that has it, without a value, is enough.
    checked(tmp_path, [*BOXES, {**BOXES[0], column: None}], columns=columns).refuse(0.2)


def test_settings_for_what_no_row_tells_are_refused(tmp_path: Path) -> None:
    prompts = {"desk": "You are brief."}
    assert "agent='NAME'" in refusal(checked(tmp_path, NAMED, system_prompts=prompts)).hint
    checked(tmp_path, NAMED, system_prompts=prompts, columns={"agent": "'desk'"}).refuse(0.2)
    helped = [{**row, "agent": "help"} for row in NAMED]
    assert refusal(checked(tmp_path, helped, system_prompts=prompts)).hint == "rows have: help"
    assert refusal(checked(tmp_path, NAMED, balance="category")).hint == "map it: --columns category=COLUMN"
    checked(tmp_path, [{**row, "category": "boxes"} for row in NAMED], balance="category").refuse(0.2)


def test_a_column_that_is_read_as_a_fact_is_not_called_unread(tmp_path: Path) -> None:
    for named, unread in (({}, ["ticket"]), ({"session": "ticket"}, [])):
        [kinds] = checked(tmp_path, BOXES, columns={**MAPPED, **named}).document["understood"].values()
        assert [one["column"] for one in kinds[0]["not_read"]] == unread


def test_a_column_is_read_or_not_read_and_never_both(tmp_path: Path) -> None:
    """Where some rows have no value, the column was called both."""
    rows = [{**BOXES[n % len(BOXES)], "stars": str(n) if n % 2 else ""} for n in range(10)]
    [[kind]] = checked(tmp_path, rows, columns=MAPPED).document["understood"].values()
    assert "stars" in [one["column"] for one in kind["not_read"]] and "stars" not in kind["read"]


def test_an_unread_column_that_comes_late_is_listed(tmp_path: Path) -> None:
    """A log that got a new field after the rows by which its file is understood."""
    rows = [{"prompt": f"What is in box {n}?", "completion": f"Item {n}.", "team": "a"} for n in range(SAMPLE_ROWS)]
    late = [{**row, "prompt": f"And {row['prompt']}", "team": "b", "country": "FR", "ok": ""} for row in rows[:3]]
    late[2]["\ud83d"] = "\ud83d"  # half a character, which SQLite can't give back
    document = checked(tmp_path, [*rows, *late, {**late[0], "prompt": "Why?", "country": "DE"}]).document
    [[kind]] = document["understood"].values()
    unread = {one["column"]: (one["distinct"], one["example"], one["hint"]) for one in kind["not_read"]}
    place = f"first in {tmp_path / 'rows.jsonl'}:{SAMPLE_ROWS + 1}"
    half = {"\\ud83d": (1, "\\ud83d", place.replace(str(SAMPLE_ROWS + 1), str(SAMPLE_ROWS + 3)))}
    assert unread == {"team": (1, "a", ""), "country": (2, "FR", place), **half}


def test_a_named_format_needs_who_answers_and_no_mapping(tmp_path: Path) -> None:
    talk = [
        {"type": "message", "from": who, "text": f"{who} {n}", "date": "1"} for n in range(4) for who in ("Ana", "Ben")
    ]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"name": "Desk", "type": "personal_chat", "id": 1, "messages": talk}))
    document = check(DataConfig(path=str(path))).document
    assert (list(document["rejected"]), document["unclear"]) == (["who-answers"], {})
    assert document["problems"][0]["hint"].endswith("--columns assistant=Ben")


def test_the_reason_for_most_unused_rows_is_named(tmp_path: Path) -> None:
    """One row with an empty answer was blamed for all that a filter had left out."""
    rows = [{**NAMED[i % 5], "completion": f"In {i}." if i else "", "state": "new"} for i in range(9)]
    refused = refusal(checked(tmp_path, rows, columns={"where": "state=old"}))
    assert "none of the 9 rows is usable: mostly filtered" in str(refused)
    assert refused.hint.endswith(": state is 'new', which does not match where=state=old")


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
            [{"": str(n), "English": f"The river {n} is cold.", "Hindi": f"nadi {n} hai"} for n in range(6)],
            {"prompt": "English", "completion": "Hindi"},
        ),
        (
            [{"sentence": f"The plot of {n} is thin.", "category": "bad" if n % 2 else "good"} for n in range(6)],
            {"prompt": "sentence", "completion": "category"},
        ),
        (
            [
                {"history": [{"role": "user", "content": f"Where is {n}?"}, {"role": "assistant", "content": "Ah."}]}
                for n in range(6)
            ],
            {"messages": "history"},
        ),
        (
            [{"thread": [{"who": "Ann", "said": f"Where is {n}?"}, {"who": "Ben", "said": "Ah."}]} for n in range(6)],
            {"messages": "thread", "role": "who", "text": "said", "assistant": "Ben"},
        ),
        (
            [
                {
                    "no": n // 2,
                    "author": "me" if n % 2 else f"c{n}",
                    "body": f"It is {n}.",
                    "sent": f"2026-01-02 03:{n}",
                }
                for n in range(10, 30)
            ],
            {"session": "no", "role": "author", "text": "body", "assistant": "me", "time": "sent"},
        ),
        (
            [{"page": page, "items": [{"q": f"Where is {page}{n}?", "a": f"In {n}."} for n in "bcd"]} for page in "fg"],
            {"rows": "items[]", "prompt": "q", "completion": "a"},
        ),
        (
            [{f"k{n}": {"question": f"Where is {n}?", "reply": f"In {n}."} for n in range(6)}],
            {"rows": "*", "prompt": "question", "completion": "reply"},
        ),
    ],
)
def test_an_unknown_table_needs_the_one_line_that_is_printed(
    rows: list[dict[str, Any]], columns: dict[str, str], tmp_path: Path
) -> None:
    document = checked(tmp_path, rows).document
    [suggested] = document["unclear"].values()
    assert (document["usable"], suggested["columns"]) == (0, columns)
    assert suggested["line"] in document["problems"][0]["hint"]
    assert not checked(tmp_path, rows, columns=columns).document["rejected"]


def test_each_line_that_is_printed_leads_on(tmp_path: Path) -> None:
    """A longer context was suggested as the answer."""
    rows = [
        {"context": f"House {n} was built in 190{n}.", "question": f"When was {n}?", "answers": {"text": [str(n)]}}
        for n in range(6)
    ]
    [suggested] = checked(tmp_path, rows).document["unclear"].values()
    assert suggested["columns"] == {"prompt": "question", "completion": "answers.text[0]"}
    [problem] = checked(tmp_path, rows, columns=suggested["columns"]).document["problems"]
    columns = {"prompt": "question+context", "completion": "answers.text[0]"}
    assert write_columns(columns) in problem["hint"]
    assert not checked(tmp_path, rows, columns=columns).document["rejected"]

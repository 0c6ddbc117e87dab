"""Small files that were read wrongly, and what is right; each stands for its kind."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.mapping import parse_names, write_names
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused, UsageError
from hivetune.records import Example

CASES = Path(__file__).parent / "cases"


def report_of(path: Path, **data: Any) -> dict[str, Any]:
    return check(DataConfig(path=str(path), **data)).document


def examples(path: Path, *, pairs: bool = False) -> list[Example | str]:
    """Each row as it is read, or the reason why not."""
    found: list[Example | str] = []
    for raw in rows_of_files(str(path)):
        try:
            found.append(read_example(raw, {}, pairs=pairs).example)
        except RowRefused as refused:
            found.append(refused.reason)
    return found


def said(example: Example | str) -> list[tuple[str, str]]:
    assert isinstance(example, Example), example
    return [(message.role, message.content) for message in example.messages]


def unread(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [column for kinds in document["understood"].values() for kind in kinds for column in kind["not_read"]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "column", "distinct", "words"),
    [("class-label", "label", 2, "success=label"), ("star-label", "stars", 5, "where=stars in 4|5")],
)
def test_a_label_decides_nothing_and_is_listed(name: str, column: str, distinct: int, words: str) -> None:
    document = report_of(CASES / f"{name}.jsonl")
    assert (document["usable"], document["rejected"], document["set_aside"]) == (30, {}, {})
    [listed] = unread(document)
    assert (listed["column"], listed["distinct"]) == (column, distinct)
    assert words in listed["hint"]


@pytest.mark.parametrize(
    "column", ["score", "rating", "helpful", "error", "is_correct", "verdict", "passed", "reward", "weight"]
)
def test_no_other_column_is_an_outcome_by_its_name(column: str, tmp_path: Path) -> None:
    rows = [{"question": f"Is {n} odd?", "answer": str(n % 2 == 1), column: n % 2} for n in range(20)]
    document = report_of(write(tmp_path / "rows.jsonl", rows))
    assert (document["usable"], document["set_aside"]) == (20, {})
    assert [listed["column"] for listed in unread(document)] == [column]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("feedback", "the answer number {} is too long"),
        ("success", "maybe"),
        ("created_at", "on the {}. of May at noon, or so"),
        ("session_id", {"id": 1}),
        ("user", ["a"]),
    ],
)
def test_a_fact_that_makes_no_sense_is_listed_as_not_read(column: str, value: Any, tmp_path: Path) -> None:
    """Sentences in it refused the table."""
    values = [value.format(n) if isinstance(value, str) else value for n in range(20)]
    rows = [{"question": f"Is {n} odd?", "answer": str(n % 2 == 1), column: values[n]} for n in range(20)]
    document = report_of(write(tmp_path / "rows.jsonl", rows))
    assert (document["usable"], [listed["column"] for listed in unread(document)]) == (20, [column])
    assert unread(document)[0]["example"] == (values[0] if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("name", "column", "asked"),
    [
        ("unread-column", "country", "question"),
        ("number-column", "number", "question"),
        ("best-of-n", "attempt", "prompt"),
    ],
)
def test_equal_prompts_with_different_answers_beside_an_unread_column(name: str, column: str, asked: str) -> None:
    path = CASES / f"{name}.jsonl"
    document = report_of(path)
    assert list(document["rejected"]) == ["unread-column"]
    assert (document["usable"], len({problem["hint"] for problem in document["problems"]})) == (0, 1)
    hint = document["problems"][0]["hint"]
    assert f"--columns prompt={asked}+{column}" in hint
    assert f"--ignore {column}" in hint
    ignored = report_of(path, ignore=[column])
    assert ignored["rejected"] == {}
    assert ignored["usable"] + ignored["duplicates"] == document["rows_in"]
    mapped = report_of(path, columns={"prompt": f"{asked}+{column}"})
    assert (mapped["rejected"], mapped["usable"] + mapped["duplicates"]) == ({}, document["rows_in"])


@pytest.mark.parametrize("column", ["language", "locale", "level", "region", "version", "priority", "tone", "model"])
def test_no_name_of_a_column_hides_that_it_belongs_to_the_question(column: str, tmp_path: Path) -> None:
    rows = [{"prompt": "Greet as asked.", column: f"v{n % 4}", "completion": f"Greeting {n % 4}."} for n in range(40)]
    assert report_of(write(tmp_path / "rows.jsonl", rows))["rejected"] == {"unread-column": 40}


def test_an_unread_column_of_sentences_refuses_a_table_and_no_named_format(tmp_path: Path) -> None:
    about = [f"The document number {n} is about boats." for n in range(12)]
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}.", "paper": about[n]} for n in range(12)]
    document = report_of(write(tmp_path / "rows.jsonl", rows))
    assert document["rejected"] == {"unread-column": 12}
    assert "'paper' is not read: read it with --columns prompt=question+paper, or" in document["problems"][0]["hint"]
    answered = [{"text": about[n], "reply": f"{about[n]} And so on."} for n in range(12)]
    document = report_of(write(tmp_path / "answered.jsonl", answered))
    assert (
        "'reply' is not read: read it with --columns prompt=text,completion=reply, or"
        in document["problems"][0]["hint"]
    )
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a boat."}]
    named = [
        {"messages": [*turns, {"role": "user", "content": str(n)}, *turns[1:]], "paper": about[n]} for n in range(9)
    ]
    assert report_of(write(tmp_path / "named.jsonl", named))["rejected"] == {}
    columns = {"prompt": "question", "completion": "answer"}
    assert report_of(write(tmp_path / "rows.jsonl", rows), columns=columns)["rejected"] == {"unread-column": 12}


def test_a_name_with_a_comma_is_left_out_as_the_hint_says_and_an_empty_column_was_not_read(tmp_path: Path) -> None:
    lines = [f'What is {n}?,It is {n}.,"The client {n} has called again",' for n in range(12)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(['question,answer,"Note, internal",', *lines, ""]))
    document = report_of(path)
    hint = document["problems"][0]["hint"]
    ignored = parse_names(shlex.split(hint)[-1])
    assert (document["rejected"], ignored) == ({"unread-column": 12}, ["Note, internal"])
    left = report_of(path, ignore=ignored)
    assert left["usable"] == 12
    assert [kind["read"] for kinds in left["understood"].values() for kind in kinds] == [["question", "answer"]]


@pytest.mark.parametrize("names", [["Agence"], ["a, b", "c"], ['the "best"', " d"], ["naïve;"]])
def test_names_are_read_as_they_are_written(names: list[str]) -> None:
    assert parse_names(write_names(names)) == [name.strip() for name in names]


def test_headers_that_are_questions_are_headers() -> None:
    document = report_of(CASES / "form-headers.csv")
    assert (document["rows_in"], document["rejected"]) == (10, {"unknown-layout": 10})
    line = "--columns 'prompt=What is your question?,completion=What was the answer?'"
    assert line in document["problems"][0]["hint"]
    columns = {"prompt": "What is your question?", "completion": "What was the answer?"}
    assert report_of(CASES / "form-headers.csv", columns=columns)["usable"] == 10


def test_right_answers_are_usable() -> None:
    document = report_of(CASES / "right-answers.jsonl")
    assert (document["usable"], document["rejected"]) == (6, {})


def test_a_mapped_outcome_is_yes_or_no_and_a_condition_has_a_column(tmp_path: Path) -> None:
    rows = [{"prompt": f"Is {n} odd?", "completion": "No.", "end": end} for n, end in enumerate(("yes", "given up"))]
    path = write(tmp_path / "rows.jsonl", rows)
    assert report_of(path, columns={"success": "end"})["rejected"] == {"unread-outcome": 1}
    with pytest.raises(DataRefused, match="unread-outcome"):
        check(DataConfig(path=str(path), columns={"success": "end"})).refuse(1.0)
    with pytest.raises(UsageError, match="no row has a column 'ende'"):
        report_of(path, columns={"where": "ende=yes"})
    for condition, usable in (("end=yes", 1), ("end!=yes", 1), ("end in yes|given up", 2)):
        assert report_of(path, columns={"where": condition})["usable"] == usable


def test_a_condition_on_a_column_that_comes_late(tmp_path: Path) -> None:
    """It was called a column that no row has, since none of the first ones had it."""
    rows = [{"prompt": f"Is {n} odd?", "completion": "No.", **({} if n < 450 else {"end": "yes"})} for n in range(460)]
    document = report_of(write(tmp_path / "rows.jsonl", rows), columns={"where": "end=yes"}, near_duplicates=0)
    assert (document["usable"], document["set_aside"]) == (10, {"filtered": 450})


def test_an_answer_that_begins_inside_a_thought() -> None:
    for example in examples(CASES / "closing-think.jsonl"):
        assert isinstance(example, Example)
        answer = example.messages[-1]
        assert (answer.reasoning or "").startswith("Three times")
        assert answer.content.endswith(".")
        assert "think" not in answer.content


def test_nulls_of_arrow_are_no_arguments() -> None:
    weather, refund = examples(CASES / "arrow-nulls.jsonl")
    assert isinstance(weather, Example)
    assert isinstance(refund, Example)
    assert weather.messages[1].tool_calls[0]["function"]["arguments"] == {"city": "Graz", "unit": "C"}
    assert refund.messages[1].tool_calls[0]["function"]["arguments"] == {"order": 4711, "amount": 12.0}
    assert list(weather.tools[0]["function"]["parameters"]["properties"]) == ["city", "unit"]


ORDER = {"type": "object", "properties": {"day": {"type": ["integer", "null"]}, "shop": {"type": "string"}}}
ONE_ORDER = {"anyOf": [{"$ref": "#/$defs/order"}, {"type": "null"}], "default": None}
ONE_OF = {"oneOf": [{"type": "string", "enum": ["null"]}, ORDER]}  # neither of which is null


@pytest.mark.parametrize(
    ("schema", "value", "given"),
    [
        ({"type": ["integer", "null"]}, None, {"order": None}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, {"order": None}),
        ({"anyOf": [{"enum": ["new", None]}, {"type": "integer"}]}, None, {"order": None}),
        ({"type": "integer", "description": "null is not allowed"}, None, {}),
        (ONE_ORDER, None, {"order": None}),
        (ONE_OF, None, {}),
        ({"$ref": "#/$defs/order"}, None, {}),
        (ONE_ORDER, {"day": None, "shop": None}, {"order": {"day": None}}),
        ({"type": "array", "items": ONE_OF}, [{"day": None, "shop": None}], {"order": [{"day": None}]}),
        ({"$ref": "#/$defs/itself"}, {"day": None}, {"order": {}}),
    ],
)
def test_a_null_is_given_where_its_tool_allows_it(schema: Any, value: Any, given: Any, tmp_path: Path) -> None:
    row = json.loads((CASES / "arrow-nulls.jsonl").read_text(encoding="utf-8").splitlines()[0])
    parameters = row["tools"][0]["function"]["parameters"]
    parameters["properties"]["order"] = schema
    parameters["$defs"] = {"order": ORDER, "itself": {"allOf": [{"$ref": "#/$defs/itself"}]}}
    row["messages"][1]["tool_calls"][0]["function"]["arguments"]["order"] = value
    [example] = examples(write(tmp_path / "rows.jsonl", [row]))
    assert isinstance(example, Example)
    assert example.messages[1].tool_calls[0]["function"]["arguments"] == {"city": "Graz", "unit": "C", **given}
    assert example.tools[0]["function"]["parameters"]["properties"]["order"] == schema


@pytest.mark.parametrize("key", ["default", "enum", "const", "examples"])
def test_a_null_key_of_a_schema_that_allows_none_is_padding(key: str, tmp_path: Path) -> None:
    row = json.loads((CASES / "arrow-nulls.jsonl").read_text(encoding="utf-8").splitlines()[0])
    row["tools"][0]["function"]["parameters"]["properties"]["city"] = {"type": "string", key: None}
    [example] = examples(write(tmp_path / "rows.jsonl", [row]))
    assert isinstance(example, Example)
    assert example.tools[0]["function"]["parameters"]["properties"]["city"] == {"type": "string"}


def test_a_pair_whose_sides_are_json_texts() -> None:
    for example in examples(CASES / "pair-json-text.jsonl", pairs=True):
        assert isinstance(example, Example)
        assert example.lesson == "pair"
        assert example.messages[-1].tool_calls[0]["function"]["name"] == "dice"
        assert example.worse is not None
        assert example.tools


def test_an_order_that_was_typed_into_an_answer_of_claude_code(tmp_path: Path) -> None:
    [example] = examples(CASES / "claude-code-queued.jsonl")
    order = "Leave mail.py alone, and write the new name in German: preis_text"
    assert [role for role, _ in said(example)] == [
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert said(example)[3] == ("user", order)
    events = [json.loads(line) for line in (CASES / "claude-code-queued.jsonl").read_text().splitlines()]
    path = write(tmp_path / "s.jsonl", [event for event in events if event["type"] != "attachment"])
    path.write_text(path.read_text().replace('"u0005"', '"u0004"'))
    [without_attachment] = examples(path)
    assert said(without_attachment) == said(example)


def test_what_follows_an_encrypted_summary_of_codex_is_set_aside(tmp_path: Path) -> None:
    first, second = examples(CASES / "codex-compacted.jsonl")
    assert second == "earlier-turns-missing"
    assert ("assistant", "The spare lamps are in Graz.") in said(first)
    path = tmp_path / "s.jsonl"
    path.write_text(
        (CASES / "codex-compacted.jsonl").read_text().replace('"encrypted_content": "gAAAAABq1111"', '"x": 1')
    )
    _, told = examples(path)
    assert [role for role, _ in said(told)] == ["system", "user", "assistant", "tool", "assistant"]
    assert "move half of them" in said(told)[1][1]


def test_an_aborted_turn_of_cursor_is_not_learned() -> None:
    [example] = examples(CASES / "cursor-transcript.jsonl")
    assert isinstance(example, Example)
    assert said(example)[0] == ("user", "Why does the nightly backup skip the photo folder?")
    weights = [message.weight for message in example.messages if message.role == "assistant"]
    assert weights == [1, 1, 0, 1, 1]

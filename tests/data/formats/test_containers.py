"""Records that hold many rows give each of them; rows that have a list among their columns stay one row."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.formats import may_hold_rows, rows_inside
from hivetune.data.prepare.prepare import check
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused

PAIR = {"prompt": "Which river flows through Paris?", "completion": "The Seine."}
OTHER = {"prompt": "Which river flows through Cologne?", "completion": "The Rhine."}


def inside(record: dict[str, Any]) -> list[Any] | None:
    payload = json.dumps(record).encode()
    assert may_hold_rows(payload)
    rows = rows_inside(payload)
    return None if rows is None else [json.loads(row) for row in rows]


def test_rows_below_a_key() -> None:
    assert inside({"version": "1", "data": [PAIR, OTHER]}) == [PAIR, OTHER]
    assert inside({"rows": [{"row_idx": 0, "row": PAIR, "truncated_cells": []}]}) == [PAIR]


def test_spans_of_a_batch_with_their_attributes() -> None:
    span = {"name": "chat", "spanId": "1", "attributes": [{"key": "gen_ai.system", "value": {"stringValue": "openai"}}]}
    about = {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]}
    found = inside({"resourceSpans": [{"resource": about, "scopeSpans": [{"scope": {}, "spans": [span, span]}]}]})
    assert found is not None
    assert [row["attributes"] for row in found] == [{"service.name": "shop", "gen_ai.system": "openai"}] * 2


def test_observations_of_a_trace_know_its_session() -> None:
    found = inside({"id": "t", "sessionId": "s", "input": "q", "observations": [{"type": "GENERATION", "input": "q"}]})
    assert found == [{"sessionId": "s", "type": "GENERATION", "input": "q"}]


def began(name: str, question: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "run_type": "llm", "inputs": {"messages": [[{"role": "user", "content": question}]]}, **more}


def said_in(record: dict[str, Any]) -> list[Any]:
    """Question and answer of each row of a record, or why it is refused."""
    found: list[Any] = []
    for row in inside(record) or []:
        try:
            example = read_example(RawRow("a:1", json.dumps(row).encode()), {}).example
            found.append(tuple(message.content for message in example.messages))
        except RowRefused as refused:
            found.append(refused.reason)
    return found


def test_the_end_of_a_run_belongs_to_the_run_with_its_id() -> None:
    answered = {"generations": [[{"text": "The Seine.", "generationInfo": {"finish_reason": "stop"}}]]}
    later = {"generations": [[{"text": "The Rhine.", "generationInfo": {"finish_reason": "stop"}}]]}
    chain = {"id": "c", "run_type": "chain", "inputs": {"input": "Paris?"}}
    begun = [began("a", "Paris?", outputs=answered), began("b", "Cologne?"), chain]
    ended = [{"id": "b", "outputs": later, "inputs": None}, {"id": "elsewhere", "run_type": "llm", "outputs": later}]
    expected = [("Paris?", "The Seine."), ("Cologne?", "The Rhine.")]
    assert said_in({"post": begun, "patch": ended}) == [*expected, "not-a-model-call", "not-a-model-call"]
    assert said_in({"post": begun[:1], "patch": []}) == expected[:1]
    assert said_in({"post": [], "patch": ended[1:]}) == ["not-a-model-call"]


def test_events_that_langfuse_is_sent_are_joined_by_what_they_tell_of() -> None:
    def sent(kind: str, **body: Any) -> dict[str, Any]:
        return {"id": kind, "type": kind, "timestamp": "2026-01-01T00:00:00Z", "body": body}

    asked, answered = [{"role": "user", "content": "Paris?"}], {"role": "assistant", "content": "The Seine."}
    trace = sent("trace-create", id="t", sessionId="s", input=asked)
    calls = [
        sent("generation-create", id="a", traceId="t", input=asked),
        sent("generation-create", id="b", traceId="t", input=asked),
        sent("generation-update", id="a", traceId="t", output=answered),
        sent("score-create", id="x", traceId="t", name="good", value=1),
    ]
    assert said_in({"batch": [trace, *calls], "metadata": {}}) == [("Paris?", "The Seine."), "not-a-model-call"]
    rows = inside({"batch": [trace, *calls]}) or []
    assert [row["sessionId"] for row in rows] == ["s", "s"]
    traces = [trace, sent("trace-create", id="t", output=answered)]
    assert said_in({"batch": traces}) == [("Paris?", "The Seine.")]


@pytest.mark.parametrize(
    "record",
    [
        {"data": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {**PAIR, "data": [{"note": "b"}]},
        {"messages": [], "data": [PAIR]},
        {"data": []},
        {"data": ["question", "answer"]},
    ],
)
def test_rows_that_are_no_containers(record: dict[str, Any]) -> None:
    assert inside(record) is None


@pytest.mark.parametrize(("indent", "line"), [(None, 1), (1, 12)])
def test_a_file_with_one_object(tmp_path: Path, indent: int | None, line: int) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": "1.0", "data": [PAIR, OTHER, {"prompt": "x"}], "n": 3}, indent=indent))
    report = check(DataConfig(path=str(path))).document
    assert (report["rows_in"], report["usable"]) == (3, 2)
    assert report["problems"][0]["source"] == f"{path}:{line}"


def test_a_file_with_one_object_larger_than_any_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [{"prompt": f"question {i}", "completion": "a" * 70_000} for i in range(250)]
    path.write_text(json.dumps({"data": rows}, indent=0))
    report = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert report["rows_in"] == 250
    assert not report["rejected"].get("line-too-large")


def test_what_stands_behind_the_rows_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": [PAIR], "test": [OTHER]}, indent=1))
    with pytest.raises(DataRefused, match="what stands behind the list of rows was not read"):
        check(DataConfig(path=str(path)))
    path.write_text(json.dumps({"question": "Which?", "data": [{"a": 1}]}, indent=1))
    assert check(DataConfig(path=str(path))).document["rows_in"] == 1

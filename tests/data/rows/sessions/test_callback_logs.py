"""Logs with one event of a run a line: a question belongs to its own answer, and no event is learned as a text."""

import json
from pathlib import Path
from typing import Any

import pytest
from session_files import write

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.layouts.table import read_layout as read_conversation
from hivetune.data.rows.read import read_example


def event(name: str, text: str, run: str | None = None) -> dict[str, Any]:
    return {"event": name, "timestamp": "2026-01-01T00:00:00Z", "text": text, **({"run_id": run} if run else {})}


def read(tmp_path: Path, events: list[dict[str, Any]]) -> list[Any]:
    """Question and answer of each row, or why it is refused."""
    found: list[Any] = []
    for raw in rows_of_files(str(write(tmp_path / "log.jsonl", events))):
        try:
            found.append(tuple(message.content for message in read_example(raw, {}).example.messages))
        except RowRefused as refused:
            found.append(refused.reason)
    return found


FIRST = [event("llm_start", "What is 2 and 2?"), event("llm_end", "It is 4.")]
SECOND = [event("llm_start", "What is 3 and 3?"), event("llm_end", "It is 6.")]
PAIRS = [("What is 2 and 2?", "It is 4."), ("What is 3 and 3?", "It is 6.")]


def test_a_start_belongs_to_the_end_that_follows(tmp_path: Path) -> None:
    chain = event("chain_start", "Two sums are asked for.")
    assert read(tmp_path, [chain, *FIRST, *SECOND]) == ["not-a-model-call", *PAIRS]


def test_calls_at_once_belong_to_nobody_without_an_id(tmp_path: Path) -> None:
    mixed = [FIRST[0], SECOND[0], SECOND[1], FIRST[1]]
    assert read(tmp_path, [*mixed, *FIRST]) == [*["one-message"] * 4, PAIRS[0]]
    named = [{**one, "run_id": run} for one, run in zip(mixed, "abba", strict=True)]
    assert sorted(read(tmp_path, named)) == PAIRS


def test_calls_that_failed_or_never_ended(tmp_path: Path) -> None:
    failed = event("llm_error", "The server is away.", "a")
    assert read(tmp_path, [event("llm_start", "Who?", "a"), failed]) == ["failed"]
    assert read(tmp_path, [*FIRST, event("llm_start", "Who?")]) == [PAIRS[0], "one-message"]
    assert read(tmp_path, [event("llm_end", "It is 4."), *FIRST]) == ["one-message", PAIRS[0]]


def test_what_newer_events_keep_below_data(tmp_path: Path) -> None:
    asked = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]]
    start = {"event": "on_chat_model_start", "run_id": "a", "data": {"input": {"messages": asked}}}
    part = {"event": "on_chat_model_stream", "run_id": "a", "data": {"chunk": {"content": "Th"}}}
    answered = {"generations": [[{"text": "There.", "message": {"type": "ai", "content": "There."}}]]}
    for outputs in (answered, {"generations": answered["generations"][0]}, {"generations": [[{"text": "There."}]]}):
        end = {"event": "on_chat_model_end", "run_id": "a", "data": {"output": outputs}}
        assert read(tmp_path, [start, part, end]) == ["not-a-model-call", ("Be brief.", "Where is it?", "There.")]
        end = {"event": "on_chat_model_end", "run_id": "a", "response": outputs["generations"]}
        assert read(tmp_path, [start, end]) == [("Be brief.", "Where is it?", "There.")]


@pytest.mark.parametrize(
    "row",
    [
        event("llm_start", "What is 2 and 2?"),
        {"eventType": "handleLlmEnd", "text": "It is 4."},
        {"type": "chain_end", "text": "It is 4."},
        {"id": "p", "type": "text", "text": "Found two files.", "time": {"start": 1}},
        {"messageID": "m", "type": "reasoning", "text": "There must be two files."},
    ],
)
def test_an_event_is_no_text(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused, match="one-message"):
        read_conversation(json.loads(json.dumps(row)))


def test_a_text_with_a_class_of_its_own_stays_a_text() -> None:
    for row in ({"type": "front-end", "text": "A page about colours."}, {"event": "flood", "text": "It rained."}):
        assert [message.content for message in read_conversation(row).messages] == [row["text"]]

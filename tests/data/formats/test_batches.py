"""Batch files: questions and answers in two files, joined by their ids."""

from pathlib import Path
from typing import Any

from session_files import said, write

from hivetune.config import DataConfig
from hivetune.data.chunks import read_rows
from hivetune.data.intake.files import plan_inputs
from hivetune.data.prepare.prepare import check
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused


def batch(identity: str, text: str) -> dict[str, Any]:
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": identity, "method": "POST", "url": "/v1/chat/completions", "body": body}


def batch_answer(identity: str, text: str) -> dict[str, Any]:
    body = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": text}}]}
    response = {"status_code": 200, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": identity, "response": response, "error": None}


def test_batch_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "batch").mkdir()
    write(tmp_path / "batch" / "in.jsonl", [batch("a", "Which river?"), batch("b", "Which sea?"), batch("c", "Who?")])
    failed = {"custom_id": "c", "response": None, "error": {"message": "expired"}}
    lost = batch_answer("z", "Nobody asked.")
    write(tmp_path / "batch" / "out.jsonl", [batch_answer("a", "The Seine."), lost, failed])
    found: dict[str, Any] = {}
    for chunk in plan_inputs(str(tmp_path / "batch"), tmp_path).chunks:
        for raw in read_rows(chunk):
            place = Path(raw.source).name
            try:
                found[place] = said(read_example(raw, {}))
            except RowRefused as error:
                found[place] = error.reason
    assert found == {
        "in.jsonl:2": "no-answer",
        "out.jsonl:1": [("user", "Which river?"), ("assistant", "The Seine.")],
        "out.jsonl:2": "earlier-turns-missing",
        "out.jsonl:3": "failed",
    }


def test_batches_of_anthropic_and_ids_of_two_questions(tmp_path: Path) -> None:
    (tmp_path / "batch").mkdir()
    params = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Which river?"}]}
    message = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "The Seine."}]}
    write(tmp_path / "batch" / "a.jsonl", [{"custom_id": "a", "params": params}, {"custom_id": "b", "params": params}])
    write(tmp_path / "batch" / "b.jsonl", [{"custom_id": "b", "params": {**params, "messages": []}}])
    results = [{"custom_id": one, "result": {"type": "succeeded", "message": message}} for one in "ab"]
    write(tmp_path / "batch" / "c.jsonl", results)
    report = check(DataConfig(path=str(tmp_path / "batch"))).document
    assert report["usable"] == 1
    assert report["rejected"] == {"no-answer": 2, "earlier-turns-missing": 1}


def test_batch_files_of_gemini(tmp_path: Path) -> None:
    """Joined by the key of each request."""
    asked = {"contents": [{"role": "user", "parts": [{"text": "Which river?"}]}]}
    answered = {
        "candidates": [{"content": {"role": "model", "parts": [{"text": "The Loire."}]}, "finishReason": "STOP"}]
    }
    (tmp_path / "batch").mkdir()
    write(tmp_path / "batch" / "in.jsonl", [{"key": "a", "request": asked}])
    write(tmp_path / "batch" / "out.jsonl", [{"key": "a", "response": answered}])
    chunks = plan_inputs(str(tmp_path / "batch"), tmp_path).chunks
    (row,) = [read_example(raw, {}) for chunk in chunks for raw in read_rows(chunk)]
    assert said(row) == [("user", "Which river?"), ("assistant", "The Loire.")]

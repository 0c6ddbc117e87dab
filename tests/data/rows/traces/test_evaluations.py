"""Logs of evaluations: what a model under test said is learned as far as the log calls it right."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import read_example
from hivetune.errors import UsageError

Q, A = "How long may I return shoes?", "You may return them for thirty days."
TURNS = [{"role": "user", "content": Q}, {"role": "assistant", "content": A}]
SAID = [("user", Q), ("assistant", A)]


def sample(value: Any, **more: Any) -> dict[str, Any]:
    output = {"choices": [{"message": TURNS[1], "stop_reason": "stop"}]}
    scores = {"includes": {"value": value, "answer": A}}
    return {"id": 1, "epoch": 1, "input": Q, "target": "thirty", "messages": TURNS, "output": output} | {
        "scores": scores,
        "events": [],
        "attachments": {},
        **more,
    }


def inspect(*samples: dict[str, Any]) -> dict[str, Any]:
    return {"version": 2, "status": "success", "eval": {"task": "shop"}, "plan": {}, "samples": list(samples)}


def result(*, passed: bool, **more: Any) -> dict[str, Any]:
    return {
        "prompt": {"raw": Q, "label": "{{question}}"},
        "vars": {"question": Q},
        "response": {"output": A, "tokenUsage": {"total": 9}, "finishReason": "stop"},
        "gradingResult": {"pass": passed, "score": int(passed)},
        "success": passed,
        **more,
    }


def read(path: Path) -> list[Any]:
    found: list[Any] = []
    for raw in rows_of_files([str(path)]):
        try:
            example = read_example(raw, {}).example
            found.append(([(m.role, m.content) for m in example.messages], example.success))
        except RowRefused as refused:
            found.append(refused.reason)
    return found


def written(folder: Path, record: Any) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps(record, indent=1))
    return path


def test_samples_of_inspect(tmp_path: Path) -> None:
    log = inspect(sample("C"), sample("I"), sample(1.0), sample({"a": 1}), sample("C", limit={"type": "token"}))
    assert read(written(tmp_path, log)) == [(SAID, True), (SAID, False), (SAID, True), (SAID, None), (SAID, False)]


def test_what_inspect_writes_into_messages(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "attachment://ab", "source": "input"},
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "reasoning": "R8x", "redacted": True},
                {"type": "text", "text": "I look."},
            ],
            "tool_calls": [{"id": "c", "function": "find", "arguments": {"what": "rules"}, "type": "function"}],
        },
        {"role": "tool", "content": "30 days", "tool_call_id": "c", "function": "find"},
        TURNS[1],
    ]
    tools = [{"name": "find", "description": "Finds", "parameters": {"type": "object", "properties": {}}}]
    log = inspect(sample("C", messages=turns, attachments={"ab": Q}, events=[{"event": "model", "tools": tools}]))
    [raw] = rows_of_files([str(written(tmp_path, log))])
    example = read_example(raw, {}).example
    assert [(m.role, m.content) for m in example.messages] == [
        ("user", Q),
        ("assistant", "I look."),
        ("tool", "30 days"),
        ("assistant", A),
    ]
    assert example.messages[1].tool_calls[0]["function"] == {"name": "find", "arguments": {"what": "rules"}}
    assert example.messages[1].reasoning is None
    assert [tool["function"]["name"] for tool in example.tools] == ["find"]


def test_a_sample_that_was_cut(tmp_path: Path) -> None:
    cut = {"choices": [{"message": TURNS[1], "stop_reason": "max_tokens"}]}
    assert read(written(tmp_path, inspect(sample("C", output=cut)))) == ["cut-off-answer"]


def test_an_archive_of_inspect(tmp_path: Path) -> None:
    path = tmp_path / "shop.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json.dumps({"version": 2, "eval": {}}))
        archive.writestr("samples/1_epoch_1.json", json.dumps(sample("C")))
        archive.writestr("samples/2_epoch_1.json", json.dumps(sample("I")))
        archive.writestr("samples/3_epoch_1.json", '{"messages": [')
    assert read(path) == [(SAID, True), (SAID, False), "broken-file"]


def test_another_archive_is_still_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rows.txt", "text")
    with pytest.raises(UsageError):
        read(path)


@pytest.mark.parametrize("wrapped", [True, False])
def test_results_of_promptfoo(tmp_path: Path, wrapped: bool) -> None:
    chat = {"raw": json.dumps([{"role": "system", "content": "Be kind."}, TURNS[0]]), "label": "x"}
    failed = {"error": "429", "response": {"error": "429 Too Many Requests", "tokenUsage": {}}}
    results = [
        result(passed=True),
        result(passed=False),
        result(passed=True, prompt=chat),
        result(passed=False, **failed),
    ]
    listed = {"version": 3, "results": results, "stats": {}}
    found = read(written(tmp_path, {"evalId": "e", "results": listed, "config": {}} if wrapped else listed))
    assert found == [(SAID, True), (SAID, False), ([("system", "Be kind."), *SAID], True), "failed"]


def test_a_prompt_of_promptfoo_in_yaml(tmp_path: Path) -> None:
    chat = f"- role: system\n  content: Be kind.\n- role: user\n  content: {Q}\n"
    broken = '- role: system\n  content: "Be kind.\n'
    repeated = f"- role: &asker user\n  content: {Q}\n- role: *asker\n  content: {Q}\n"
    raws = [chat, broken, repeated]
    raws += [f"- role: user\n  content: {text}\n" for text in ("2024-13-45", "!!set {a}", "2024-01-02")]
    results = [result(passed=True, prompt={"raw": raw, "label": "x"}) for raw in raws]
    found = read(written(tmp_path, {"version": 3, "results": results}))
    assert found[:-1] == [([("system", "Be kind."), *SAID], True), *["unknown-role"] * 4]
    assert found[-1] == ([("user", "2024-01-02"), SAID[1]], True)


def test_the_right_one_of_the_choices_of_lm_eval(tmp_path: Path) -> None:
    texts = [" A week", " Thirty days", " A year"]
    arguments = {f"gen_args_{i}": {"arg_0": f"Question: {Q}\nAnswer:", "arg_1": text} for i, text in enumerate(texts)}
    row = {"doc": {"query": Q, "choices": texts}, "target": "1", "arguments": arguments, "filtered_resps": [], "acc": 0}
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert read(path) == [([("user", f"Question: {Q}\nAnswer:"), ("assistant", "Thirty days")], None)]
    path.write_text(json.dumps({**row, "target": "9" * 5000}) + "\n")
    assert all(isinstance(refused, str) for refused in read(path))


def test_a_table_with_the_names_of_its_columns(tmp_path: Path) -> None:
    table = {"_type": "table", "columns": ["prompt", "completion"], "data": [[Q, A]], "ncols": 2, "nrows": 1}
    assert read(written(tmp_path, table)) == [(SAID, None)]

"""Runs of LangSmith that were posted and patched, one operation a line: only the calls of the model are learned."""

import json
from pathlib import Path
from typing import Any

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import read_example

SYSTEM, Q, A = "You count stock.", "How many lamps are left?", "Nine lamps are left."


def posted(run: str, kind: str, inputs: Any, parent: str | None = "root") -> dict[str, Any]:
    about = {"trace_id": "t", "dotted_order": f"2026.{run}", "parent_run_id": parent}
    return {"operation": "post", "id": run, "name": run, "inputs": inputs, "run_type": kind, "extra": {}, **about}


def patched(run: str, outputs: Any, error: str | None = None, parent: str | None = "root") -> dict[str, Any]:
    about = {"trace_id": "t", "dotted_order": f"2026.{run}", "parent_run_id": parent}
    return {"operation": "patch", "id": run, "end_time": "2026-01-01", "error": error, "outputs": outputs, **about}


def turn(kind: str, text: str) -> dict[str, Any]:
    return {"content": text, "type": kind, "additional_kwargs": {}, "response_metadata": {}}


def built(kind: str, text: str) -> dict[str, Any]:
    name = ["langchain", "schema", "messages", kind]
    return {"lc": 1, "type": "constructor", "id": name, "kwargs": {"content": text, "type": "x"}}


ANSWER = {
    "generations": [[{"text": A, "message": built("AIMessage", A), "generation_info": {"finish_reason": "stop"}}]]
}
CALL = posted("call", "llm", {"messages": [[built("SystemMessage", SYSTEM), built("HumanMessage", Q)]]})
ROOT = posted("root", "chain", {"messages": [turn("human", Q)]}, None)
ROOT_ENDS = patched("root", {"messages": [turn("human", Q), turn("ai", A)]}, parent=None)
TOOL = [posted("look", "tool", {"input": "lamps"}), patched("look", {"output": "9"})]
WHOLE = [("system", SYSTEM), ("user", Q), ("assistant", A)]


def read(tmp_path: Path, lines: list[Any]) -> dict[str, Any]:
    """Each row by its place: its messages, or why it is refused."""
    path = tmp_path / "runs.jsonl"
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    found: dict[str, Any] = {}
    for raw in rows_of_files([str(path)]):
        try:
            said: Any = [(message.role, message.content) for message in read_example(raw, {}).example.messages]
        except RowRefused as refused:
            said = refused.reason
        found[raw.source.rpartition(":")[2]] = said
    return found


def test_what_was_posted_and_patched_is_one_run(tmp_path: Path) -> None:
    """The first run says again what the calls of the model below it say, wherever its end stands."""
    call = [CALL, patched("call", ANSWER)]
    found = read(tmp_path, [ROOT, *call, *TOOL, ROOT_ENDS])
    assert found == {"1": "not-a-model-call", "2": WHOLE, "4": "not-a-model-call"}
    found = read(tmp_path, [ROOT, ROOT_ENDS, *call, *TOOL])
    assert found == {"1": "not-a-model-call", "3": WHOLE, "5": "not-a-model-call"}


def test_a_trace_without_calls_of_a_model_is_read_by_its_first_run(tmp_path: Path) -> None:
    assert read(tmp_path, [ROOT, *TOOL, ROOT_ENDS]) == {"1": WHOLE[1:], "2": "not-a-model-call"}


def test_runs_that_failed_or_lack_a_side(tmp_path: Path) -> None:
    assert read(tmp_path, [CALL, patched("call", None, "no such model")]) == {"1": "failed"}
    assert read(tmp_path, [CALL]) == {"1": "not-a-model-call"}
    assert read(tmp_path, [patched("call", ANSWER)]) == {"1": "not-a-model-call"}
    assert read(tmp_path, [CALL | {"outputs": ANSWER}]) == {"1": WHOLE}
    assert read(tmp_path, [CALL, "{half", patched("call", ANSWER)])["1"] == WHOLE

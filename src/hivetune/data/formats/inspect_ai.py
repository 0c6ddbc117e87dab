"""A log of Inspect: each sample with its conversation. What the model under test said is learned as far as all scores
call it right: rows say so in `success`.

https://inspect.aisi.org.uk/eval-logs.html
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, listed, objects, one_of

ATTACHED = "attachment://"  # a long text that Inspect keeps once, below its hash
_CUT = {"max_tokens": "length", "model_length": "length", "content_filter": "content_filter"}
_RIGHT, _WRONG = ("C", 1, True), ("I", "N", 0, False)


def recognise(record: Row) -> bool:
    return objects(record["samples"]) is not None and isinstance(record.get("eval"), dict)


def rows(record: Row) -> Iterator[Row]:
    return map(inspect_row, record["samples"])


def inspect_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of Inspect: its conversation, and whether all scores call it right."""
    attached = sample.get("attachments")
    turns = _with_attached(sample.get("messages"), attached if isinstance(attached, dict) else {})
    scores = sample.get("scores") or {"score": sample.get("score")}
    scores = listed([one_of(score, "value") for score in scores.values()] if isinstance(scores, dict) else None)
    scores = [score for score in scores if isinstance(score, str | int | float)]
    wrong, right = any(score in _WRONG for score in scores), bool(scores) and all(score in _RIGHT for score in scores)
    success = False if wrong or sample.get("error") or sample.get("limit") else True if right else None
    row = {"id": f"{sample.get('id')}-{sample.get('epoch', 1)}", "success": success, "tools": _tools(sample)}
    choice = next(iter(listed(one_of(sample.get("output"), "choices"))), None)
    ended = _CUT.get(str(one_of(choice, "stop_reason")))
    if ended is not None and isinstance(turns, list) and turns:
        return {**row, "messages": turns[:-1], "choices": [{"message": turns[-1], "finish_reason": ended}]}
    return {**row, "messages": turns if isinstance(turns, list) else []}


def _with_attached(value: Any, attached: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(ATTACHED):
        return attached.get(value.removeprefix(ATTACHED), value)
    if isinstance(value, list):
        return [_with_attached(item, attached) for item in value]
    if isinstance(value, dict):
        return {key: _with_attached(item, attached) for key, item in value.items()}
    return value


def _tools(sample: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the model was given in its first call."""
    events = objects(sample.get("events")) or []
    return next((event["tools"] for event in events if event.get("event") == "model" and event.get("tools")), None)


FORMAT = Format("inspect", recognise, rows, "batch", frozenset(("samples",)))

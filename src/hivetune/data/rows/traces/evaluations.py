"""Logs of evaluations: Inspect's samples, promptfoo's results, lm-eval's choices, tables of other programs.

What a model under test said is learned as far as the log calls it right: rows say so in `success`.
"""

import json
from collections.abc import Mapping
from datetime import date
from typing import Any

from hivetune.data.pieces.said import listed, objects, one_of, parsed

# Names that such logs have and other rows hardly, by which they are told before they are parsed.
EVALUATION_KEYS = ("samples", "tokenUsage", "gradingResult", "filtered_resps", "columns")
ATTACHED = "attachment://"  # a long text that Inspect keeps once, below its hash
YAML_TURNS = "- role:"
_CUT = {"max_tokens": "length", "model_length": "length", "content_filter": "content_filter"}
_RIGHT, _WRONG = ("C", 1, True), ("I", "N", 0, False)


def evaluated(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The rows of an evaluation's log; None: it is no such record."""
    samples = objects(record.get("samples"))
    if samples is not None and isinstance(record.get("eval"), dict):
        return [inspect_row(sample) for sample in samples]
    results = one_of(record.get("results"), "results") or record.get("results") or [record]
    if isinstance(results, list) and results and all(map(_is_promptfoo, results)):
        return [_promptfoo_row(result) for result in results]
    if "filtered_resps" in record:
        return _right_choice(record)
    return _table(record)


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


def _is_promptfoo(result: Any) -> bool:
    """Whether a result holds the prompt as it was sent, and what came back."""
    raw = one_of(one_of(result, "prompt"), "raw")
    return isinstance(raw, str) and ("response" in result or "error" in result) and "vars" in result


def _promptfoo_row(result: Mapping[str, Any]) -> dict[str, Any]:
    raw, response = result["prompt"]["raw"], result.get("response")
    turns = _turns_in_yaml(raw) if raw.startswith(YAML_TURNS) else parsed(raw)
    are_turns = objects(turns) is not None and all("role" in turn for turn in turns)
    row: dict[str, Any] = {"messages": turns} if are_turns else {"prompt": raw}
    output = one_of(response, "output")
    if output is None:
        error = one_of(response, "error") or result.get("error") or "no answer"
        return {"run_type": "llm", "inputs": row, "outputs": None, "error": str(error)}
    calls = objects(output)
    if calls is not None and all(isinstance(call.get("function"), dict) for call in calls):
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    else:
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        message = {"role": "assistant", "content": text}
    success = one_of(result, "success") if result.get("gradingResult") or result.get("success") is False else None
    ended = one_of(response, "finishReason")
    return {**row, "choices": [{"message": message, "finish_reason": ended}], "success": success}


def _turns_in_yaml(raw: str) -> Any:
    """The turns of a prompt that promptfoo took from YAML; one without a role where they are none, to be refused, and
    where they refer to each other: a few such lines make millions.
    """
    import yaml  # here: each worker would pay for it at its start, and hardly any meets such a prompt

    try:
        refers = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(raw))
        turns = [{"role": None}] if refers else yaml.safe_load(raw)
        return json.loads(json.dumps(turns, default=_date))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # as of a date that no calendar has
        return [{"role": None}]


def _date(value: Any) -> str:
    """What YAML reads as a date, as text again. Raises TypeError for what else JSON does not have."""
    if not isinstance(value, date):
        raise TypeError
    return value.isoformat()


def _right_choice(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Of lm-eval's choices the one that it calls right, behind what stands in front of all of them."""
    given = record.get("arguments")
    calls = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else []
    pairs = [tuple(call.values()) if isinstance(call, dict) else tuple(call) for call in calls if call]
    target = str(record.get("target"))
    number = int(target) if target.isdecimal() and len(target) <= len(str(len(pairs))) else len(pairs)
    if len(pairs) < 2 or number >= len(pairs):
        return None
    if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs):
        return None
    asked = {pair[0] for pair in pairs}
    return [{"prompt": asked.pop(), "completion": pairs[number][1].strip()}] if len(asked) == 1 else None


def _table(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """A table with the names of its columns beside its rows, as W&B, MLflow and pandas write them."""
    names, rows = record.get("columns"), record.get("data")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        return None
    return [dict(zip(names, row, strict=False)) for row in rows] if all(len(r) == len(names) for r in rows) else None

"""Results of promptfoo, in a file of all or one a line. What the model under test said is learned as far as the result
calls it right: rows say so in `success`.

https://www.promptfoo.dev/docs/configuration/outputs/
"""

import json
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects, one_of, parsed

YAML_TURNS = "- role:"


def recognise(record: Row) -> bool:
    results = _results(record)
    return isinstance(results, list) and bool(results) and all(map(_is_promptfoo, results))


def rows(record: Row) -> Iterator[Row]:
    return map(_promptfoo_row, _results(record))


def _results(record: Row) -> Any:
    return one_of(record.get("results"), "results") or record.get("results") or [record]


def _is_promptfoo(result: Any) -> bool:
    """Return whether a result holds the prompt as it was sent, and what came back."""
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
    """Return the turns of a prompt that promptfoo took from YAML; one without a role, to be refused, if they are not
    turns, or if YAML aliases would expand to millions.
    """
    import yaml  # here: each worker would pay for it at its start, and hardly any meets such a prompt

    try:
        refers = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(raw))
        return json.loads(json.dumps([{"role": None}] if refers else yaml.safe_load(raw), default=_date))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # as of a date that no calendar has
        return [{"role": None}]


def _date(value: Any) -> str:
    """Return a date of YAML as text. Raise TypeError for other values that JSON lacks."""
    if not isinstance(value, date):
        raise TypeError
    return value.isoformat()


FORMAT = Format("promptfoo", recognise, rows, "batch", frozenset(("results", "vars")))

"""Results of promptfoo, in a file of all or one a line. What the model under test said is learned as far as the result
calls it right: rows say so in `success`.

https://www.promptfoo.dev/docs/configuration/outputs/
"""

import json
from collections.abc import Iterator
from operator import methodcaller
from typing import Any

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects, one_of, parsed

YAML_TURNS = "- role:"


def rows(record: Row) -> Iterator[Row]:
    """Yield the results, where each holds the prompt as it was sent, and what came back."""
    results = one_of(record.get("results"), "results") or record.get("results") or [record]
    if not isinstance(results, list) or not all(isinstance(one_of(one_of(r, "prompt"), "raw"), str) for r in results):
        return
    if not all("vars" in r and ("response" in r or "error" in r) for r in results):
        return
    for result in results:
        raw, response = result["prompt"]["raw"], result.get("response")
        turns = _turns_in_yaml(raw) if raw.startswith(YAML_TURNS) else parsed(raw)
        are_turns = objects(turns) is not None and all("role" in turn for turn in turns)
        row: dict[str, Any] = {"messages": turns} if are_turns else {"prompt": raw}
        output = one_of(response, "output")
        if output is None:
            error = one_of(response, "error") or result.get("error") or "no answer"
            yield {"run_type": "llm", "inputs": row, "outputs": None, "error": str(error)}
            continue
        calls = objects(output)
        if calls is not None and all(isinstance(call.get("function"), dict) for call in calls):
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        else:
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            message = {"role": "assistant", "content": text}
        judged = result.get("gradingResult") or result.get("success") is False
        choice = {"message": message, "finish_reason": one_of(response, "finishReason")}
        yield {**row, "choices": [choice], "success": one_of(result, "success") if judged else None}


def _turns_in_yaml(raw: str) -> Any:
    """Return the turns of a prompt that promptfoo took from YAML; one without a role, to be refused, if they are not
    turns, or if YAML aliases would expand to millions.
    """
    import yaml  # here: each worker would pay for it at its start, and hardly any meets such a prompt

    try:
        refers = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(raw))
        # Of the values that JSON lacks only a date is a text.
        written = methodcaller("isoformat")
        return json.loads(json.dumps([{"role": None}] if refers else yaml.safe_load(raw), default=written))
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):  # as of a date that no calendar has
        return [{"role": None}]


FORMAT = Batch("promptfoo", rows, needs=frozenset(("results", "vars")))

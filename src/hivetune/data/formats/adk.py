"""A set of evaluation cases of Google's Agent Development Kit. Calls whose results it does not hold are left out.

https://google.github.io/adk-docs/evaluate/
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, listed, names, objects, one_of


def rows(row: Row) -> Iterator[Row]:
    cases = objects(row["eval_cases"]) or []
    if not all(objects(case.get("conversation")) for case in cases):
        return
    for case in cases:
        turns: list[dict[str, Any]] = []
        left_out: dict[str, Any] = {}
        for invocation in case["conversation"]:
            between = invocation.get("intermediate_data")
            calls, results = listed(one_of(between, "tool_uses")), listed(one_of(between, "tool_responses"))
            turns.append({**(invocation.get("user_content") or {}), "role": "user"})
            if calls and len(calls) == len(results):
                turns.append({"role": "model", "parts": [{"functionCall": call} for call in calls]})
                turns.append({"role": "tool", "content": [{"functionResponse": result} for result in results]})
            elif calls:
                left_out = {"left_out": ["left-out-columns"]}
            contents = [event.get("content") for event in objects(one_of(between, "invocation_events")) or []]
            contents.append(invocation.get("final_response") or {})
            turns += [{**content, "role": "model"} for content in contents if isinstance(content, dict)]
        yield {"hivetune_session": "adk", "session": case.get("eval_id"), "messages": turns, **left_out}


FORMAT = Batch("adk", rows, needs=names("eval_cases"))

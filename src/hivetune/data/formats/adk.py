"""A set of evaluation cases of Google's Agent Development Kit. Calls whose results it does not hold are left out.

https://google.github.io/adk-docs/evaluate/
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, listed, objects, one_of


def recognise(row: Row) -> bool:
    cases = objects(row["eval_cases"])
    return cases is not None and all(objects(case.get("conversation")) for case in cases)


def rows(row: Row) -> Iterator[Row]:
    return map(_case, row["eval_cases"])


def _case(case: Mapping[str, Any]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for invocation in case["conversation"]:
        between = invocation.get("intermediate_data")
        calls, results = listed(one_of(between, "tool_uses")), listed(one_of(between, "tool_responses"))
        turns.append({**(invocation.get("user_content") or {}), "role": "user"})
        if calls and len(calls) == len(results):
            turns.append({"role": "model", "parts": [{"functionCall": call} for call in calls]})
            turns.append({"role": "tool", "content": [{"functionResponse": result} for result in results]})
        elif calls:
            left_out.add("left-out-columns")
        events = objects(one_of(between, "invocation_events")) or []
        turns += [_turn(event["content"]) for event in events if isinstance(event.get("content"), dict)]
        turns.append({**(invocation.get("final_response") or {}), "role": "model"})
    row = {"hivetune_session": "adk", "session": case.get("eval_id"), "messages": turns}
    return {**row, "left_out": sorted(left_out)} if left_out else row


def _turn(content: Mapping[str, Any]) -> dict[str, Any]:
    gives = any(one_of(part, "function_response", "functionResponse") for part in listed(content.get("parts")))
    return {"role": "tool", "content": content["parts"]} if gives else {**content, "role": "model"}


FORMAT = Format("adk", recognise, rows, "batch", needs=frozenset(("eval_cases",)))

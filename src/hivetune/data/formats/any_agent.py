"""Traces of any-agent: the request stands in the first call of the model, and each span after it only says what came of
it. All spans of one agent are one conversation.

https://mozilla-ai.github.io/any-agent/tracing/
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects, one_of, parsed
from hivetune.data.pieces.spans import attributes, without_wrapper

_KIND, _CALL, _TOOL = "gen_ai.operation.name", "call_llm", "execute_tool"
_REQUEST, _RESPONSE = "gen_ai.input.messages", "gen_ai.output"


def rows(record: Row) -> Iterator[Row]:
    """Yield the conversations of a trace, one for each agent. None where its spans are another program's."""
    agents: dict[Any, list[dict[str, Any]]] = {}
    for span in objects(without_wrapper(dict(record)).get("spans")) or []:
        span_attributes = attributes(span.get("attributes"))
        if span_attributes.get(_KIND) in (_CALL, _TOOL):
            agents.setdefault(one_of(span.get("parent"), "span_id"), []).append(span_attributes)
    for spans in agents.values():
        if any(_is_answered(step) for step in spans) and (turns := _turns(spans)):
            yield {"hivetune_session": "any-agent", "messages": turns}


def _is_answered(span: Mapping[str, Any]) -> bool:
    return span.get(_KIND) == _CALL and isinstance(span.get(_RESPONSE), str)


def _turns(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the question and its answer. Empty if no call has the request."""
    turns: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls of tools without their results
    for index, span in enumerate(spans):
        request = objects(parsed(span.get(_REQUEST)))
        if span[_KIND] == _CALL and request is not None:
            turns = list(request)
        if not turns:
            return []
        if _is_answered(span):
            # A text, or a list of calls, which have no ids there.
            output, calls = span[_RESPONSE], objects(parsed(span[_RESPONSE]))
            are_calls = calls is not None and all("tool.name" in call for call in calls)
            waiting = [
                {"id": f"call_{index}_{number}", "name": call["tool.name"], "arguments": call.get("tool.args")}
                for number, call in enumerate(calls or () if are_calls else ())
            ]
            called = {"content": "", "tool_calls": [*waiting]} if waiting else {"content": output}
            turns.append({"role": "assistant", **called})
        elif span[_KIND] == _TOOL:
            call = next((pending for pending in waiting if pending["name"] == span.get("gen_ai.tool.name")), None)
            if call is not None:
                waiting.remove(call)
                turns.append({"role": "tool", "content": str(span.get(_RESPONSE, "")), "tool_call_id": call["id"]})
    return turns


FORMAT = Batch("any-agent", rows, needs=frozenset(("spans", "trace", "data")))

"""Traces of any-agent: the request stands in the first call of the model, and each span behind it only says what came
of it. All spans of one agent are one conversation.

https://mozilla-ai.github.io/any-agent/tracing/
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects, one_of, parsed
from hivetune.data.pieces.spans import attributes, without_wrapper

_KIND, _CALL, _TOOL = "gen_ai.operation.name", "call_llm", "execute_tool"
_ASKED, _ANSWERED = "gen_ai.input.messages", "gen_ai.output"


def recognise(record: Row) -> bool:
    return next(rows(record), None) is not None


def rows(record: Row) -> Iterator[Row]:
    """Yield the conversations of a trace, one for each agent. None where its spans are another program's."""
    agents: dict[Any, list[dict[str, Any]]] = {}
    for span in objects(without_wrapper(dict(record)).get("spans")) or []:
        said = attributes(span.get("attributes"))
        if said.get(_KIND) in (_CALL, _TOOL):
            agents.setdefault(one_of(span.get("parent"), "span_id"), []).append(said)
    for spans in agents.values():
        if any(_is_answered(one) for one in spans) and (turns := _turns(spans)):
            yield {"hivetune_session": "any-agent", "messages": turns}


def _is_answered(said: Mapping[str, Any]) -> bool:
    return said.get(_KIND) == _CALL and isinstance(said.get(_ANSWERED), str)


def _turns(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was asked and what came of it. Nothing where no call holds the request."""
    turns: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls of tools without their results
    for place, said in enumerate(spans):
        asked = objects(parsed(said.get(_ASKED)))
        if said[_KIND] == _CALL and asked is not None:
            turns = list(asked)
        if not turns:
            return []
        if _is_answered(said):
            turn = _answer(said[_ANSWERED], place)
            waiting = list(turn.get("tool_calls", ()))
            turns.append(turn)
        elif said[_KIND] == _TOOL:
            call = next((one for one in waiting if one["name"] == said.get("gen_ai.tool.name")), None)
            if call is not None:
                waiting.remove(call)
                turns.append({"role": "tool", "content": str(said.get(_ANSWERED, "")), "tool_call_id": call["id"]})
    return turns


def _answer(output: str, place: int) -> dict[str, Any]:
    """Return a text, or a list of calls, which have no ids there."""
    calls = objects(parsed(output))
    if calls is None or not all("tool.name" in call for call in calls):
        return {"role": "assistant", "content": output}
    made = [
        {"id": f"call_{place}_{number}", "name": call["tool.name"], "arguments": _arguments(call.get("tool.args"))}
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value or {})


FORMAT = Format("any-agent", recognise, rows, "batch", frozenset(("spans", "trace", "data")))

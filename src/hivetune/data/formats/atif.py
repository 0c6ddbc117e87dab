"""Trajectories in the Agent Trajectory Interchange Format.

https://www.harborframework.com/docs/agents/trajectory-format
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, objects, one_of
from hivetune.data.pieces.turns import in_order, read_messages


def recognise(row: Row) -> bool:
    return str(row.get("schema_version")).startswith("ATIF") and objects(row.get("steps")) is not None


def rows(row: Row) -> Conversation:
    """Return each step as a turn, an agent's turn with its calls and their results. Notes of the program are
    removed.
    """
    turns: list[dict[str, Any]] = []
    notes = False
    for step in row["steps"]:
        source, content = step.get("source"), step.get("message") or ""
        if source == "agent":
            turns += _agent_turns(step, content)
        elif source == "system" and any(turn["role"] == "user" for turn in turns):
            notes = True
        else:
            turns.append({"role": source, "content": content})
    messages, changed = in_order(read_messages(turns, None))
    tools = read_tools(one_of(row.get("agent"), "tool_definitions"))
    return Conversation("atif", messages, tools, changed=(*changed, *(("program-notes",) if notes else ())))


def _agent_turns(step: Mapping[str, Any], content: Any) -> list[dict[str, Any]]:
    calls = [
        {"id": call.get("tool_call_id"), "name": call.get("function_name"), "arguments": call.get("arguments")}
        for call in objects(step.get("tool_calls")) or []
    ]
    turn = {"role": "assistant", "content": content, "reasoning_content": step.get("reasoning_content")}
    results = [
        {"role": "tool", "content": result.get("content"), "tool_call_id": result.get("source_call_id")}
        if result.get("source_call_id")
        else {"role": "user", "content": result.get("content") or ""}  # a terminal, which the agent was shown
        for result in objects(one_of(step.get("observation"), "results")) or []
    ]
    return [{**turn, "tool_calls": calls} if calls else turn, *results]


FORMAT = Format("atif", recognise, rows, needs=frozenset(("steps",)))

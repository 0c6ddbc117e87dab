"""Trajectories in the Agent Trajectory Interchange Format.

https://www.harborframework.com/docs/agents/trajectory-format
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import read_tools
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.turns import conversation_of, read_messages


def read(row: Row) -> Conversation | None:
    """Return each step as a turn, an agent's turn with its calls and their results. Notes of the program are
    removed.
    """
    if not str(row.get("schema_version")).startswith("ATIF") or objects(row["steps"]) is None:
        return None
    turns: list[dict[str, Any]] = []
    notes = False
    for step in row["steps"]:
        source, content = step.get("source"), step.get("message") or ""
        if source == "system" and any(turn["role"] == "user" for turn in turns):
            notes = True
            continue
        turns.append({"role": source, "content": content})
        if source != "agent":
            continue
        turns[-1] |= {"role": "assistant", "reasoning_content": step.get("reasoning_content")}
        if calls := objects(step.get("tool_calls")):
            turns[-1]["tool_calls"] = [{**call, "name": call.get("function_name")} for call in calls]
        for result in objects(one_of(step.get("observation"), "results")) or []:
            # Without a call it is a terminal, which the agent was shown.
            called = {"role": "tool", "tool_call_id": result.get("source_call_id")}
            shown = called if result.get("source_call_id") else {"role": "user"}
            turns.append({**shown, "content": result.get("content") or ""})
    tools = read_tools(one_of(row.get("agent"), "tool_definitions"))
    return conversation_of("atif", read_messages(turns, None), tools, ("program-notes",) if notes else ())


FORMAT = Format("atif", read, needs=names("steps"))

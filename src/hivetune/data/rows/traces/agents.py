"""What agent frameworks keep of their runs: steps of smolagents and of ATIF, chats of AutoGen, tasks of CrewAI."""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.said import Conversation, Row, RowLayout, listed, objects, one_of
from hivetune.data.pieces.turns import in_order, is_item, read_messages

CREW_KEY, ADK_KEY = "tasks_output", "eval_cases"
CODE_TOOL = "python_interpreter"  # smolagents' name for code that stands in the answer itself
LAST_TOOL = "final_answer"


def are_smolagents_steps(steps: Sequence[Any]) -> bool:
    """Whether a list is the memory of an agent of smolagents: its task, then its steps."""
    begun = [step for step in steps[:3] if isinstance(step, dict) and ("task" in step or "system_prompt" in step)]
    acted = (isinstance(step, dict) and "step_number" in step and "model_output" in step for step in steps)
    return bool(begun) and any(acted)


def smolagents_turns(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns of such a memory. Plans and the answer that the last step repeats are left out."""
    turns: list[dict[str, Any]] = []
    for step in steps:
        system = step.get("system_prompt") or (
            step.get("text") if "speaker" in step else None
        )  # as a line that is read
        if isinstance(system, str):
            turns.append({"role": "system", "content": system})
        elif isinstance(step.get("task"), str):
            turns.append({"role": "user", "content": step["task"]})
        elif "step_number" in step:
            turns += _acted(step)
    return turns


def _acted(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = step.get("model_output") or ""
    calls = [_call(call) for call in objects(step.get("tool_calls")) or []]
    last = next((call for call in calls if call["name"] == LAST_TOOL), None)
    error = one_of(step.get("error"), "message")
    seen = f"Error:\n{error}" if error else str(step.get("observations") or "")
    if last is not None:
        answer = one_of(last["arguments"], "answer") if isinstance(last["arguments"], dict) else last["arguments"]
        return [{"role": "assistant", "content": answer if isinstance(answer, str) else said}]
    if not calls or any(call["name"] == CODE_TOOL for call in calls):
        spoken = {"role": "assistant", "content": said}
        shown = seen if seen.startswith("Error") else f"Observation:\n{seen}"
        return [spoken] if step.get("is_final_answer") is True else [spoken, {"role": "user", "content": shown}]
    results = [
        {"role": "tool", "content": seen if call is calls[-1] else "", "tool_call_id": call["id"]} for call in calls
    ]
    return [{"role": "assistant", "content": said, "tool_calls": calls}, *results]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    return {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}


def are_turns_of_a_program(turns: Sequence[Any]) -> bool:
    """Whether a file lists the messages of one conversation as LangChain, Semantic Kernel or OpenAI's agents
    write them.
    """
    if len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns):
        return False
    if all(
        "lc" in turn and str(listed(turn.get("id"))[-1:]).endswith(("Message']", "MessageChunk']")) for turn in turns
    ):
        return True
    if all(isinstance(turn.get("Items"), list) and "Role" in turn for turn in turns):  # Semantic Kernel
        return True
    written = [is_item(turn) or (turn.get("type") == "message" and "status" in turn) for turn in turns]
    return any(written) and all(item or "role" in turn for item, turn in zip(written, turns, strict=True))


def crew_tasks(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tasks of a crew with what came of each."""
    tasks = objects(record.get(CREW_KEY))
    if tasks is None or not all("description" in task and "raw" in task for task in tasks):
        return None
    return [{"task": task["description"], "output": task["raw"], "agent": task.get("agent")} for task in tasks]


def adk_cases(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The conversations of a set of Google's ADK. Calls whose results it does not hold are left out."""
    cases = objects(record.get(ADK_KEY))
    if cases is None or not all(objects(case.get("conversation")) for case in cases):
        return None
    return [_adk_case(case) for case in cases]


def _adk_case(case: Mapping[str, Any]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for asked in case["conversation"]:
        between = asked.get("intermediate_data")
        calls, results = listed(one_of(between, "tool_uses")), listed(one_of(between, "tool_responses"))
        turns.append({**(asked.get("user_content") or {}), "role": "user"})
        if calls and len(calls) == len(results):
            turns.append({"role": "model", "parts": [{"functionCall": call} for call in calls]})
            turns.append({"role": "tool", "content": [{"functionResponse": result} for result in results]})
        elif calls:
            left_out.add("left-out-columns")
        events = objects(one_of(between, "invocation_events")) or []
        turns += [_adk_turn(event["content"]) for event in events if isinstance(event.get("content"), dict)]
        turns.append({**(asked.get("final_response") or {}), "role": "model"})
    row = {"hivetune_session": "adk", "session": case.get("eval_id"), "messages": turns}
    return {**row, "left_out": sorted(left_out)} if left_out else row


def _adk_turn(content: Mapping[str, Any]) -> dict[str, Any]:
    gives = any(one_of(part, "function_response", "functionResponse") for part in listed(content.get("parts")))
    return {"role": "tool", "content": content["parts"]} if gives else {**content, "role": "model"}


def _smolagents(name: str, row: Row) -> Conversation:
    return _done(name, smolagents_turns(row["steps"]))


def _atif(name: str, row: Row) -> Conversation:
    """Steps of who speaks, an agent's with its calls and what they gave back. Notes of the program are left out."""
    turns: list[dict[str, Any]] = []
    notes = False
    for step in row["steps"]:
        source, said = step.get("source"), step.get("message") or ""
        if source == "agent":
            turns += _of_atif(step, said)
        elif source == "system" and any(turn["role"] == "user" for turn in turns):
            notes = True
        else:
            turns.append({"role": source, "content": said})
    found = _done(name, turns, one_of(row.get("agent"), "tool_definitions"))
    return found._replace(changed=(*found.changed, "program-notes")) if notes else found


def _of_atif(step: Mapping[str, Any], said: Any) -> list[dict[str, Any]]:
    calls = [
        {"id": call.get("tool_call_id"), "name": call.get("function_name"), "arguments": call.get("arguments")}
        for call in objects(step.get("tool_calls")) or []
    ]
    turn = {"role": "assistant", "content": said, "reasoning_content": step.get("reasoning_content")}
    results = [
        {"role": "tool", "content": result.get("content"), "tool_call_id": result.get("source_call_id")}
        if result.get("source_call_id")
        else {"role": "user", "content": result.get("content") or ""}  # a terminal, which the agent was shown
        for result in objects(one_of(step.get("observation"), "results")) or []
    ]
    return [{**turn, "tool_calls": calls} if calls else turn, *results]


def _autogen(name: str, row: Row) -> Conversation:
    """AutoGen's result of a chat: whoever spoke first asked, since each agent writes the roles from where it stands."""
    turns = row["chat_history"]
    first = turns[0].get("name")
    return _done(name, [turn if turn["role"] == "tool" else {**turn, "role": _side(turn, first)} for turn in turns])


def _side(turn: Mapping[str, Any], first: Any) -> str:
    return "user" if turn.get("name") == first else "assistant"


def _is_autogen(row: Row) -> bool:
    turns = objects(row.get("chat_history"))
    return turns is not None and "cost" in row and all("role" in turn and "name" in turn for turn in turns)


def _done(name: str, turns: list[dict[str, Any]], tools: Any = None) -> Conversation:
    messages, changed = in_order(read_messages(turns, None))
    return Conversation(name, messages, read_tools(tools), changed=changed)


SMOLAGENTS = RowLayout(
    "smolagents",
    frozenset(("steps",)),
    lambda row: are_smolagents_steps(listed(row["steps"])),
    _smolagents,
    frozenset(("steps",)),
)
ATIF = RowLayout(
    "atif",
    frozenset(("steps",)),
    lambda row: str(row.get("schema_version")).startswith("ATIF") and objects(row.get("steps")) is not None,
    _atif,
    frozenset(("steps", "agent", "notes", "final_metrics")),
)
AUTOGEN = RowLayout(
    "autogen",
    frozenset(("chat_history",)),
    _is_autogen,
    _autogen,
    frozenset(("chat_history", "summary", "human_input")),
)

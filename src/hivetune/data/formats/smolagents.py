"""The memory of an agent of smolagents: its task, then its steps.

https://huggingface.co/docs/smolagents/tutorials/memory
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, listed, names, objects, one_of
from hivetune.data.pieces.turns import conversation_of, read_messages
from hivetune.data.reasons import RowRefused

CODE_TOOL = "python_interpreter"  # smolagents' name for code that stands in the answer itself
LAST_TOOL = "final_answer"


def are_steps(steps: Sequence[Any]) -> bool:
    """Return whether a list is such a memory."""
    begun = [step for step in steps[:3] if isinstance(step, dict) and ("task" in step or "system_prompt" in step)]
    acted = (isinstance(step, dict) and "step_number" in step and "model_output" in step for step in steps)
    return bool(begun) and any(acted)


def turns_of(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns of such a memory. Plans and the answer that the last step repeats are left out."""
    turns: list[dict[str, Any]] = []
    for step in steps:
        if not isinstance(step, dict):
            raise RowRefused("wrong-type", "steps: a list of objects")
        system = step.get("system_prompt") or ("speaker" in step and step.get("text"))  # as a line that is read
        if isinstance(system, str):
            turns.append({"role": "system", "content": system})
        elif isinstance(step.get("task"), str):
            turns.append({"role": "user", "content": step["task"]})
        elif "step_number" in step:
            turns += _acted(step)
    return turns


def _acted(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    output = step.get("model_output") or ""
    calls: list[dict[str, Any]] = []
    for call in objects(step.get("tool_calls")) or []:
        function = call["function"] if isinstance(call.get("function"), dict) else call
        calls.append({"id": call.get("id"), **{key: function.get(key) for key in ("name", "arguments")}})
    for call in calls:
        if call["name"] == LAST_TOOL:
            answer = one_of(call["arguments"], "answer") if isinstance(call["arguments"], dict) else call["arguments"]
            return [{"role": "assistant", "content": answer if isinstance(answer, str) else output}]
    error = one_of(step.get("error"), "message")
    observations = f"Error:\n{error}" if error else str(step.get("observations") or "")
    if not calls or any(call["name"] == CODE_TOOL for call in calls):
        spoken = {"role": "assistant", "content": output}
        shown = observations if observations.startswith("Error") else f"Observation:\n{observations}"
        return [spoken] if step.get("is_final_answer") is True else [spoken, {"role": "user", "content": shown}]
    results = [{"role": "tool", "content": "", "tool_call_id": call["id"]} for call in calls]
    results[-1]["content"] = observations
    return [{"role": "assistant", "content": output, "tool_calls": calls}, *results]


def read(row: Row) -> Conversation | None:
    if not are_steps(listed(row["steps"])):
        return None
    return conversation_of("smolagents", read_messages(turns_of(row["steps"]), None))


FORMAT = Format("smolagents", read, needs=names("steps"))

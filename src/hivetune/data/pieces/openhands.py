"""Events of OpenHands: actions of an agent and a user, each with what was observed of it, as they lie in trajectories.

What the model said stands in `tool_call_metadata.model_response`, the answer of the provider; one answer may hold the
calls of several actions. Older events name the action and its arguments alone; those of its newer library have a
class each, and the call as the provider wrote it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.pieces.said import one_of

_SPEAKERS = {"user": "user", "agent": "assistant"}
_WORDS = ("message", "finish")  # actions that are no calls
_STATES = ("recall", "change_agent_state", "condensation", "null", "start")
_SILENT = ("agent_state_changed", "recall", "null", "condense", "success_state", "user_rejected_state")
_WITHOUT = ("thought", "security_risk", "confirmation_state", "is_confirmed", "hidden", "keep_prompt", "blocking")


def is_openhands(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list holds these events: each an action or an observation, with its source."""
    if _are_of_classes(events):
        return True
    named = [one for one in events if isinstance(one.get("action", one.get("observation")), str)]
    return (
        len(named) == len(events) > 1
        and all(one.get("source") in ("user", "agent", "environment", None) for one in events)
        and any(isinstance(one.get("args"), dict) for one in events)
        and any("observation" in one for one in events)
    )


def openhands_turns(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns of such events, without what the program says of its own state."""
    if _are_of_classes(events):
        return [turn for event in events if (turn := _of_class(event)) is not None]
    turns: list[dict[str, Any]] = []
    answers: set[str] = set()
    for event in events:
        response = one_of(event.get("tool_call_metadata"), "model_response")
        if "observation" in event:
            turns += _observed(event, turns)
        elif event.get("source") == "agent" and isinstance(one_of(response, "choices"), list) and response["choices"]:
            name = str(one_of(response, "id") or len(turns))
            if name not in answers:
                answers.add(name)
                turns.append({"role": "assistant", **(one_of(response["choices"][0], "message") or {})})
        else:
            turns += _done(event)
    return turns


def _are_of_classes(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list holds events of the newer library: `MessageEvent`, `ActionEvent` and so on."""
    kinds = {str(one.get("kind")) for one in events}
    return len(events) > 1 and "MessageEvent" in kinds and all("kind" in one and "source" in one for one in events)


def _of_class(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """The turn that an event of the newer library is; None when it is a note."""
    kind, call_id = event["kind"], one_of(event, "tool_call_id")
    if kind == "SystemPromptEvent":
        return {"role": "system", "content": one_of(event.get("system_prompt"), "text")}
    if kind == "MessageEvent" and isinstance(event.get("llm_message"), dict):
        return {"role": "user", **event["llm_message"]}
    if kind == "ActionEvent" and isinstance(event.get("tool_call"), dict):
        thoughts = {"reasoning_content": event.get("reasoning_content") or None}
        return {"role": "assistant", "content": event.get("thought"), "tool_calls": [event["tool_call"]], **thoughts}
    observed = event.get("error") if kind == "AgentErrorEvent" else one_of(event.get("observation"), "content")
    if call_id is None or observed is None:
        return None
    return {"role": "tool", "content": observed, "tool_call_id": call_id}


def _done(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an action says that no provider's answer stands behind."""
    action, source = event["action"], event.get("source")
    args = event.get("args")
    given: Mapping[str, Any] = args if isinstance(args, dict) else {}
    said = one_of(given, "content", "final_thought", "thought") or event.get("message")
    role = "system" if action == "system" else _SPEAKERS.get(str(source))
    if role is None or action in _STATES:
        return []
    if role != "assistant" or action in _WORDS:
        spoken = isinstance(said, str) and said and action in (*_WORDS, "system")
        return [{"role": role, "content": said}] if spoken else []
    thought = given.get("thought")
    arguments = {key: value for key, value in given.items() if key not in _WITHOUT and value is not None}
    call = {"name": action, "arguments": arguments}
    return [{"role": role, "content": thought if isinstance(thought, str) else "", "tool_calls": [call]}]


def _observed(event: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What came of a call; nothing for what a program says of itself, or of what was no call."""
    last = turns[-1] if turns else {}
    if event["observation"] in _SILENT or not (last.get("tool_calls") or last.get("role") == "tool"):
        return []
    call_id = one_of(event.get("tool_call_metadata"), "tool_call_id")
    return [{"role": "tool", "content": event.get("content"), **({"tool_call_id": call_id} if call_id else {})}]

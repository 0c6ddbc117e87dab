"""Trajectories of OpenHands: actions and observations, one an event. The model's words stand in
`tool_call_metadata.model_response`, the answer of the provider; one answer may hold the calls of several actions. Older
events name the action and its arguments alone; those of the newer library have a class each, and the call as the
provider wrote it.

https://docs.all-hands.dev
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedRow, conversation, events, is_row
from hivetune.data.pieces.said import Row, listed, one_of
from hivetune.data.reasons import RowRefused

_SPEAKERS = {"user": "user", "agent": "assistant"}
_MESSAGE_ACTIONS = ("message", "finish")  # actions that are no calls
_STATES = ("recall", "change_agent_state", "condensation", "null", "start")
_SILENT = ("agent_state_changed", "recall", "null", "condense", "success_state", "user_rejected_state")
_WITHOUT = ("thought", "security_risk", "confirmation_state", "is_confirmed", "hidden", "keep_prompt", "blocking")


def _are_of_classes(events: Sequence[Row]) -> bool:
    """Return whether a list holds events of the newer library: `MessageEvent`, `ActionEvent` and so on."""
    kinds = {str(e.get("kind")) for e in events}
    return len(events) > 1 and "MessageEvent" in kinds and all("kind" in e and "source" in e for e in events)


def recognise(head: Head) -> bool:
    """Return whether each of the first events is an action or an observation, with its source."""
    named = all(isinstance(event.get("action", event.get("observation")), str) for event in head.events)
    return _are_of_classes(head.events) or (
        named
        and len(head.events) > 1
        and all(event.get("source") in ("user", "agent", "environment", None) for event in head.events)
        and any(isinstance(event.get("args"), dict) for event in head.events)
        and any("observation" in event for event in head.events)
    )


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield the one row of a file, without the program's own state."""
    whole: list[dict[str, Any]] = []
    begin = 0
    for number, event, text in events(lines):
        if event is None:
            yield number, RowRefused("broken-line")
        elif is_row(event):
            yield number, text
        else:
            whole.append(event)
            begin = begin or number
    if _are_of_classes(whole):
        turns = [turn for event in whole if (turn := _of_class(event)) is not None]
    else:
        turns = _turns(whole)
    if whole:
        yield begin, conversation("openhands", turns, ["program-notes"])


def _turns(events: Sequence[Row]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    answers: set[str] = set()
    for event in events:
        metadata = event.get("tool_call_metadata")
        response = one_of(metadata, "model_response")
        choices = listed(one_of(response, "choices"))
        if "observation" in event:
            last = turns[-1] if turns else {}
            if event["observation"] not in _SILENT and (last.get("tool_calls") or last.get("role") == "tool"):
                call_id = one_of(metadata, "tool_call_id")
                ids = {"tool_call_id": call_id} if call_id else {}
                turns.append({"role": "tool", "content": event.get("content"), **ids})
        elif event.get("source") == "agent" and choices:
            name = str(one_of(response, "id") or len(turns))
            if name not in answers:
                answers.add(name)
                turns.append({"role": "assistant", **(one_of(choices[0], "message") or {})})
        else:  # an action without a provider's answer
            turns += _acted(event)
    return turns


def _acted(event: Row) -> Iterator[dict[str, Any]]:
    action = event.get("action")
    arguments = event["args"] if isinstance(event.get("args"), dict) else {}
    text = one_of(arguments, "content", "final_thought", "thought") or event.get("message")
    role = "system" if action == "system" else _SPEAKERS.get(str(event.get("source")))
    if role is None or action in _STATES:
        return
    if role == "assistant" and action not in _MESSAGE_ACTIONS:
        thought = arguments.get("thought")
        given = {key: value for key, value in arguments.items() if key not in _WITHOUT and value is not None}
        call = {"name": action, "arguments": given}
        yield {"role": role, "content": thought if isinstance(thought, str) else "", "tool_calls": [call]}
    elif isinstance(text, str) and text and action in (*_MESSAGE_ACTIONS, "system"):
        yield {"role": role, "content": text}


def _of_class(event: Row) -> dict[str, Any] | None:
    """Return the turn that an event of the newer library is; None when it is a note."""
    kind, call_id = event.get("kind"), one_of(event, "tool_call_id")
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


FORMAT = Log("openhands", recognise, rows)

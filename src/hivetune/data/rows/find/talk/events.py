"""Streams in which several kinds of events stand: which are somebody's words, which calls of tools, which notes.

A kind is known by the words of its name (`user_message`, `llm.response`, `tool_call`), the text of each kind by where
that kind keeps it. An unknown kind that holds written text makes the stream one that nobody reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import names, one_of, parsed
from hivetune.data.rows.find.names import likely_contents, names_kind, role_of, words
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.records import Role

KIND_SHARE = 0.9  # of the events, that must name their kind
_TOOLS = names("mcp tool tools function functions action actions command observation")
_CALLS = names("call calls use uses invoke invoked invocation action actions command execute")
_SYSTEM_PROMPT = names("prompt message instruction instructions")
# A part of something, or that it began: the whole stands in another event.
_PARTS = names(
    "delta deltas chunk chunks partial start started begin began stream streaming token tokens typing pending progress "
    "created added queued request requested requests running update updated"
)
_ROLES_OF_KINDS: dict[str, Role] = {
    **{"question": "user", "user_query": "user", "user_question": "user"},
    **{"answer": "assistant", "final_answer": "assistant", "final_response": "assistant", "reply": "assistant"},
}
_RESULTS = names("result results output outputs observation response")  # of tools
_PROGRAM = names(
    "error errors warning warn status info debug log metric metrics usage ping pong heartbeat keepalive init "
    "initialize initialized session config configuration settings meta metadata control summary title end ended stop "
    "stopped done complete completed finish finished result results snapshot state step turn run trace event feedback "
    "rating hook hooks checkpoint connect connected disconnect disconnected open opened close closed ready abort "
    "aborted cancel cancelled timeout retry retrieval embedding lifecycle telemetry thinking reasoning system notice "
    "notification attachment permission approval span response"
)
_THOUGHTS = names("thinking thought thoughts reasoning")  # of a model, under the same name as its words
CALL_LISTS = ("tool_calls", "tool_requests", "tool_uses", "tool_invocations")


class EventKinds(NamedTuple):
    """`kind`: the path that names the kind of an event. For each kind: who speaks, and the path of what is said;
    `notes` are the kinds that say nothing.
    """

    kind: str
    roles: Mapping[str, Role]
    contents: Mapping[str, str]
    notes: frozenset[str]


def event_kinds(flats: Sequence[Mapping[str, Any]]) -> EventKinds | None:
    """How the events of a stream, as paths with their values, are told apart; None where they are not, for certain."""
    paths = dict.fromkeys(path for one in flats for path in one if names_kind(path))
    for path in sorted(paths, key=lambda path: path.count(".")):
        by_kind: dict[str, list[Mapping[str, Any]]] = {}
        for one in flats:
            value = one.get(path)
            if isinstance(value, str) and value:
                by_kind.setdefault(value, []).append(one)
        if sum(map(len, by_kind.values())) >= KIND_SHARE * len(flats) and len(by_kind) > 1:
            found = _told_apart(path, by_kind)
            if found is not None:
                return found
    return None


def _told_apart(path: str, by_kind: Mapping[str, Sequence[Mapping[str, Any]]]) -> EventKinds | None:
    roles: dict[str, Role] = {}
    contents: dict[str, str] = {}
    notes = set()
    for kind, events in by_kind.items():
        role, content = role_of_kind(kind), _content_of(events, path)
        content = content or (_result_of(events) if role == "tool" else None)
        if role == "tool" and all(call_in(one) is not None for one in events):
            roles[kind] = "assistant"
        elif role is not None and content is not None and not (role == "tool" and _CALLS & set(words(kind))):
            roles[kind], contents[kind] = role, content
        elif role == "tool" or (role is None and not tells_a_note(kind) and _is_written(events)):
            return None  # something that a model read or said, and nobody knows what
        else:
            notes.add(kind)
    if not {"user", "assistant"} <= {roles[kind] for kind in contents}:
        return None
    return EventKinds(path, roles, contents, frozenset(notes))


def role_of_kind(kind: str) -> Role | None:
    """Who speaks in events of a kind; "tool" for calls and results alike; None for parts of something and for notes."""
    said = frozenset(words(kind))
    if said & (_PARTS | _THOUGHTS):
        return None
    if said & _TOOLS:
        return "tool"
    role = _ROLES_OF_KINDS.get(plain_name(kind)) or role_of(kind)
    return None if role == "system" and not said & _SYSTEM_PROMPT else role  # mostly what a program says of itself


def turn_of(flat: Mapping[str, Any], kinds: EventKinds) -> dict[str, Any] | None:
    """The turn that an event is; None when it is a note or says nothing."""
    kind = flat.get(kinds.kind)
    role = kinds.roles.get(kind) if isinstance(kind, str) else None
    if role is None or not isinstance(kind, str):
        return None
    path = kinds.contents.get(kind)
    if path is None:
        call = call_in(flat)
        return None if call is None else {"role": "assistant", "content": None, "tool_calls": [call]}
    said, calls = flat.get(path), calls_of(flat)
    if role == "assistant" and calls:
        return {"role": role, "content": said, "tool_calls": calls}
    if said is None or said == "" or said == []:
        return None
    if role == "tool":
        ids = {plain_name(name.rpartition(".")[2]): value for name, value in flat.items()}
        found = {"tool_call_id": one_of(ids, "tool_call_id", "call_id", "tool_use_id"), "name": _tool_name(ids)}
        return {"role": role, "content": said, **{name: value for name, value in found.items() if value}}
    return {"role": role, "content": said}


def call_in(flat: Mapping[str, Any]) -> dict[str, Any] | None:
    """The call of a tool that an event is: its name, its arguments, and its result where that is there too."""
    plain = {plain_name(path.rpartition(".")[2]): value for path, value in flat.items()}
    name = _tool_name(plain)
    given = next((plain[key] for key in ("arguments", "args", "input", "parameters", "params") if key in plain), None)
    if given is None:
        given = _opened(flat, "arguments", "args", "input", "parameters", "params")
    if name is None or not isinstance(parsed(given), dict):
        return None
    call = {"name": name, "arguments": parsed(given)}
    result = one_of(plain, "result", "output") or _opened(flat, "result", "output")
    call |= {"result": result} if result else {}
    call_id = one_of(plain, "call_id", "tool_call_id", "tool_use_id")
    return {**call, "id": call_id} if isinstance(call_id, str) else call


def calls_of(flat: Mapping[str, Any]) -> list[Any]:
    """The calls that the event of an answer holds as a list."""
    named = (value for path, value in flat.items() if plain_name(path.rpartition(".")[2]) in CALL_LISTS)
    return next((calls for calls in map(parsed, named) if isinstance(calls, list) and calls), [])


def _opened(flat: Mapping[str, Any], *names: str) -> dict[str, Any] | None:
    """An object of one of these names, which `flat` has opened."""
    for key in names:
        mark = f"{key}."
        found = {
            path.partition(mark)[2]: value
            for path, value in flat.items()
            if path.startswith(mark) or f".{mark}" in path
        }
        if found:
            return found
    return None


def _tool_name(plain: Mapping[str, Any]) -> str | None:
    name = one_of(plain, "tool_name", "tool", "function", "function_name", "name")
    return name if isinstance(name, str) and name else None


def _content_of(events: Sequence[Mapping[str, Any]], kind_path: str) -> str | None:
    """Where the events of one kind say their words; one that holds calls may have none."""
    events = [one for one in events if not calls_of(one)] or events
    paths = dict.fromkeys(path for one in events for path in one if path != kind_path)
    for path in likely_contents(iter(paths)):
        if 2 * sum(isinstance(one.get(path), str | list) and bool(one[path]) for one in events) >= len(events):
            return path
    return None


def _result_of(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Where the events of a tool say what it gave back, under another name than somebody's words."""
    named = [path for path in events[0] if plain_name(path.rpartition(".")[2]) in _RESULTS]
    return named[0] if len(named) == 1 and all(one.get(named[0]) is not None for one in events) else None


def tells_a_note(kind: str) -> bool:
    """Whether the name of a kind is one for what a program says of its own work."""
    said = frozenset(words(kind))
    return bool(said & _PROGRAM) or bool(said & _PARTS)


def _is_written(events: Sequence[Mapping[str, Any]]) -> bool:
    return any(looks_like_content(value) for one in events for value in one.values() if isinstance(value, str))


def are_spans(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list holds the spans of a trace: steps, of which each may repeat another, and no turns."""
    return all(map(is_span, items))


def is_span(item: Mapping[str, Any]) -> bool:
    """Whether this is a step of a trace. A message may name the span that it was said in."""
    named = one_of(item, *_SPAN_IDS) or one_of(item.get("context"), *_SPAN_IDS)
    return "span_data" in item or (bool(named) and any(key in item for key in _OF_SPANS))


_SPAN_IDS = ("span_id", "spanId", "spanID")
_OF_SPANS = ("attributes", "span_attributes", "tags", "input", "inputs", "start_time", "startTime", "startTimeUnixNano")

"""Rows that are one message each: by which of their columns they belong together, and what each says.

Decided on the first rows of a file; None where they are no messages, or where nothing says whose they are.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hivetune.data.pieces.fields import SESSION, TIME, as_time, plain_name
from hivetune.data.pieces.said import objects
from hivetune.data.pieces.turns import ROLES
from hivetune.data.rows.find.names import likely_contents, names_kind, names_role, part_of, role_of
from hivetune.data.rows.find.talk.branches import are_one_tree, links_of
from hivetune.data.rows.find.talk.events import EventKinds, event_kinds, tells_a_note, turn_of
from hivetune.data.rows.find.talk.turn_lists import flat, roles_of
from hivetune.data.rows.layouts.columns import CONTENT, looks_like_content
from hivetune.records import Role

MIN_MESSAGES = 2
MESSAGE_SHARE = 0.9  # of the first rows, that must be messages
CERTAIN_SHARE = 0.5  # of the turns of what is a conversation for certain, that must be another's than the one before
MAX_ORDER = 1e300  # an integer of 310 digits is no float
MAX_ROLE_CHARS = 30
MAX_WITHOUT_SESSION = 500  # rows of a file that is one conversation and names none
_ORDER = (
    *("turn", "turn_id", "turn_idx", "turn_index", "turn_number", "turn_no", "utterance_idx", "utterance_id", "seq"),
    *("sequence", "sequence_number", "message_index", "message_number", "position", "step", "index", "idx", "order"),
    "line_no",
)
_GROUPS = (
    *SESSION,
    "dialog",
    "dialogue",
    "conversation",
    "chat",
    "call_id",
    "convo_id",
    "ticket_id",
    "case_id",
    "run_id",
    "participant_id",
)
_EXAMPLES = frozenset(ROLES) | {
    "agent",
    "true",
    "false",
    "0",
    "1",
}  # who speaks in examples for a prompt; a client is somebody
_MESSAGES = frozenset(("message", "msg", "chat_message"))  # kinds of rows
# Where the messages of LangChain and of Cursor say who speaks and what: nobody writes examples so.
_CERTAIN = (("type", ".".join(("data", "content"))), ("role", "message.content"))
_OF_CALLS = ("tool_use", "tool_result", "tool_call")  # kinds of parts
_WITH_CALLS = ("tool_calls", "function_call", "tool_call_id", "reasoning_content")


class MessageShape(NamedTuple):
    """Which path of a row says what. `session` None: the whole file is one conversation. `kinds`: the events are of
    several kinds; then `role` and `content` say nothing. `begins`: each system prompt begins a conversation.
    """

    session: str | None
    role: str
    roles: Mapping[str, Role]
    content: str
    order: str | None
    kinds: EventKinds | None = None
    begins: bool = False


class SaidLine(NamedTuple):
    """`turn` None: a program's note. `links`: the ids of the message and of the one before it, where it names them."""

    session: str
    turn: dict[str, Any] | None
    order: float | None
    links: Mapping[str, Any]


def messages_shape(events: Sequence[Mapping[str, Any]], *, whole: bool, talk: bool = False) -> MessageShape | None:
    """How the messages of a file are written. `whole`: `events` are all rows of the file; `talk`: its name says that it
    is a conversation.
    """
    flats = [flat(event) for event in events]
    if len(flats) > MIN_MESSAGES and _is_head(flats[0], flats[1]):
        flats = flats[1:]
    if len(flats) < MIN_MESSAGES or _are_more(flats):
        return None
    session, time = _path(flats, _GROUPS, str | int), _path(flats, TIME, str | int | float)
    order = time or _path(flats, _ORDER, str | int | float)
    shape, said = _of_one_kind(flats, session, order) or _of_kinds(flats, session, order) or (None, [])
    if shape is None or session is not None:
        return shape
    if _begin_with_system(said):
        return shape._replace(begins=True)
    return shape if whole and _is_one(said, *_told(flats, shape, talk=talk, timed=time is not None)) else None


def _told(flats: Sequence[Mapping[str, Any]], shape: MessageShape, *, talk: bool, timed: bool) -> tuple[bool, bool]:
    """(whether something tells that messages are one conversation, whether it does for certain)."""
    certain = talk or (shape.role, shape.content) in _CERTAIN or are_one_tree(flats)
    return certain or timed or _names_parties(flats, shape), certain


def _names_parties(flats: Sequence[Mapping[str, Any]], shape: MessageShape) -> bool:
    """Whether the parties of messages are others than those of examples for a prompt; or the messages hold parts, or
    results of calls, as no such example does.
    """
    if any(one.get("tool_call_id") for one in flats):
        return True
    parts = [objects(one.get(shape.content)) for one in flats] if shape.content else []
    if parts and (None not in parts or any(part.get("type") in _OF_CALLS for held in parts for part in held or [])):
        return True
    parties = (str(one.get(shape.role)).strip().lower() for one in flats)
    return not (shape.kinds or _EXAMPLES.issuperset(parties))


def _is_head(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether a log begins with a line about itself, which has nobody's words: the next one has, under another name."""
    texts = {path for path, value in second.items() if isinstance(value, str | list) and value}
    said = likely_contents(iter(texts - first.keys()))
    return bool(said) and not any(looks_like_content(value) for value in first.values() if isinstance(value, str))


_Shaped = tuple[MessageShape, list[Role]]  # with who speaks in each message


def _of_one_kind(flats: Sequence[Mapping[str, Any]], session: str | None, order: str | None) -> _Shaped | None:
    """Rows that are all messages."""
    for role in _role_paths(flats):
        spoken = [one for one in flats if isinstance(one.get(role), str | bool | int)]
        found = roles_of(role, [one[role] for one in spoken])
        content = None if found is None or len(spoken) < MESSAGE_SHARE * len(flats) else _content(spoken, role)
        if found is not None and content is not None:
            roles = {str(one[role]).strip(): said for one, said in zip(spoken, found, strict=True)}
            return MessageShape(session, role, roles, content, order), found
    return None


def _are_more(flats: Sequence[Mapping[str, Any]]) -> bool:
    """Whether rows say of themselves that some are messages and some are something else that has a written text too."""
    for path in ("type", "kind", "event"):
        kinds = {one[path].lower(): one for one in flats if isinstance(one.get(path), str)}
        others = [one for kind, one in kinds.items() if kind not in _MESSAGES and tells_a_note(kind)]
        if kinds.keys() & _MESSAGES and any(looks_like_content(text) for one in others for text in one.values()):
            return True
    return False


def _of_kinds(flats: Sequence[Mapping[str, Any]], session: str | None, order: str | None) -> _Shaped | None:
    """Events of several kinds, some of them messages."""
    kinds = event_kinds(flats)
    if kinds is None:
        return None
    said = [kinds.roles[str(one[kinds.kind])] for one in flats if one.get(kinds.kind) in kinds.contents]
    return MessageShape(session, "", {}, "", order, kinds), said


def _is_one(roles: Sequence[Role], told: bool, certain: bool) -> bool:
    """Whether the messages of a file that names no session are one conversation. Where no time, no name of the file and
    no name of who speaks has `told` so, and no system prompt or greeting stands first, they may be examples.
    """
    return _takes_turns(roles, CERTAIN_SHARE if certain else MESSAGE_SHARE) and (
        told or roles[0] in ("system", "assistant")
    )


def is_event_like(event: Mapping[str, Any]) -> bool:
    """Whether a row could be a message or another event: a quick look before a whole sample is read."""
    one = flat(event)
    return any(map(names_kind, one)) or any(_are_roles([value]) for value in one.values())


def said_in(event: Mapping[str, Any], shape: MessageShape) -> SaidLine | None:
    """What one row says; None: it is no message of this shape."""
    one = flat(event)
    session = "" if shape.session is None else one.get(shape.session)
    order = as_order(one.get(shape.order)) if shape.order else None
    if shape.kinds is not None:
        known = isinstance(session, str | int) and _is_known(one.get(shape.kinds.kind), shape.kinds)
        return SaidLine(str(session), turn_of(one, shape.kinds), order, {}) if known else None
    if shape.role not in one and shape.content not in one and shape.session is None:
        return SaidLine("", None, None, {})  # a line about the log
    role = shape.roles.get(str(one.get(shape.role)).strip())
    text = one.get(shape.content)
    if not isinstance(session, str | int) or role is None or not isinstance(text, str | list | None):
        return None
    beside = shape.content.rpartition(".")[0]
    kept = {key: one[f"{beside}.{key}"] for key in _WITH_CALLS if one.get(f"{beside}.{key}")} if beside else {}
    kept |= {key: event[key] for key in _WITH_CALLS if event.get(key)}
    if not text and not kept:
        return None
    return SaidLine(str(session), {"role": role, "content": text, **kept}, order, links_of(event))


def _is_known(kind: Any, kinds: EventKinds) -> bool:
    """Whether events of a kind were told apart, or are notes by its name."""
    return kind in (*kinds.roles, *kinds.notes) or (isinstance(kind, str) and tells_a_note(kind))


def as_order(value: Any) -> float | None:
    """A time or a number that orders messages."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_ORDER else None
    if isinstance(value, str):
        return float(value) if value.strip().isdecimal() else as_time(value)
    return None


def _role_paths(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where it may stand who speaks, the likeliest first; under a name that nobody knows, where roles alone stand."""
    known = [path for path in flats[0] if not _is_of_a_list(path)]
    named = [path for path in known if names_role(path)]
    others = [path for path in known if path not in named and _are_roles([one.get(path) for one in flats])]
    return [*sorted(named, key=lambda path: (path.rpartition(".")[2] != "role", path.count("."))), *others]


def _is_of_a_list(path: str) -> bool:
    """Whether a path leads into one of several turns of a row, as the attributes of a span number them."""
    return any(name.isdecimal() for name in path.split("."))


def _are_roles(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) and len(value) <= MAX_ROLE_CHARS and role_of(value) for value in values)


def _path(flats: Sequence[Mapping[str, Any]], names: Sequence[str], kind: Any) -> str | None:
    """The path of these names that nearly every row has."""
    found: dict[str, str] = {plain_name(path.rpartition(".")[2]): path for path in reversed(list(flats[0]))}
    found |= {plain_name(path): path for path in flats[0]}
    for name in names:
        path = found.get(name)
        if path is not None and sum(isinstance(one.get(path), kind) for one in flats) >= MESSAGE_SHARE * len(flats):
            return path
    return None


def _content(flats: Sequence[Mapping[str, Any]], role: str) -> str | None:
    """The one path with text; None where another column is written too: a row with more than a message."""
    paths = dict.fromkeys(path for one in flats for path in one if path != role and not _is_of_a_list(path))
    texts = [path for path in paths if any(isinstance(one.get(path), str | list) and one[path] for one in flats)]
    written = [path for path in texts if sum(looks_like_content(one.get(path)) for one in flats) * 2 > len(flats)]
    content = next(iter(likely_contents(iter(texts))), None) or (written[0] if len(written) == 1 else None)
    if content is None:
        return None
    sides = {path for path in texts if part_of(path.rpartition(".")[2]) in ("asked", "answered") and path != content}
    other = {path for path in sides if plain_name(path) in CONTENT}
    return None if other else content


def _begin_with_system(roles: Sequence[Role]) -> bool:
    """Whether each of several system prompts begins a conversation in which two sides take turns up to an answer; only
    the last one may break off, where the first rows end.
    """
    begun = [place for place, role in enumerate(roles) if role == "system"]
    if len(begun) < MIN_MESSAGES or begun[0] != 0:
        return False
    talks = [roles[first + 1 : last] for first, last in pairwise([*begun, len(roles)])]
    in_turn = all(role == ("user", "assistant")[i % 2] for talk in talks for i, role in enumerate(talk))
    return in_turn and all(talk and len(talk) % 2 == 0 for talk in talks[:-1])


def _takes_turns(roles: Sequence[Role], share: float) -> bool:
    """Whether a file without sessions is one conversation: after its system prompt, two sides in turn."""
    spoken = [role for role in roles if role != "system"]
    if len(roles) > MAX_WITHOUT_SESSION or "system" in roles[1:] or not {"user", "assistant"} & set(spoken):
        return False
    changes = sum(first != second or first == "tool" for first, second in pairwise(spoken))
    return changes >= share * (len(spoken) - 1)

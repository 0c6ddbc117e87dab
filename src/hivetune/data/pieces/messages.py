"""Rows that are one message each, as the tables behind chat programs hold them: a session, who speaks, what is said.

The names are exact. A log without sessions is one conversation where two sides take turns in it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hivetune.data.pieces.branches import are_one_tree, links_of
from hivetune.data.pieces.fields import SESSION, TIME, as_time, plain_name
from hivetune.data.pieces.said import one_of, parsed
from hivetune.data.pieces.speakers import role_of
from hivetune.records import Role

MIN_MESSAGES = 2
MESSAGE_SHARE = 0.9  # of the first rows, that must be messages
MAX_ORDER = 1e300  # an integer of 310 digits is no float
MAX_WITHOUT_SESSION = 500  # rows of a file that is one conversation and names none
_SESSIONS = (
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
)
_ROLES = (
    *("role", "sender", "speaker", "author", "from", "from_role", "sender_role", "sender_type", "speaker_role"),
    *("speaker_type", "author_role", "author_type", "user_type", "participant_role", "message_type", "side", "type"),
    *("tipo", "rôle", "rolle", "rol", "papel"),
)
TEXTS = (
    *("content", "text", "message", "body", "utterance", "value", "parts", "msg", "message_text", "transcript"),
    *("content_json", "mensagem", "mensaje", "texte", "texto", "nachricht"),
)
_ORDER = (
    *("turn", "turn_id", "turn_idx", "turn_index", "turn_number", "turn_no", "utterance_idx", "utterance_id", "seq"),
    *("sequence", "sequence_number", "message_index", "message_number", "position", "step", "index", "idx", "order"),
)
_BESIDE = ("tool_calls", "function_call", "tool_call_id", "reasoning_content")


class MessageShape(NamedTuple):
    """Which column of a row says what. `session` None: the whole file is one conversation. `begins`: each system prompt
    begins a conversation.
    """

    session: str | None
    role: str
    content: str
    order: str | None
    begins: bool = False


class SaidLine(NamedTuple):
    """`turn` None: a program's note. `links`: the ids of the message and of the one before it, where it names them."""

    session: str
    turn: dict[str, Any] | None
    order: float | None
    links: Mapping[str, Any]


def messages_shape(events: Sequence[Mapping[str, Any]], *, whole: bool, talk: bool = False) -> MessageShape | None:
    """How the messages of a file are written; None where its rows are none. `whole`: `events` are all rows of the file;
    `talk`: its name says that it is a conversation.
    """
    flats = [_flat(event) for event in events]
    if len(flats) > MIN_MESSAGES and not _has_both(flats[0]) and _has_both(flats[1]):
        flats = flats[1:]  # a line about the log
    if len(flats) < MIN_MESSAGES:
        return None
    role = _column(flats, _ROLES, str, lambda value: role_of(value) is not None)
    content = next(
        (name for name in TEXTS if sum(_has(one, name) for one in flats) >= MESSAGE_SHARE * len(flats)), None
    )
    if role is None or content is None:
        return None
    session = _column(flats, _SESSIONS, str | int)
    time = _column(flats, TIME, str | int | float)
    shape = MessageShape(session, role, content, time or _column(flats, _ORDER, str | int | float))
    if session is not None:
        return shape
    roles = [found for one in flats if (found := role_of(str(one.get(role)))) is not None]
    if _begin_with_system(roles):
        return shape._replace(begins=True)
    parts = any(isinstance(one.get(content), list) or one.get("tool_calls") for one in flats)  # no example has them
    told = talk or time is not None or parts or "tool" in roles or all("data" in event for event in events)
    told = told or are_one_tree(flats)
    return shape if whole and told and _takes_turns(roles) else None


def said_in(event: Mapping[str, Any], shape: MessageShape) -> SaidLine | None:
    """What a row says; None where it is no message of its log."""
    one = _flat(event)
    if shape.session is None and shape.role not in one and shape.content not in one:
        return SaidLine("", None, None, {})
    session = "" if shape.session is None else one.get(shape.session)
    role, text = role_of(str(one.get(shape.role))), one.get(shape.content)
    if not isinstance(session, str | int) or role is None or not isinstance(text, str | list | None):
        return None
    kept = {key: one[key] for key in _BESIDE if one.get(key)}
    if not text and not kept:
        return None
    order = as_order(one.get(shape.order)) if shape.order else None
    return SaidLine(str(session), {"role": role, "content": text, **kept}, order, links_of(event))


def is_event_like(event: Mapping[str, Any]) -> bool:
    """Whether a row may be a message."""
    return _has_both(_flat(event))


def _has_both(flat: Mapping[str, Any]) -> bool:
    return any(name in flat for name in _ROLES) and any(name in flat for name in TEXTS)


def as_order(value: Any) -> float | None:
    """A time or a number that orders messages."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_ORDER else None
    if isinstance(value, str):
        return float(value) if value.strip().isdecimal() else as_time(value)
    return None


def _flat(event: Mapping[str, Any]) -> dict[str, Any]:
    """A row under plain names, with what LangChain keeps below `data` and others below `message`."""
    plain = {plain_name(str(name)): value for name, value in event.items()}
    if "content_json" in plain:
        plain["content_json"] = parsed(plain["content_json"])
    for name in ("message", "data"):
        inner = parsed(plain.get(name))
        if isinstance(inner, dict) and isinstance(inner.get("data"), dict):  # LangChain's, in a column
            inner = {**inner["data"], "type": inner.get("type")}
        if isinstance(inner, dict) and one_of(inner, *TEXTS) is not None:
            known = {plain_name(str(key)): value for key, value in inner.items() if value is not None}
            rest = {key: value for key, value in plain.items() if key != name}
            return {**rest, **known} if name == "message" else {**known, **rest}
    return plain


def _has(flat: Mapping[str, Any], name: str) -> bool:
    """Whether a row says something in a column, or nothing there beside its calls."""
    return isinstance(flat.get(name), str | list) and bool(flat[name] or flat.get("tool_calls"))


def _column(flats: Sequence[Mapping[str, Any]], names: Sequence[str], kind: Any, fits: Any = None) -> str | None:
    """The first of these columns that nearly every row has."""
    for name in names:
        values = [one[name] for one in flats if isinstance(one.get(name), kind) and one[name] != ""]
        if len(values) >= MESSAGE_SHARE * len(flats) and (fits is None or all(map(fits, values))):
            return name
    return None


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


def _takes_turns(roles: Sequence[Role]) -> bool:
    """Whether a file without sessions is one conversation: after its system prompt, two sides in turn."""
    spoken = [role for role in roles if role != "system"]
    if len(roles) > MAX_WITHOUT_SESSION or "system" in roles[1:] or not {"user", "assistant"} <= set(spoken):
        return False
    changes = sum(first != second or first == "tool" for first, second in pairwise(spoken))
    return 2 * changes >= len(spoken) - 1

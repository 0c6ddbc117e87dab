"""Logs with one message a row and the session that it belongs to: the table after most chat applications."""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hivetune.data.formats import file_rows, format_of_file, smolagents
from hivetune.data.pieces.fields import SESSION, TIME, as_time, plain_name
from hivetune.data.pieces.format import Head
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, conversation, path_to
from hivetune.data.pieces.said import listed, names, objects, one_of, parsed
from hivetune.data.pieces.transcripts import role_of
from hivetune.data.pieces.turns import is_item
from hivetune.data.reasons import RowRefused
from hivetune.records import Role

NUM_SAMPLE, SAMPLE_CHARS = 400, 4 << 20  # events, and the characters of large ones, that tell what a log is
_TALK = names("chat chats conversation conversations dialog dialogs dialogue dialogues history transcript")  # of files
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
    """The columns of a row by their meaning. `session` None: the whole file is one conversation. `begins`: each system
    prompt begins a conversation.
    """

    session: str | None
    role: str
    content: str
    order: str | None
    begins: bool = False


class MessageLine(NamedTuple):
    """`turn` None: a program's note. `links`: the ids of the message and of its predecessor, if given."""

    session: str
    turn: dict[str, Any] | None
    order: float | None
    links: Mapping[str, Any]


_Numbered = tuple[int, MessageLine]
# The place of a record, the object that it is or None, and the record as text or why there is none.
_Event = tuple[int, dict[str, Any] | None, str | RowRefused]


def message_rows(rows: Iterator[PlacedRow], name: str) -> tuple[Iterator[PlacedRow], bool]:
    """Return (one row for each conversation of a file called `name`, True) if its rows are messages, else (`rows`,
    False).
    """
    first: list[_Event] = []
    chars = 0
    for row in rows:
        first.append(_event(row))
        chars += len(str(first[-1][2]))
        if len(first) >= NUM_SAMPLE or chars >= SAMPLE_CHARS:
            break
    whole = len(first) < NUM_SAMPLE and chars < SAMPLE_CHARS
    joined = _conversations(first, map(_event, rows), name, whole=whole)
    if joined is None:
        return itertools.chain(((number, record) for number, _, record in first), rows), False
    return joined, True


def _event(row: PlacedRow) -> _Event:
    number, record = row
    if isinstance(record, RowRefused):
        return number, None, record
    text = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return number, None, text
    if isinstance(event, dict) and len(event) == 1:  # maybe nothing but a text under a party's name
        speaker, spoken = next(iter(event.items()))
        if isinstance(spoken, str) and role_of(speaker) in ("user", "assistant", "system"):
            event = {"speaker": speaker, "text": spoken}
    return number, event if isinstance(event, dict) else None, text


def _conversations(
    first: list[_Event], rest: Iterator[_Event], name: str, *, whole: bool
) -> Iterator[PlacedRow] | None:
    """Return the conversations of a log by its first events and the others (`whole`: no others); None for another kind
    of file.
    """
    events = [event for _, event, _ in first]
    objects = [event for event in events if event is not None]
    everything = itertools.chain(first, rest)
    if len(objects) == len(events) and (written := format_of_file(Head(name, b"", objects))) is not None:
        problems: list[PlacedRow] = []
        return itertools.chain(file_rows(written.name, _lines(everything, problems)), problems)
    if smolagents.are_steps(events) or _are_turns(events):
        turns: list[Any] = [event for _, event, _ in everything if event is not None]
        of_agent = smolagents.are_steps(events)
        row = conversation("smolagents", smolagents.turns_of(turns)) if of_agent else conversation("messages", turns)
        return iter([(first[0][0], row)])
    shape = message_shape(events, name, whole=whole)
    return None if shape is None else _joined(everything, shape)


def _lines(events: Iterable[_Event], problems: list[PlacedRow]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a log; `problems` gets the places without one."""
    for number, _, record in events:
        if isinstance(record, RowRefused):
            problems.append((number, record))
        else:
            yield number, record


def _are_turns(turns: Sequence[Any]) -> bool:
    """Return whether a file lists the messages of one conversation as LangChain, Semantic Kernel, Pydantic AI or
    OpenAI's agents write them.
    """
    if len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns):
        return False
    if all(
        "lc" in turn and str(listed(turn.get("id"))[-1:]).endswith(("Message']", "MessageChunk']")) for turn in turns
    ):
        return True
    if all(isinstance(turn.get("Items"), list) and "Role" in turn for turn in turns):  # Semantic Kernel
        return True
    if all(turn.get("kind") in ("request", "response") and objects(turn.get("parts")) for turn in turns):  # Pydantic AI
        return True
    written = [is_item(turn) or (turn.get("type") == "message" and "status" in turn) for turn in turns]
    return any(written) and all(item or "role" in turn for item, turn in zip(written, turns, strict=True))


def _joined(events: Iterable[_Event], shape: MessageShape) -> Iterator[PlacedRow]:
    """Yield one row for each session, in the order that its messages name. A session is held until the log ends; beyond
    MAX_KEPT_CHARS the oldest is given out, and what comes of it later stays one message a row.
    """
    lines_of: dict[str, list[_Numbered]] = {}
    sizes: dict[str, int] = {}
    num_chars = 0
    written: set[str] = set()
    begun = 0
    for number, event, record in events:
        line = None if event is None else message_in(event, shape)
        if line is not None and shape.begins:
            begun += line.turn is not None and line.turn["role"] == "system"
            line = line._replace(session=str(begun))
        if line is None or line.session in written:
            yield number, record
            continue
        lines_of.setdefault(line.session, []).append((number, line))
        sizes[line.session] = sizes.get(line.session, 0) + len(str(record))
        num_chars += len(str(record))
        while num_chars > MAX_KEPT_CHARS and len(lines_of) > 1:
            oldest = next(iter(lines_of))
            written.add(oldest)
            num_chars -= sizes.pop(oldest)
            yield from _row("" if shape.begins else oldest, lines_of.pop(oldest))
    for session, turns in lines_of.items():
        yield from _row("" if shape.begins else session, turns)


def _row(session: str, lines: list[_Numbered]) -> Iterator[PlacedRow]:
    begin = lines[0][0]
    if all(line.order is not None for _, line in lines):
        lines = sorted(lines, key=lambda numbered: numbered[1].order or 0.0)
    turns = [(number, line) for number, line in lines if line.turn is not None]
    if not turns:
        return  # a program that began and ended, and nobody spoke
    left_out = ["program-notes"] if len(turns) < len(lines) else []
    branch = branch_indices([line.links for _, line in turns])
    if branch is None:  # a tree of edits whose leaf nobody can tell
        for number, line in turns:
            yield number, json.dumps({"session": session, **(line.turn or {})})
        return
    left_out += ["other-branches"] if len(branch) < len(turns) else []
    yield begin, conversation("messages", [turns[i][1].turn for i in branch], left_out, session=session)


# How the messages of a log are written. The names are exact; a log without sessions is one conversation where two sides
# take turns in it.


def message_shape(sample: Sequence[Mapping[str, Any] | None], name: str, *, whole: bool) -> MessageShape | None:
    """Return how the messages of a log called `name` are written, by its first events; None for another kind of log.
    `whole`: the sample is all of it.
    """
    events = [event for event in sample if event is not None]
    if 2 * len(events) < len(sample):
        return None
    flats = [_flat(event) for event in events]
    if len(flats) > MIN_MESSAGES and not _has_both(flats[0]) and _has_both(flats[1]):
        flats = flats[1:]  # a line about the log
    if len(flats) < MIN_MESSAGES:
        return None
    role = _column(flats, _ROLES, str, lambda value: role_of(value) is not None)
    content = next((name for name in TEXTS if sum(_has(f, name) for f in flats) >= MESSAGE_SHARE * len(flats)), None)
    if role is None or content is None:
        return None
    session = _column(flats, _SESSIONS, str | int)
    time = _column(flats, TIME, str | int | float)
    shape = MessageShape(session, role, content, time or _column(flats, _ORDER, str | int | float))
    if session is not None:
        return shape
    roles = [known_role for flat in flats if (known_role := role_of(str(flat.get(role)))) is not None]
    if _begin_with_system(roles):
        return shape._replace(begins=True)
    parts = any(isinstance(flat.get(content), list) or flat.get("tool_calls") for flat in flats)  # no example has them
    words = re.split(r"[\W_\d]+", os.path.basename(name).partition(".")[0].lower())
    is_log = (
        not _TALK.isdisjoint(words)
        or time is not None
        or parts
        or "tool" in roles
        or all("data" in event for event in events)
    )
    is_log = is_log or are_one_tree(flats)
    return shape if whole and is_log and _takes_turns(roles) else None


def message_in(event: Mapping[str, Any], shape: MessageShape) -> MessageLine | None:
    """Return the message of a row; None if it is not a message of its log."""
    flat = _flat(event)
    if shape.session is None and shape.role not in flat and shape.content not in flat:
        return MessageLine("", None, None, {})
    session = "" if shape.session is None else flat.get(shape.session)
    role, text = role_of(str(flat.get(shape.role))), flat.get(shape.content)
    if not isinstance(session, str | int) or role is None or not isinstance(text, str | list | None):
        return None
    beside = {key: flat[key] for key in _BESIDE if flat.get(key)}
    if not text and not beside:
        return None
    order = as_order(flat.get(shape.order)) if shape.order else None
    links = {name: value for name, value in event.items() if plain_name(name) in _LINKS}
    return MessageLine(str(session), {"role": role, "content": text, **beside}, order, links)


def _has_both(flat: Mapping[str, Any]) -> bool:
    return any(name in flat for name in _ROLES) and any(name in flat for name in TEXTS)


def as_order(value: Any) -> float | None:
    """Return a time or a number that orders messages."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_ORDER else None
    if isinstance(value, str):
        return float(value) if value.strip().isdecimal() else as_time(value)
    return None


def _flat(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row under plain names, with what LangChain keeps below `data` and others below `message`."""
    plain = {plain_name(str(name)): value for name, value in event.items()}
    if "content_json" in plain:
        plain["content_json"] = parsed(plain["content_json"])
    for name in ("message", "data"):
        inner = parsed(plain.get(name))
        if isinstance(inner, dict) and isinstance(inner.get("data"), dict):  # LangChain's, in a column
            inner = {**inner["data"], "type": inner.get("type")}
        if isinstance(inner, dict) and one_of(inner, *TEXTS) is not None:
            inner_values = {plain_name(str(key)): value for key, value in inner.items() if value is not None}
            rest = {key: value for key, value in plain.items() if key != name}
            return {**rest, **inner_values} if name == "message" else {**inner_values, **rest}
    return plain


def _has(flat: Mapping[str, Any], name: str) -> bool:
    """Return whether a row's column has a text or a list, which may be empty beside calls."""
    return isinstance(flat.get(name), str | list) and bool(flat[name] or flat.get("tool_calls"))


def _column(flats: Sequence[Mapping[str, Any]], names: Sequence[str], kind: Any, fits: Any = None) -> str | None:
    """Return the first of these columns that nearly every row has."""
    for name in names:
        values = [flat[name] for flat in flats if isinstance(flat.get(name), kind) and flat[name] != ""]
        if len(values) >= MESSAGE_SHARE * len(flats) and (fits is None or all(map(fits, values))):
            return name
    return None


def _begin_with_system(roles: Sequence[Role]) -> bool:
    """Return whether each of several system prompts begins a conversation in which two sides take turns up to an
    answer; only the last one may break off, where the first rows end.
    """
    begun = [index for index, role in enumerate(roles) if role == "system"]
    if len(begun) < MIN_MESSAGES or begun[0] != 0:
        return False
    talks = [roles[first + 1 : last] for first, last in pairwise([*begun, len(roles)])]
    in_turn = all(role == ("user", "assistant")[i % 2] for talk in talks for i, role in enumerate(talk))
    return in_turn and all(talk and len(talk) % 2 == 0 for talk in talks[:-1])


def _takes_turns(roles: Sequence[Role]) -> bool:
    """Return whether a file without sessions is one conversation: after its system prompt, two sides in turn."""
    spoken = [role for role in roles if role != "system"]
    if len(roles) > MAX_WITHOUT_SESSION or "system" in roles[1:] or not {"user", "assistant"} <= set(spoken):
        return False
    return 2 * sum(first != second or first == "tool" for first, second in pairwise(spoken)) >= len(spoken) - 1


# Which message follows which, where messages name the one before.

_PARENTS = (
    *("parent", "parent_id", "parent_uuid", "parent_message_id", "parent_message_uuid", "reply_to", "reply_to_id"),
    *("in_reply_to", "previous_id", "previous_message_id", "prev_id", "replies_to"),
)
_IDS = ("id", "uuid", "message_id", "msg_id", "node_id", "_id")
_LINKS = frozenset((*_PARENTS, *_IDS))


def branch_indices(messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the places of the messages from the root to the last leaf; all of them where no message names its parent.

    The last one is the newest where all have times, else the last of the list, if no message stands before its parent.
    None if this is unclear.
    """
    everything = list(range(len(messages)))
    plain = _plain(messages)
    id_name = next((name for name in _IDS if all(_is_id(message.get(name)) for message in plain)), None)
    parent_name = next((name for name in _PARENTS if any(_is_id(message.get(name)) for message in plain)), None)
    if id_name is None or parent_name is None:
        return everything
    index_of = {str(message[id_name]): index for index, message in enumerate(plain)}
    parents = [index_of.get(str(message.get(parent_name))) for message in plain]
    if len(index_of) < len(plain) or 2 * sum(parent is not None for parent in parents) < len(plain):
        return everything  # ids of something else, or a few messages that quote others
    names = [None if parent is None else str(parent) for parent in parents]
    path = path_to(str(_last(plain, parents)), {str(index): name for index, name in enumerate(names)})
    return [int(index) for index in path] or None  # a circle


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{plain_name(key): value for key, value in message.items()} for message in messages]


def are_one_tree(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each message but the first has one of these as its parent."""
    plain = _plain(messages)
    for id_name in _IDS:
        ids = {str(message[id_name]) for message in plain if _is_id(message.get(id_name))}
        if len(ids) == len(plain) and any(
            plain[0].get(n) is None and all(str(message.get(n)) in ids for message in plain[1:]) for n in _PARENTS
        ):
            return len(plain) > 1
    return False


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _last(plain: Sequence[Mapping[str, Any]], parents: Sequence[int | None]) -> int | None:
    """Return the message that was written last."""
    name = next((name for name in TIME if all(as_time(message.get(name)) is not None for message in plain)), None)
    if name is not None:
        times = [as_time(message[name]) or 0.0 for message in plain]
        if all(parent is None or times[parent] <= times[index] for index, parent in enumerate(parents)):
            return max(range(len(plain)), key=lambda index: (times[index], index))
    in_list = all(parent is None or parent < index for index, parent in enumerate(parents))
    return len(plain) - 1 if in_list else None

"""Logs with one message a row and the session that it belongs to: the table behind most chat applications."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hivetune.data.formats import smolagents
from hivetune.data.pieces.branches import kept_branch
from hivetune.data.pieces.logs import MAX_KEPT_CHARS, PlacedRow, broken, conversation, events, write_rows
from hivetune.data.pieces.messages import MessageShape, SaidLine, messages_shape, said_in
from hivetune.data.pieces.openhands import is_openhands, openhands_turns
from hivetune.data.pieces.said import listed, names, objects
from hivetune.data.pieces.slack import is_message_of_slack, slack_threads
from hivetune.data.pieces.speakers import role_of
from hivetune.data.pieces.turns import is_item

NUM_SAMPLE = 400
_TALK = names("chat chats conversation conversations dialog dialogs dialogue dialogues history transcript")  # of files
_Held = tuple[int, SaidLine]
Event = tuple[int, dict[str, Any] | None, str]  # line, object or None, the line itself


def message_shape(sample: Iterable[dict[str, Any] | None], name: str, *, whole: bool) -> MessageShape | None:
    """How the messages of a log called `name` are written, by its first events; None: it is no such log."""
    found = list(sample)
    known = [event for event in found if event is not None]
    talk = bool(_TALK & set(re.split(r"[\W_\d]+", os.path.basename(name).partition(".")[0].lower())))
    return messages_shape(known, whole=whole, talk=talk) if 2 * len(known) >= len(found) else None


def message_rows(lines: Iterator[tuple[int, str]], name: str) -> Iterator[PlacedRow]:
    """One row for each session of a log in JSON Lines."""
    first, rest = _begun(events(lines))
    yield from _conversations(first, rest, name) or ()


def regroup(path: str, name: str) -> bool:
    """Whether the numbered lines of a file called `name` are messages; then they are replaced by one line for each
    session.
    """
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        joined = _conversations(*_begun(_numbered(file)), name)
        if joined is None:
            return False
        write_rows(joined, f"{path}.joined")
    os.replace(f"{path}.joined", path)
    return True


def are_of_openhands(sample: Sequence[dict[str, Any] | None]) -> bool:
    """Whether a log is one of OpenHands, by its first events."""
    known = [event for event in sample if event is not None]
    return len(known) == len(sample) and is_openhands(known)


def _conversations(first: list[Event], rest: Iterator[Event], name: str) -> Iterator[PlacedRow] | None:
    """The conversations of a log by its first events and the others; None: it is no such log."""
    if (written := _of_a_program([event for _, event, _ in first])) is not None:
        everything = [(number, event) for number, event, _ in itertools.chain(first, rest) if event is not None]
        if written == "slack":
            return _of_slack(everything)
        turns = _TURNS[written]([event for _, event in everything])
        return conversation(written, everything[0][0], turns, ["program-notes"] if written == "openhands" else [])
    shape = message_shape((event for _, event, _ in first), name, whole=len(first) < NUM_SAMPLE)
    return None if shape is None else _joined(itertools.chain(first, rest), shape)


_TURNS: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "openhands": openhands_turns,
    "smolagents": smolagents.turns_of,
    "messages": list,
}


def _of_a_program(turns: Sequence[dict[str, Any] | None]) -> str | None:
    """Whose events, messages or steps a file lists, by its first ones."""
    if are_of_openhands(turns):
        return "openhands"
    if smolagents.are_steps(turns):
        return "smolagents"
    if len(turns) > 1 and all(turn is not None and is_message_of_slack(turn) for turn in turns):
        return "slack"
    return "messages" if _are_turns(turns) else None


def _are_turns(turns: Sequence[Any]) -> bool:
    """Whether a file lists the messages of one conversation as LangChain, Semantic Kernel, Pydantic AI or OpenAI's
    agents write them.
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


def _of_slack(messages: Sequence[tuple[int, dict[str, Any]]]) -> Iterator[PlacedRow]:
    for row in slack_threads([message for _, message in messages]):
        yield messages[0][0], row


def _begun(found: Iterator[Event]) -> tuple[list[Event], Iterator[Event]]:
    return list(itertools.islice(found, NUM_SAMPLE)), found


def _numbered(lines: Iterable[str]) -> Iterator[Event]:
    for line in lines:
        place, mark, text = line.rstrip("\n").split("\t", 2)
        try:
            event = json.loads(text) if mark == "r" else None
        except (ValueError, RecursionError):
            event = None
        spoken = _only_text(event)
        if spoken is not None:
            event = {"speaker": spoken[0], "text": spoken[1]}
        yield int(place), event if isinstance(event, dict) else None, text


def _only_text(event: Any) -> tuple[str, str] | None:
    """(who speaks, what is said) of an object that holds a text under the name of a party, and nothing else."""
    if not isinstance(event, dict) or len(event) != 1:
        return None
    name, text = next(iter(event.items()))
    return (name, text) if isinstance(text, str) and role_of(name) in ("user", "assistant", "system") else None


def _joined(found: Iterable[Event], shape: MessageShape) -> Iterator[PlacedRow]:
    """One row for each session, in the order that its messages name. A session is held until the log ends; beyond
    MAX_KEPT_CHARS the oldest is given out, and what comes of it later stays one message a row.
    """
    held: dict[str, list[_Held]] = {}
    sizes: dict[str, int] = {}
    kept = 0
    given: set[str] = set()
    begun = 0
    for number, event, text in found:
        said = None if event is None else said_in(event, shape)
        if said is not None and shape.begins:
            begun += said.turn is not None and said.turn["role"] == "system"
            said = said._replace(session=str(begun))
        if said is None or said.session in given:
            yield broken(number, text)
            continue
        held.setdefault(said.session, []).append((number, said))
        sizes[said.session] = sizes.get(said.session, 0) + len(text)
        kept += len(text)
        while kept > MAX_KEPT_CHARS and len(held) > 1:
            oldest = next(iter(held))
            given.add(oldest)
            kept -= sizes.pop(oldest)
            yield from _row("" if shape.begins else oldest, held.pop(oldest))
    for session, turns in held.items():
        yield from _row("" if shape.begins else session, turns)


def _row(session: str, said: list[_Held]) -> Iterator[PlacedRow]:
    place = said[0][0]
    if all(one.order is not None for _, one in said):
        said = sorted(said, key=lambda held: held[1].order or 0.0)
    turns = [(number, one) for number, one in said if one.turn is not None]
    if not turns:
        return  # a program that began and ended, and nobody spoke
    left_out = ["program-notes"] if len(turns) < len(said) else []
    kept = kept_branch([one.links for _, one in turns])
    if kept is None:  # a tree of edits whose leaf nobody can tell
        for number, one in turns:
            yield broken(number, json.dumps({"session": session, **(one.turn or {})}))
        return
    left_out += ["other-branches"] if len(kept) < len(turns) else []
    yield from conversation("messages", place, [turns[i][1].turn for i in kept], left_out, session=session)

"""What exports of chat programs share: the branch of a tree that was kept, and what of it can be learned.

Of a tree the branch that was kept is read; retries and edits that were given up are counted (`other-branches`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.logs import way_to
from hivetune.data.pieces.said import NOT_HELD, Conversation, before_media
from hivetune.data.pieces.turns import in_order
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def branch(parents: Mapping[str, str | None], leaf: str) -> list[str]:
    """The nodes from the root to `leaf`. Raises RowRefused when they go in a circle."""
    path = way_to(leaf, parents)
    if leaf in parents and not path:
        raise RowRefused("wrong-type", "the messages' parents go in a circle")
    return path


def done(name: str, messages: list[Message], left_out: int, cut: tuple[str, ...] = ()) -> Conversation:
    ordered, changed = in_order(messages)
    return Conversation(name, ordered, changed=(("other-branches",) if left_out else ()) + cut + changed)


def said_in_chat(turns: Iterable[Any], read: Callable[[Any], list[Message]]) -> tuple[list[Message], tuple[str, ...]]:
    """(messages, reasons of severity warn) of turns: an answer for which the program used a tool, whose results no
    export holds, or that broke off is read and not learned. `read` raises NotLearned for such a turn.
    """
    why: list[RowRefused] = []

    def read_or_note(turn: Any) -> list[Message]:
        try:
            return read(turn)
        except NotLearned as noted:
            why.append(noted.refused)
            return noted.messages

    read_so_far, cut = before_media(list(turns), read_or_note)
    found, ends = _with_whole_answers_unlearned(itertools.chain.from_iterable(read_so_far))
    answers = [message.weight for message in found if message.role == "assistant"]
    if not any(answers) and (why or answers):
        raise (*why, RowRefused(NOT_HELD, "the result of a call is not held"))[0]
    return found, ("ends-before-media",) if ends else cut


def _with_whole_answers_unlearned(messages: Iterable[Message]) -> tuple[list[Message], bool]:
    """(`messages` without weight in each answer of which a part has none or a call has no result, whether they end
    before one of which nothing else is there). Of such an answer the words are kept, since which calls have their
    results nobody can tell.
    """
    found: list[Message] = []
    for asks, turn in itertools.groupby(messages, lambda message: message.role in ("user", "system")):
        answer = list(turn)
        if not asks and not (all(message.weight for message in answer) and _has_results(answer)):
            words = [message for message in answer if message.role == "assistant" and message.content.strip()]
            answer = [replace(message, weight=0, tool_calls=()) for message in words]
            if not answer:
                return found, True
        found += answer
    return found, False


def _has_results(answer: list[Message]) -> bool:
    return sum(len(message.tool_calls) for message in answer) == sum(message.role == "tool" for message in answer)


class NotLearned(Exception):
    """A turn that is read and not learned, and why."""

    def __init__(self, refused: RowRefused, *messages: Message):
        self.refused = refused
        unlearned = [replace(message, weight=0) if message.role == "assistant" else message for message in messages]
        self.messages = unlearned or [Message("assistant", "", 0)]

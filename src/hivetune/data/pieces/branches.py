"""What exports of chat programs share: the branch of a tree that was kept, and what of it can be learned.

Of a tree the branch that was kept is read; retries and edits that were given up are counted (`other-branches`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.fields import as_time
from hivetune.data.pieces.logs import path_to
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, before_media, listed, one_of
from hivetune.data.pieces.turns import in_order
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def branch(parents: Mapping[str, str | None], leaf: str) -> list[str]:
    """Return the nodes from the root to `leaf`. Raise RowRefused when they go in a circle."""
    path = path_to(leaf, parents)
    if leaf in parents and not path:
        raise RowRefused("wrong-type", "the messages' parents go in a circle")
    return path


def branch_nodes(row: Row, time: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return (nodes of a tree, nodes of the kept branch)."""
    nodes = {key: node for key, node in row["mapping"].items() if isinstance(node, dict)}
    if not any(node.get("parent") or node.get("children") for node in nodes.values()):
        # They lost their tree: in order by their times if all have one, else as they stand in the file.
        spoken = [key for key, node in nodes.items() if isinstance(node.get("message"), dict)]
        times = {key: nodes[key]["message"].get("create_time") for key in spoken}
        if all(isinstance(time, int | float) for time in times.values()):
            spoken.sort(key=times.__getitem__)
        above = dict(zip(spoken[1:], spoken, strict=False))
        below = {parent: [key] for key, parent in above.items()}
        nodes = {key: {**nodes[key], "parent": above.get(key), "children": below.get(key)} for key in spoken}
    parents = {str(child): key for key, node in nodes.items() for child in listed(node.get("children"))}
    parents |= {key: node["parent"] for key, node in nodes.items() if node.get("parent")}
    leaf = str(row.get("current_node"))
    if leaf not in nodes:
        leaves = [key for key, node in nodes.items() if not node.get("children")]
        leaf = max(leaves, key=lambda key: as_time(one_of(nodes[key].get("message"), time)) or 0, default="")
    return nodes, branch({key: parents.get(key) for key in nodes}, leaf)


def finish_chat(name: str, messages: list[Message], left_out: int, cut: tuple[str, ...] = ()) -> Conversation:
    ordered, changed = in_order(messages)
    return Conversation(name, ordered, changed=(("other-branches",) if left_out else ()) + cut + changed)


class NotLearned(Exception):
    """A turn that is read and not learned, and why."""

    def __init__(self, refused: RowRefused, *messages: Message):
        self.refused = refused
        unlearned = [replace(message, weight=0) if message.role == "assistant" else message for message in messages]
        self.messages = unlearned or [Message("assistant", "", 0)]


def chat_messages(turns: Iterable[Any], read: Callable[[Any], list[Message]]) -> tuple[list[Message], tuple[str, ...]]:
    """Return (messages, reasons of severity warn) of turns: an answer is read and not learned if it is incomplete, or
    if it used a tool whose results the export lacks. `read` raises NotLearned for such a turn.
    """
    refusals: list[RowRefused] = []

    def read_or_note(turn: Any) -> list[Message]:
        try:
            return read(turn)
        except NotLearned as noted:
            refusals.append(noted.refused)
            return noted.messages

    read_so_far, cut = before_media(list(turns), read_or_note)
    messages: list[Message] = []
    asks = ("user", "system")
    for is_question, turn in itertools.groupby(itertools.chain.from_iterable(read_so_far), lambda p: p.role in asks):
        answer = list(turn)
        has_results = sum(len(part.tool_calls) for part in answer) == sum(part.role == "tool" for part in answer)
        if not is_question and not (has_results and all(part.weight for part in answer)):
            # Which calls have their results nobody can tell: the words of such an answer are kept, and not learned.
            texts = [part for part in answer if part.role == "assistant" and part.content.strip()]
            answer = [replace(part, weight=0, tool_calls=()) for part in texts]
            if not answer:
                cut = ("ends-before-media",)
                break
        messages += answer
    weights = [message.weight for message in messages if message.role == "assistant"]
    if not any(weights) and (refusals or weights):
        raise (*refusals, RowRefused(NOT_HELD, "the result of a call is not held"))[0]
    return messages, cut

"""What exports of chat programs share: the branch of a tree that was kept, and what of it can be learned.

Of a tree the branch that was kept is read; retries and edits that were given up are counted (`other-branches`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.fields import TIME, as_time, plain_name
from hivetune.data.pieces.logs import way_to
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, before_media, listed, one_of
from hivetune.data.pieces.turns import in_order
from hivetune.data.reasons import RowRefused
from hivetune.records import Message


def branch(parents: Mapping[str, str | None], leaf: str) -> list[str]:
    """Return the nodes from the root to `leaf`. Raise RowRefused when they go in a circle."""
    path = way_to(leaf, parents)
    if leaf in parents and not path:
        raise RowRefused("wrong-type", "the messages' parents go in a circle")
    return path


def kept_nodes(row: Row, time: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return (the nodes of a tree, those of the branch that was kept)."""
    nodes = {key: node for key, node in row["mapping"].items() if isinstance(node, dict)}
    if not any(node.get("parent") or node.get("children") for node in nodes.values()):
        nodes = _in_order_of_time(nodes)
    parents = {str(child): key for key, node in nodes.items() for child in listed(node.get("children"))}
    parents |= {key: node["parent"] for key, node in nodes.items() if node.get("parent")}
    leaf = str(row.get("current_node"))
    if leaf not in nodes:
        leaves = [key for key, node in nodes.items() if not node.get("children")]
        leaf = max(leaves, key=lambda key: as_time(one_of(nodes[key].get("message"), time)) or 0, default="")
    return nodes, branch({key: parents.get(key) for key in nodes}, leaf)


def _in_order_of_time(nodes: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return nodes that lost their tree, one behind the other: by their times where all have one, else as they
    stand.
    """
    spoken = [key for key, node in nodes.items() if isinstance(node.get("message"), dict)]
    times = {key: nodes[key]["message"].get("create_time") for key in spoken}
    if all(isinstance(time, int | float) for time in times.values()):
        spoken.sort(key=times.__getitem__)
    above = {other: key for key, other in itertools.pairwise(spoken)}
    below = {key: [other] for other, key in above.items()}
    return {key: {**nodes[key], "parent": above.get(key), "children": below.get(key)} for key in spoken}


def done(name: str, messages: list[Message], left_out: int, cut: tuple[str, ...] = ()) -> Conversation:
    ordered, changed = in_order(messages)
    return Conversation(name, ordered, changed=(("other-branches",) if left_out else ()) + cut + changed)


class NotLearned(Exception):
    """A turn that is read and not learned, and why."""

    def __init__(self, refused: RowRefused, *messages: Message):
        self.refused = refused
        unlearned = [replace(message, weight=0) if message.role == "assistant" else message for message in messages]
        self.messages = unlearned or [Message("assistant", "", 0)]


def said_in_chat(turns: Iterable[Any], read: Callable[[Any], list[Message]]) -> tuple[list[Message], tuple[str, ...]]:
    """Return (messages, reasons of severity warn) of turns: an answer for which the program used a tool, whose
    results no export holds, or that broke off is read and not learned. `read` raises NotLearned for such a
    turn.
    """
    why: list[RowRefused] = []

    def read_or_note(turn: Any) -> list[Message]:
        try:
            return read(turn)
        except NotLearned as noted:
            why.append(noted.refused)
            return noted.messages

    read_so_far, cut = before_media(list(turns), read_or_note)
    messages: list[Message] = []
    asks = ("user", "system")
    for asked, turn in itertools.groupby(itertools.chain.from_iterable(read_so_far), lambda one: one.role in asks):
        answer = list(turn)
        has_results = sum(len(one.tool_calls) for one in answer) == sum(one.role == "tool" for one in answer)
        if not asked and not (has_results and all(one.weight for one in answer)):
            # Which calls have their results nobody can tell: the words of such an answer are kept, and not learned.
            words = [one for one in answer if one.role == "assistant" and one.content.strip()]
            answer = [replace(one, weight=0, tool_calls=()) for one in words]
            if not answer:
                cut = ("ends-before-media",)
                break
        messages += answer
    weights = [message.weight for message in messages if message.role == "assistant"]
    if not any(weights) and (why or weights):
        raise (*why, RowRefused(NOT_HELD, "the result of a call is not held"))[0]
    return messages, cut


_PARENTS = (
    *("parent", "parent_id", "parent_uuid", "parent_message_id", "parent_message_uuid", "reply_to", "reply_to_id"),
    *("in_reply_to", "previous_id", "previous_message_id", "prev_id", "replies_to"),
)
_IDS = ("id", "uuid", "message_id", "msg_id", "node_id", "_id")
_LINKS = frozenset((*_PARENTS, *_IDS))


def kept_branch(messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the places of the messages from the root to the last leaf; all of them where no message names its parent.

    The last one is the newest where all have times, else the last of the list, if no message stands before its parent.
    None where nobody can tell.
    """
    everything = list(range(len(messages)))
    plain = _plain(messages)
    own = next((name for name in _IDS if all(_is_id(one.get(name)) for one in plain)), None)
    above = next((name for name in _PARENTS if any(_is_id(one.get(name)) for one in plain)), None)
    if own is None or above is None:
        return everything
    places = {str(one[own]): place for place, one in enumerate(plain)}
    parents = [places.get(str(one.get(above))) for one in plain]
    if len(places) < len(plain) or 2 * sum(parent is not None for parent in parents) < len(plain):
        return everything  # ids of something else, or a few messages that quote others
    names = [None if parent is None else str(parent) for parent in parents]
    last = _last(plain, parents)
    path = way_to(str(last), {str(place): name for place, name in enumerate(names)})
    return [int(place) for place in path] or None  # a circle


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{plain_name(key): value for key, value in message.items()} for message in messages]


def links_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the id of a message and that of the one before it, where it names them."""
    return {name: value for name, value in message.items() if plain_name(name) in _LINKS}


def are_one_tree(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each message but the first names one of these as its parent."""
    plain = _plain(messages)
    for own in _IDS:
        known = {str(one[own]) for one in plain if _is_id(one.get(own))}
        if len(known) == len(plain) and any(
            plain[0].get(above) is None and all(str(one.get(above)) in known for one in plain[1:]) for above in _PARENTS
        ):
            return len(plain) > 1
    return False


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _last(plain: Sequence[Mapping[str, Any]], parents: Sequence[int | None]) -> int | None:
    """Return the message that was written last."""
    name = next((name for name in TIME if all(as_time(one.get(name)) is not None for one in plain)), None)
    if name is not None:
        times = [as_time(one[name]) or 0.0 for one in plain]
        if all(parent is None or times[parent] <= times[place] for place, parent in enumerate(parents)):
            return max(range(len(plain)), key=lambda place: (times[place], place))
    in_list = all(parent is None or parent < place for place, parent in enumerate(parents))
    return len(plain) - 1 if in_list else None

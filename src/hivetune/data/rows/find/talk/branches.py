"""Trees of edits and retries: messages that name the one before them, or hold the ones behind them.

Kept is the branch that ends at the message written last; other branches are counted by whoever asks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.pieces.fields import TIME, as_time, plain_name
from hivetune.data.pieces.said import objects

_PARENTS = (
    *("parent", "parent_id", "parent_uuid", "parent_message_id", "parent_message_uuid", "reply_to", "reply_to_id"),
    *("in_reply_to", "previous_id", "previous_message_id", "prev_id", "replies_to"),
)
_IDS = ("id", "uuid", "message_id", "msg_id", "node_id", "_id")
_LINKS = frozenset((*_PARENTS, *_IDS))
_CHILDREN = ("children", "replies", "responses", "answers", "branches")
_RANK = "rank"  # of several replies, the better first
MAX_TREE_MESSAGES = 20_000
_OWN, _ABOVE = "hivetune_id", "hivetune_parent"  # of messages that stand inside each other


def kept_branch(messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """The places of the messages from the root to the last leaf; all of them where no message names its parent.

    The last one is the newest where all have times, else the last of the list, if no message stands before its parent.
    None where nobody can tell.
    """
    everything = list(range(len(messages)))
    plain = [{plain_name(key): value for key, value in message.items()} for message in messages]
    own = next((name for name in (_OWN, *_IDS) if all(_is_id(one.get(name)) for one in plain)), None)
    above = next((name for name in (_ABOVE, *_PARENTS) if any(_is_id(one.get(name)) for one in plain)), None)
    if own is None or above is None:
        return everything
    places = {str(one[own]): place for place, one in enumerate(plain)}
    parents = [places.get(str(one.get(above))) for one in plain]
    if len(places) < len(plain) or 2 * sum(parent is not None for parent in parents) < len(plain):
        return everything  # ids of something else, or a few messages that quote others
    last = _last(plain, parents)
    return None if last is None else _path_to(last, parents)


def links_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The id of a message and that of the one before it, where it names them."""
    return {name: value for name, value in message.items() if plain_name(name) in _LINKS}


def are_one_tree(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each message but the first names one of these as its parent."""
    plain = [{plain_name(key): value for key, value in message.items()} for message in messages]
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
    """The message that was written last."""
    name = next((name for name in TIME if all(as_time(one.get(name)) is not None for one in plain)), None)
    if name is not None:
        times = [as_time(one[name]) or 0.0 for one in plain]
        if all(parent is None or times[parent] <= times[place] for place, parent in enumerate(parents)):
            return max(range(len(plain)), key=lambda place: (times[place], place))
    if all(parent is None or parent < place for place, parent in enumerate(parents)):
        return len(plain) - 1
    return None


def _path_to(leaf: int, parents: Sequence[int | None]) -> list[int] | None:
    path: list[int] = []
    place: int | None = leaf
    while place is not None:
        if len(path) > len(parents):
            return None  # a circle
        path.append(place)
        place = parents[place]
    return path[::-1]


def holds_replies(message: Mapping[str, Any]) -> bool:
    """Whether a message holds those that answer it."""
    return _children(message) is not None


def spread(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """(messages that stand inside each other as one list, each with its own id and its parent's; whether some are left
    out): of replies that are ranked only the best is there.
    """
    some_left = False
    found: list[dict[str, Any]] = []
    waiting: list[tuple[Mapping[str, Any], int | None]] = [(message, None) for message in reversed(messages)]
    while waiting and len(found) < MAX_TREE_MESSAGES:
        message, parent = waiting.pop()
        name = _children(message)
        number = len(found)
        found.append({**{k: v for k, v in message.items() if k != name}, _OWN: number, _ABOVE: parent})
        replies = objects(message[name]) or [] if name else []
        best = _best(replies)
        some_left = some_left or len(best) < len(replies)
        waiting += [(reply, number) for reply in reversed(best)]
    return found, some_left or bool(waiting)


def _children(message: Mapping[str, Any]) -> str | None:
    """The name under which a message holds others that are like it."""
    for name in _CHILDREN:
        replies = objects(message.get(name))
        if replies is not None and all(len(message.keys() & reply.keys()) >= 2 for reply in replies):
            return name
    return None


def _best(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ranks = [reply.get(_RANK) for reply in replies]
    if len(replies) < 2 or not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        return replies
    return [min(replies, key=lambda reply: reply[_RANK])]

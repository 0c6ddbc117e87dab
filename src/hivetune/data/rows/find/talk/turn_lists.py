"""A list in a row as turns that layouts/turns.py reads: who speaks and what was said, under whatever names.

Roles are decided by their values over the whole list, contents by name and then by what looks written. What can't be
decided is None: nobody's words are given to somebody else.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import all_texts, names, objects, parsed
from hivetune.data.pieces.turns import MEDIA_KEYS, ROLES, THOUGHT_KEYS, is_conversation
from hivetune.data.rows.find.names import (
    ANSWERERS,
    ASKERS,
    are_alternatives,
    likely_contents,
    names_role,
    part_of,
    role_of,
    words,
)
from hivetune.data.rows.find.talk.branches import holds_replies, kept_branch, spread
from hivetune.data.rows.find.talk.events import are_spans, event_kinds, turn_of
from hivetune.data.rows.find.talk.hosts import served, with_system_as_party
from hivetune.data.rows.find.talk.openhands import is_openhands, openhands_turns
from hivetune.data.rows.find.talk.text_lists import rounds, speaker_and_text
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.data.rows.layouts.pairs import say_the_same
from hivetune.records import Role

MAX_TURN_DEPTH = 3  # of a role or a content inside its turn
MIN_TURNS = 2
_PROGRAMS = ("action", "event", "note", "status", "info")  # beside two people, what a program did between their words
# Taken over with a turn as they are: layouts/turns.py knows them.
_KEPT = (
    *("tool_calls", "toolCalls", "function_call", "tool_call_id", "toolCallId", "weight", "train", "name", "tool_name"),
    *("additional_kwargs", "refusal", "isThought"),
    *THOUGHT_KEYS,
    *MEDIA_KEYS,
)
_KEPT_SET = frozenset(_KEPT)


# What programs call the two sides of a chat that name no party.
_SPOKEN_KINDS: dict[str, Role] = {"prompt": "user", "response": "assistant", "api_message": "assistant"}


# What a list of turns is called; other lists may hold things that have nothing to do with each other.
TALK = names(
    "message messages conversation conversations dialog dialogs dialogue dialogues turn chat chats log history "
    "exchange exchanges interactions session talk transcript rounds"
)


class NamedParties(NamedTuple):
    """What the user said about the values that name who speaks, where nobody could know."""

    user: str | None = None
    assistant: str | None = None


_Sides = tuple[list[str], list[str]]  # paths of what was asked, and of what was answered
NOBODY_NAMED = NamedParties()


class FoundTurns(NamedTuple):
    """Turns, each {"role", "content", ..}, and reasons of severity warn."""

    turns: list[dict[str, Any]]
    changed: tuple[str, ...] = ()


def as_turns(value: Any, name: str, given: NamedParties = NOBODY_NAMED) -> FoundTurns | None:
    """The turns of a list called `name`, or of an object that holds its replies; None when it is no conversation for
    certain.
    """
    value = parsed(value)
    if isinstance(value, dict) and holds_replies(value):
        value = [value]
    if not isinstance(value, list) or not value:
        return None
    items = objects(value)
    if items is None:
        return _of_texts(value, name)
    if are_spans(items):
        return None
    if is_openhands(items):
        return FoundTurns(openhands_turns(items), ("program-notes",))
    some_left = False
    if any(map(holds_replies, items)):
        items, some_left = spread(items)
    if (TALK & set(words(name)) or len(items) == 1) and (both := _pairs(items)) is not None:
        return FoundTurns(both)  # under another name they may be examples that have nothing to do with each other
    return _of_objects(items, given, ("other-branches",) if some_left else ())


def _of_texts(value: list[Any], name: str) -> FoundTurns | None:
    return _spoken(value) or (FoundTurns(both) if TALK & set(words(name)) and (both := rounds(value)) else None)


def _of_objects(items: list[dict[str, Any]], given: NamedParties, changed: tuple[str, ...]) -> FoundTurns | None:
    """Objects that are one turn each: those of the branch that was kept, or those of a stream that are turns."""
    kept = kept_branch(items)
    if kept is None or len(items) < MIN_TURNS:
        return None  # or a tree of edits whose leaf nobody can tell
    branch = [items[place] for place in kept]
    changed = ("other-branches",) if len(branch) < len(items) else changed
    turns = _roles_and_contents(branch, given)
    if turns is not None:
        return FoundTurns(turns, changed)
    events = _of_events([flat(item) for item in branch])
    return None if events is None else FoundTurns(events, (*changed, "program-notes"))


def _of_events(flats: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The turns of a list in which several kinds of events stand."""
    kinds = event_kinds(flats)
    if kinds is None:
        return None
    return [turn for one in flats if (turn := turn_of(one, kinds)) is not None]


def flat(item: Mapping[str, Any], depth: int = MAX_TURN_DEPTH, prefix: str = "") -> dict[str, Any]:
    """Paths of everything in an object but objects: `author.role`; lists stay whole, but for a role alone in one."""
    found: dict[str, Any] = {}
    for key, held in item.items():
        alone = isinstance(held, list) and len(held) == 1 and isinstance(held[0], str) and names_role(key)
        name, value = f"{prefix}{key}", held[0] if alone else _message_in(held)
        if isinstance(value, dict) and value and depth > 1:
            found |= flat(value, depth - 1, f"{name}.")
        else:
            found[name] = value
    return found


def _message_in(value: Any) -> Any:
    """The message that a column of a table holds as JSON text, with who says it and what; other values as they are."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    inner = parsed(value)
    known = (
        isinstance(inner, dict) and not {"type", "role"}.isdisjoint(inner) and not {"data", "content"}.isdisjoint(inner)
    )
    return inner if known else value


def _roles_and_contents(items: list[dict[str, Any]], given: NamedParties) -> list[dict[str, Any]] | None:
    flats = [flat(item) for item in items]
    common = [path for path in flats[0] if all(path in one for one in flats)]
    best: tuple[str, list[Role]] | None = None
    for path in sorted(common, key=lambda path: (not names_role(path), path.count("."))):
        values = [one[path] for one in flats]
        roles = roles_of(path, values, given)
        if roles is not None and path.rpartition(".")[2] == "role" and ROLES.keys() >= set(values):
            best = (path, roles)
            break  # the field's own words
        if roles is not None:
            if best is not None and roles != best[1] and names_role(path):
                return None  # two columns disagree about who speaks
            best = best or (path, roles)
    best = best or _by_who_serves(flats, common)
    if best is None:
        return None
    path, roles = best
    content = _content_path(flats, path)
    if content is None:
        return None
    if any(one.get(content) is None and not _KEPT_SET & item.keys() for item, one in zip(items, flats, strict=True)):
        return None  # somebody said nothing, or said it under another name
    return [_turn(role, item, one, content) for role, item, one in zip(roles, items, flats, strict=True)]


def _by_who_serves(flats: Sequence[Mapping[str, Any]], common: Sequence[str]) -> tuple[str, list[Role]] | None:
    """The column of two parties that nobody knows, and who speaks, where one of them offers help."""
    for path in filter(names_role, common):
        parties = [str(one[path]).strip() for one in flats]
        content = _content_path(flats, path)
        if content is None or path == "role" or not all(map(names_party, parties)):
            continue
        roles = served(parties, [one.get(content) for one in flats])
        if roles is not None:
            return path, roles
    return None


def _turn(role: Role, item: Mapping[str, Any], one: Mapping[str, Any], content: str) -> dict[str, Any]:
    above = content.rpartition(".")[0]
    holder: Any = item
    for key in above.split(".") if above else ():
        holder = inner if isinstance(inner := holder.get(key), dict) else {}
    turn = {key: source[key] for source in (holder, item) for key in _KEPT if source.get(key) not in (None, "", [])}
    if role != "tool":
        turn.pop("name", None)
    said = one.get(content)
    if all_texts(said) and "sentence" in content:
        said = " ".join(text.strip() for text in said)
    return {**turn, "role": role, "content": said}


def roles_of(path: str, values: Sequence[Any], given: NamedParties = NOBODY_NAMED) -> list[Role] | None:
    """Who speaks in each turn; None when the values of this path do not say it."""
    if all(isinstance(value, bool) for value in values):
        return _roles_of_flags(path, values)
    if not all(isinstance(value, str | int) for value in values):
        return None
    texts = [str(value).strip() for value in values]
    if given.user is not None and given.assistant is not None:
        known: dict[str, Role] = {given.user: "user", given.assistant: "assistant"}
        return [known[text] for text in texts] if set(texts) == known.keys() else None
    found = {text: role_of(text) or _SPOKEN_KINDS.get(plain_name(text)) for text in set(texts)}
    if path == "role" and None in found.values():
        return None  # the field's own name, so the words are too
    if not names_role(path) and (None in found.values() or len(found) < MIN_TURNS):
        return None
    return _agreed(texts, found)


def _agreed(texts: Sequence[str], found: dict[str, Role | None]) -> list[Role] | None:
    """The roles of two or more parties; of two parties that take turns, one that is known tells the other."""
    named = [name for name, role in found.items() if role is None]
    if len(named) == 1 and len(found) == MIN_TURNS:
        other = next(role for name, role in found.items() if role is not None)
        if not names_party(named[0]) or (other == "user" and not _answers_each(texts, named[0])):
            return None  # what an unknown party says is learned where it answers somebody, turn by turn
        found[named[0]] = "assistant" if other == "user" else "user"
    roles = [found[text] for text in texts]
    if "assistant" not in roles and set(roles) == {"user", "system"} and roles[0] == "user":
        roles = ["assistant" if role == "system" else role for role in roles]  # a dialogue system's answers
    if None in roles or not {"user", "assistant"} <= set(roles):
        return None
    return [role for role in roles if role is not None]


def _answers_each(texts: Sequence[str], party: str) -> bool:
    """Whether a party speaks behind each turn of somebody who asks, and never twice."""
    return texts[0] != party and all(one != other for one, other in pairwise(texts))


def names_party(value: str) -> bool:
    """Whether a value could be somebody's name or kind: short, and with letters."""
    return 0 < len(value) <= 40 and len(value.split()) <= 4 and any(c.isalpha() for c in value)


def _roles_of_flags(path: str, values: Sequence[bool]) -> list[Role] | None:
    said = frozenset(words(path.rpartition(".")[2])) | frozenset((plain_name(path).removeprefix("is"),))
    if len(set(values)) < MIN_TURNS or not names_role(path):
        return None
    if said & ASKERS and not said & ANSWERERS:
        return ["user" if value else "assistant" for value in values]
    if said & ANSWERERS and not said & ASKERS:
        return ["assistant" if value else "user" for value in values]
    return None


def _content_path(flats: Sequence[Mapping[str, Any]], role_path: str) -> str | None:
    """Where each turn says its words: by name, else the only path with written text."""
    paths = dict.fromkeys(path for one in flats for path in one if path != role_path)
    holds = [path for path in paths if any(_says(one.get(path)) for one in flats)]
    wanted = len(flats) / 2
    for path in likely_contents(iter(holds)):
        if sum(_says(one.get(path)) for one in flats) >= wanted:
            return path
    written = [path for path in holds if any(looks_like_content(one.get(path)) for one in flats)]
    return written[0] if len(written) == 1 and part_of(written[0].rpartition(".")[2]) != "note" else None


def _says(value: Any) -> bool:
    return (isinstance(value, str) and value != "") or (isinstance(value, list) and bool(value))


def _pairs(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Items that hold both sides: {"user utterance": .., "system response": ..}; or, behind a first question, what was
    answered and what was asked then.
    """
    flats = list(map(flat, with_system_as_party(items)))
    sides = _with_one_known(flats, [both_sides(one) for one in flats])
    shifted = len(sides) > 1 and bool(sides[0][0]) and not sides[0][1] and all(answered for _, answered in sides[1:])
    turns: list[dict[str, Any]] = []
    system = [path for path in flats[0] if part_of(path) == "system" and flats[0][path]]
    if len(system) == 1:
        turns.append({"role": "system", "content": flats[0][system[0]]})
    for number, (one, (asked, answered)) in enumerate(zip(flats, sides, strict=True), 1):
        is_last = number == len(items) > 1
        whole = shifted or (asked and (answered or is_last))  # at the end nobody may have answered any more
        if len(asked) > 1 or len(answered) > 1 or not whole:
            return None
        said = [{"role": "user", "content": one[path]} for path in asked]
        answers = (one[path][0] if are_texts(path, one[path]) else one[path] for path in answered)
        said += [{"role": "assistant", "content": answer} for answer in answers]
        turns += reversed(said) if shifted else said
    return turns


def _with_one_known(flats: Sequence[Mapping[str, Any]], sides: list[_Sides]) -> list[_Sides]:
    """The names that are both sides in one item are so in the others, whatever these say; of two texts in each item,
    under the same two names everywhere, the other where one side is known.
    """
    both = next((one for one in sides if len(one[0]) == len(one[1]) == 1), None)
    if both is not None:
        named = (both[0][0], both[1][0])
        hold = [all(isinstance(one.get(path), str) and one[path] for path in named) for one in flats]
        return [both if sum(map(len, side)) < 2 and has else side for side, has in zip(sides, hold, strict=True)]
    keys = list(flats[0])
    if len(keys) != 2 or any(list(one) != keys or not all(isinstance(v, str) for v in one.values()) for one in flats):
        return sides
    asked, answered = sides[0]
    if asked == keys[:1] and not answered:
        return [(asked, keys[1:])] * len(flats)
    return [(keys[:1], answered)] * len(flats) if answered == keys[1:] and not asked else sides


def both_sides(paths: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(paths of what was asked, paths of what was answered) by the names in them, innermost first."""
    asked: list[str] = []
    answered: list[str] = []
    for path, value in paths.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            answered += [path] if words(path.rpartition(".")[2]) in _NUMBERS else []
            continue
        if not _says(value) or (
            isinstance(value, list) and not (_are_parts(value) or are_texts(path, value) or is_conversation(value))
        ):
            continue
        side = _side_of(path)
        if side == "answered":
            answered.append(path)
        elif side == "asked" and not are_texts(path, value):
            asked.append(path)
    if not (asked and answered):
        asked, answered = _with_parties(paths, asked, answered)
    return asked, answered


def _with_parties(paths: Mapping[str, Any], asked: list[str], answered: list[str]) -> tuple[list[str], list[str]]:
    """The same with `user` and `agent`: alone they name somebody, but beside the other's words they hold words."""
    spoken = {plain_name(path.rpartition(".")[2]): path for path, value in paths.items() if isinstance(value, str)}
    user, agent = spoken.get("user"), spoken.get("agent")
    replies = [agent] if agent is not None and looks_like_content(paths[agent]) and not answered else answered
    asks = [user] if user is not None and not asked else asked
    if len(asks) != 1 or len(replies) != 1 or not (_is_party(asks[0], ASKERS) and _is_party(replies[0], ANSWERERS)):
        return asked, answered
    return asks, replies


def _is_party(path: str, parties: frozenset[str]) -> bool:
    return bool(parties & set(words(path.rpartition(".")[2])))


def _side_of(path: str) -> str | None:
    """Whose words a path holds, by the innermost name that says it; None below what was given, or for neither."""
    *above, _ = path.split(".")
    if any(part_of(name) in ("given", "about") and name != "context" for name in above):
        return None
    below = False
    for name in reversed(path.split(".")):
        part = part_of(name)
        if part == "answered" and below:
            return None  # one of the things that an answer holds is not the whole of it
        if part in ("asked", "answered"):
            return part
        if part not in ("unknown", "content") or (part == "content" and plain_name(name) not in _TRANSPARENT):
            return None
        below = below or plain_name(name) not in _TRANSPARENT
    return None


_NUMBERS = (("answer",), ("final", "answer"), ("correct", "answer"), ("expected", "answer"))  # under others, scores
_TRANSPARENT = ("content", "text", "parts", "message", "value", "body", "data")


def are_texts(path: str, value: Any) -> bool:
    """One answer in a list, or several that are said to be equally good. Others may be lines: nobody can tell."""
    if not all_texts(value) or not all(value):
        return False
    return len(set(value)) == 1 or are_alternatives(path) or say_the_same(value)


def _are_parts(value: Any) -> bool:
    parts = objects(value)
    return parts is not None and all("text" in part or "type" in part for part in parts)


def _spoken(value: Sequence[Any]) -> FoundTurns | None:
    """Texts that begin with who speaks, or pairs of speaker and text."""
    if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
        pieces = [(item[0].strip(), item[1]) for item in value]
    elif all(isinstance(item, str) for item in value):
        pieces = [found for item in value if (found := speaker_and_text(item))]
    else:
        return None
    if len(pieces) < max(MIN_TURNS, len(value)):
        return None
    people = [(name, text) for name, text in pieces if name.strip().lower() not in _PROGRAMS]
    roles = _agreed([name for name, _ in people], {name: role_of(name) for name, _ in people})
    if roles is None or not all(isinstance(text, str) for _, text in people):
        return None
    turns = [{"role": role, "content": text} for role, (_, text) in zip(roles, people, strict=True)]
    return FoundTurns(turns, ("program-notes",) if len(people) < len(pieces) else ())

"""One row of no known layout: the list of its turns, or its only question and answer, wherever they stand.

Whatever else in the row looks written must be found in that conversation again; else the row is refused, with the line
of the config that would read it (find/asking/advice.py).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hivetune.data.pieces.answers import is_request, is_response, read_answer, read_request
from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Conversation, Row, Tools, all_texts, objects
from hivetune.data.pieces.turns import in_order, read_messages
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.given import gathered, is_about, is_beside, refuse_half_of_an_agent
from hivetune.data.rows.find.leaves import Node, at, left_out, nodes, open_paths, system_in
from hivetune.data.rows.find.names import are_of_parties, is_note, part_of, says_nothing, words
from hivetune.data.rows.find.pair import FoundPair, PairSpots, read_pair
from hivetune.data.rows.find.talk.transcripts import turns_behind_words, turns_in_text
from hivetune.data.rows.find.talk.turn_lists import NOBODY_NAMED, TALK, FoundTurns, NamedParties, as_turns, both_sides
from hivetune.data.rows.find.written import with_written_answer
from hivetune.data.rows.layouts.columns import SYSTEM, TOOLS, looks_like_content
from hivetune.data.rows.layouts.mapped import NAMED_ROLES
from hivetune.data.rows.layouts.pairs import LABELS
from hivetune.data.rows.layouts.records import joined
from hivetune.records import Message

_SPEAKER = re.compile(r"\s*(?:user|assistant) ?:", re.I)

Paths = Sequence[tuple[str, ...]]
Spot = tuple[tuple[str, ...], FoundTurns]


def read_structure(row: Row, *, mapped: bool = False, decided: PairSpots | None = None) -> Conversation:
    """The one conversation of a row; `mapped`: that of its list `messages`, whatever else it holds; `decided`: where
    question and answer stand in most rows of its file.

    Raises RowRefused: unknown-layout, unexplained-column, or what is wrong with it.
    """
    given = NamedParties(_text(row.get("user_role")), _text(row.get("assistant_role")))
    body: Row = without_prefix({key: value for key, value in row.items() if key not in NAMED_ROLES})
    if mapped:
        body = {key: body[key] for key in ("messages", *SYSTEM, *TOOLS) if key in body}
    written = body if mapped else with_written_answer(body)
    spots = [] if given.user is None else turn_spots(written, given)
    spots = spots or turn_spots(written, NOBODY_NAMED)
    pair: FoundPair | None = None
    changed: tuple[str, ...] = ()
    if spots:
        body = written
        messages, used, changed = _of_turns(body, spots)
    elif decided is None and (whole := _call(body) or _in_two_lists(body)) is not None:
        messages, used = whole
    else:
        body = gathered(written)
        pair = read_pair(body, decided)
        messages, used, changed = pair.messages, pair.used, pair.changed
        _refuse_number_of_talk(pair)
        refuse_half_of_an_agent(body, used, pair.answer)
    ordered, more = in_order(messages)
    tools = read_tools(next((one.value for one in nodes(body) if _are_tools(one)), None))
    noted = used if {"program-notes", "other-branches"} & set(changed) else ()  # what else was said there is counted
    if not mapped and _leaves_out(body, messages, tools, (used, noted), pair):
        changed = (*changed, "left-out-columns")
    return Conversation("structure", ordered, tools, changed=(*changed, *more))


def _are_tools(node: Node) -> bool:
    """Whether a part of a row describes tools; names of them alone are no description."""
    return part_of(node.path[-1]) == "tools" and (isinstance(node.value, dict) or objects(node.value) is not None)


def _leaves_out(
    row: Row, messages: Sequence[Message], tools: Tools, read: tuple[Paths, Paths], pair: FoundPair | None
) -> bool:
    """Whether texts about the answer or the conversation are left out. `read`: where the conversation stands, and
    below what other things may stand. Raises RowRefused where another text is left out.
    """
    used, noted = read
    some = False
    read_texts = {str(at(row, ".".join(path))).strip() for path in used}
    for path, value in left_out(row, messages, tools, used):
        if any(path[: len(one)] == one for one in noted) or value.strip() in read_texts:
            continue
        if pair is not None and _is_heading(path, pair):
            some = True
            continue
        if pair is not None and not pair.made and not is_about(row, path, value, pair.answered, pair.answer):
            raise _unexplained(path)
        if pair is None and (any(path[: len(one)] == one for one in used) or not is_beside(path)):
            raise _unexplained(path)
        some = True
    return some


def _is_heading(path: tuple[str, ...], pair: FoundPair) -> bool:
    """Whether a text is what a talk between two parties is about, as sets of doctors' advice have it."""
    return [words(name) for name in path] == [("description",)] and are_of_parties(
        ".".join(pair.used[0]), pair.answered
    )


def _unexplained(path: tuple[str, ...]) -> RowRefused:
    return RowRefused("unexplained-column", f"{'.'.join(path)[:60]!r} looks like content, and nothing says what it is")


def without_prefix(value: Any) -> Any:
    """A row whose names all begin with the same word that says nothing (`toy_input`, `toy_output`), without it."""
    if isinstance(value, list):
        return [without_prefix(item) for item in value]
    if not isinstance(value, dict):
        return value
    first = {words(str(key))[:1] for key in value}
    word = first.pop() if len(first) == 1 else ()
    shared = bool(word) and len(value) > 1 and says_nothing(word[0])
    size = len(word[0]) + 1 if shared else 0
    if len({key[size:] for key in value} - {""}) < len(value):
        size = 0  # `u1` and `u2` are names, and no prefix of anything
    return {key[size:]: without_prefix(inner) for key, inner in value.items()}


def turn_spots(row: Row, given: NamedParties) -> list[Spot]:
    """Every list of turns in a row, the outermost ones; else every text in which speakers take turns."""
    found: list[Spot] = []
    texts: list[Spot] = []
    for path, value in nodes(row):
        if any(path[: len(above)] == above for above, _ in found) or is_note((*path, "")) or "[]" in path:
            continue
        if isinstance(value, list | dict) and (turns := as_turns(value, path[-1], given)) is not None:
            found.append((path, turns))
        elif isinstance(value, str) and (spoken := _spoken(path[-1], value)):
            texts.append((path, FoundTurns(spoken, ("turns-from-text",))))
    return found or ([] if all(both_sides(open_paths(row))) else texts)


def _spoken(name: str, text: str) -> list[dict[str, Any]] | None:
    return turns_in_text(text) or (turns_behind_words(text) if TALK & set(words(name)) else None)


def _of_turns(row: Row, spots: Sequence[Spot]) -> tuple[list[Message], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """(messages, where they stand, what was changed) of the longest list, if it holds whatever the others say."""
    system = system_in(row)
    read = [(path, read_messages(turns.turns, system), turns.changed) for path, turns in spots]
    path, messages, changed = max(read, key=lambda one: sum(len(message.content) for message in one[1]))
    said = {message.content.strip() for message in messages}
    if any(
        message.content.strip() not in said for _, others, _ in read for message in others if message.role != "system"
    ):
        raise RowRefused("unknown-layout", "several lists of turns that differ: " + _paths(one for one, *_ in read))
    begun = messages[:-1] if _is_empty(messages[-1]) else messages
    if begun and begun[-1].role == "user":
        opened = open_paths(row)
        texts = {str(opened[one]): one for one in both_sides(opened)[1]}
        _refuse_class_of_talk(texts, begun)
        if len(texts) == 1:
            answer = opened[next(iter(texts.values()))]
            answer = str(answer) if isinstance(answer, int | float) else answer
            several = all_texts(answer)
            changed = (*changed, "other-answers") if several and len(answer) > 1 else changed
            messages = [*begun, *read_answer(answer[0] if several else answer)[0]]
    return messages, (path,), changed


def _refuse_class_of_talk(answers: Mapping[str, str], messages: Sequence[Message]) -> None:
    """Raises RowRefused where the answer beside a conversation in which both sides spoke is a class: of the whole
    conversation, and no turn.
    """
    talks = any(message.role == "assistant" for message in messages)
    for text, path in answers.items():
        if talks and plain_name(path.rpartition(".")[2]) in LABELS and not looks_like_content(text):
            raise _unexplained(tuple(path.split(".")))


def _refuse_number_of_talk(pair: FoundPair) -> None:
    """Raises RowRefused where a number is the class of a text that begins with who speaks: nobody says what it is."""
    spoken = any(_SPEAKER.match(message.content) for message in pair.messages[:-1])
    if plain_name(pair.answered) in LABELS and str(pair.answer).isdecimal() and spoken:
        raise _unexplained((pair.answered,))


def _is_empty(message: Message) -> bool:
    """Whether an answer has still to be filled in."""
    return message.role == "assistant" and not (message.content or message.tool_calls or message.reasoning)


def _call(row: Row) -> tuple[list[Message], tuple[tuple[str, ...], ...]] | None:
    """What an API was asked and what it answered, wherever a log keeps the two."""
    objects = [node for node in nodes(row) if isinstance(node.value, dict) and "[]" not in node.path]
    answers = _outermost([node for node in objects if _answers(node.value)])
    asks = _outermost([node for node in objects if _asks(node.value) and not _answers(node.value)])
    if len(asks) != 1 or len(answers) != 1:
        return None
    said, _ = read_answer(answers[0].value)
    return joined(read_request(asks[0].value).messages, said), (asks[0].path, answers[0].path)


def _in_two_lists(row: Row) -> tuple[list[Message], tuple[tuple[str, ...], ...]] | None:
    """All that a user said in one list, the answer to each in another, as MT-Bench has its references."""
    lists = {name: value for name, value in row.items() if isinstance(value, list) and value}
    lists = {name: value for name, value in lists.items() if all(isinstance(text, str) for text in value)}
    asked = [name for name in lists if words(name) == ("turn",)]
    answered = [name for name in lists if words(name) == ("reference",) or part_of(name) == "answered"]
    if len(asked) != 1 or len(answered) != 1 or len(lists[asked[0]]) != len(lists[answered[0]]):
        return None
    turns = [
        {"role": role, "content": text}
        for pair in zip(lists[asked[0]], lists[answered[0]], strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return read_messages(turns, system_in(row)), ((asked[0],), (answered[0],))


def _outermost(nodes: Sequence[Node]) -> list[Node]:
    return [one for one in nodes if not any(one.path[: len(o.path)] == o.path for o in nodes if o is not one)]


def _answers(value: Mapping[str, Any]) -> bool:
    strong = ("choices", "candidates", "stop_reason", "stopReason", "done_reason", "generations", "output")
    return any(key in value for key in strong) and is_response(value)


def _asks(value: Mapping[str, Any]) -> bool:
    return is_request(value) and isinstance(
        value.get("messages", value.get("contents", value.get("prompt"))), str | list
    )


def _paths(paths: Iterator[tuple[str, ...]]) -> str:
    return ", ".join(".".join(path) for path in paths)[:120]


def _text(value: Any) -> str | None:
    return None if value is None else str(value).strip()

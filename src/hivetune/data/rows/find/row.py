"""One row of no known layout: the list of its turns, or its only question and answer, wherever they stand.

Whatever else in the row looks written must be found in that conversation again; else the row is refused, with the line
of the config that would read it (find/advice.py).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.fields import plain_name
from hivetune.data.rows.find.names import is_a_models, is_note, names_role, part_of, says_nothing, words
from hivetune.data.rows.find.turn_lists import NOTHING_GIVEN, Given, as_turns, names_party, sides
from hivetune.data.rows.layouts.answers import is_request, is_response, read_answer, read_request
from hivetune.data.rows.layouts.calls import read_tools
from hivetune.data.rows.layouts.columns import CONTEXT, SYSTEM, TOOLS, looks_like_content
from hivetune.data.rows.layouts.pairs import spoken_prompt
from hivetune.data.rows.layouts.records import joined
from hivetune.data.rows.layouts.said import Conversation, Row, Tools, is_json_text, parsed
from hivetune.data.rows.layouts.turns import in_order, read_messages, read_system
from hivetune.records import Message

NAME = "structure"
MAX_DEPTH = 6
MAX_NODES = 5000
NESTED_WORDS = 8  # a nested text of fewer words, under a name that nobody knows, is a value and not a document
_FEW_WORDS = 3
MIN_WORDS = 2  # of a question that is known by its place alone
_ADDRESS = re.compile(r"\s*https?://\S+\s*\Z")
_CODE = re.compile(r"""\s*"?[\[{]\s*\\?["'{\[]""")


class Node(NamedTuple):
    """Something in a row. `path`: its names, "[]" for any place in a list."""

    path: tuple[str, ...]
    value: Any


def read_structure(row: Row, *, mapped: bool = False) -> Conversation:
    """The one conversation of a row; `mapped`: that of its list `messages`, whatever else it holds.

    Raises RowRefused: unknown-layout, unexplained-column, or what is wrong with it."""
    given = Given(_text(row.get("user_role")), _text(row.get("assistant_role")))
    body = {key: value for key, value in row.items() if key not in ("user_role", "assistant_role")}
    body = without_prefix(body)
    if mapped:
        body = {key: body[key] for key in ("messages", *SYSTEM, *TOOLS) if key in body}
    spots = [] if given.user is None else turn_spots(body, given)
    spots = spots or turn_spots(body, NOTHING_GIVEN)
    left_behind: tuple[str, ...] = ()
    if spots:
        messages, used = _of_turns(body, spots)
    elif (call := _call(body)) is not None:
        messages, used = call
    else:
        messages, used, left_behind = _of_sides(body)
    ordered, changed = in_order(messages)
    tools = read_tools(next((one.value for one in nodes(body) if part_of(one.path[-1]) == "tools" and one.value), None))
    left = None if mapped else left_out(body, messages, tools, used)
    if left is not None:
        raise RowRefused(
            "unexplained-column", f"{'.'.join(left)[:60]!r} looks like content, and nothing says what it is"
        )
    return Conversation(NAME, ordered, tools, changed=(*left_behind, *changed))


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
    return {(key[size:] if shared else key): without_prefix(inner) for key, inner in value.items()}


def turn_spots(row: Row, given: Given) -> list[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Every list of turns in a row, the outermost ones."""
    found: list[tuple[tuple[str, ...], list[dict[str, Any]]]] = []
    for path, value in nodes(row):
        if any(path[: len(above)] == above for above, _ in found) or is_note((*path, "")):
            continue
        if isinstance(value, list) and "[]" not in path and (turns := as_turns(value, path[-1], given)) is not None:
            found.append((path, turns))
    return found


def _of_turns(
    row: Row, spots: Sequence[tuple[tuple[str, ...], list[dict[str, Any]]]]
) -> tuple[list[Message], tuple[tuple[str, ...], ...]]:
    """The longest list, if it holds whatever the others say."""
    read = [(path, read_messages(turns, _system(row))) for path, turns in spots]
    path, messages = max(read, key=lambda one: sum(len(message.content) for message in one[1]))
    said = {message.content.strip() for message in messages}
    if any(message.content.strip() not in said for _, others in read for message in others if message.role != "system"):
        raise RowRefused("unknown-layout", "several lists of turns that differ: " + _paths(one for one, _ in read))
    if messages[-1].role == "user":
        _, answered = sides(_open_paths(row))
        texts = {str(at(row, one)): one for one in answered}
        if len(texts) == 1:
            only = next(iter(texts.values()))
            messages = [*messages, *read_answer(at(row, only))[0]]
    return messages, (path,)


def _system(row: Row) -> Any:
    found = [node for node in nodes(row) if part_of(node.path[-1]) == "system" and isinstance(node.value, str | list)]
    texts = {str(node.value): node.value for node in found if node.value}
    return next(iter(texts.values())) if len(texts) == 1 else None


def _call(row: Row) -> tuple[list[Message], tuple[tuple[str, ...], ...]] | None:
    """What an API was asked and what it answered, wherever a log keeps the two."""
    objects = [node for node in nodes(row) if isinstance(node.value, dict) and "[]" not in node.path]
    answers = _outermost([node for node in objects if _answers(node.value)])
    asks = _outermost([node for node in objects if _asks(node.value) and not _answers(node.value)])
    if len(asks) != 1 or len(answers) != 1:
        return None
    said, _ = read_answer(answers[0].value)
    return joined(read_request(asks[0].value).messages, said), (asks[0].path, answers[0].path)


def _outermost(nodes: Sequence[Node]) -> list[Node]:
    return [one for one in nodes if not any(one.path[: len(o.path)] == o.path for o in nodes if o is not one)]


def _answers(value: Mapping[str, Any]) -> bool:
    strong = ("choices", "candidates", "stop_reason", "stopReason", "done_reason", "generations", "output")
    return any(key in value for key in strong) and is_response(value)


def _asks(value: Mapping[str, Any]) -> bool:
    return is_request(value) and isinstance(
        value.get("messages", value.get("contents", value.get("prompt"))), str | list
    )


def _of_sides(row: Row) -> tuple[list[Message], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The only question and the only answer; other answers are counted."""
    paths = _open_paths(row)
    asked, answered = sides_of(row)
    judged = [path for path in answered if path not in _to_learn(answered)]
    answered = _to_learn(answered)
    if sorted(asked) == ["input", "instruction"]:  # Alpaca's: what to do, and with what
        row = {**row, "instruction": f"{row['instruction']}\n{row['input']}"}
        asked = ["instruction"]
    if len(asked) != 1 or len(answered) != 1:
        raise RowRefused("unknown-layout", f"columns {', '.join(str(key)[:30] for key in list(row)[:8]) or 'none'}")
    if _named_depth(asked[0], "asked") != _named_depth(answered[0], "answered"):
        raise RowRefused("unknown-layout", f"{asked[0]} and {answered[0]} are parts of different things")
    question, answer = at(row, asked[0]), at(row, answered[0])
    if isinstance(question, str) and len(question.split()) < MIN_WORDS and question.isascii():
        raise RowRefused("unknown-layout", f"{asked[0]} is one word: nothing says that it is the question")
    if _is_code(question) or (isinstance(answer, str) and is_response(answer)):
        raise RowRefused("unknown-layout", f"{asked[0]} is an object that was written as text")
    several = isinstance(answer, list) and all(isinstance(text, str) for text in answer)
    answer = answer[0] if several else answer
    spoken = spoken_prompt(question) if isinstance(question, str) else None
    system = _system(row)
    read = list(read_messages([{"role": "user", "content": _with_context(row, question)}], None))
    before = read_messages(spoken, system) if spoken else [*read_system(system), *read]
    thoughts = next((at(row, path) for path in paths if part_of(path.rpartition(".")[2]) == "thoughts"), None)
    said = {"role": "assistant", "content": answer}
    if isinstance(thoughts, str):
        said["reasoning_content"] = thoughts
    used = tuple(tuple(path.split(".")) for path in (asked[0], answered[0], *judged))
    return [*before, *read_messages([said], None)], used, ("other-answers",) if several or judged else ()


def _with_context(row: Row, question: Any) -> Any:
    """A question with the text that it is about, where a row has one."""
    found = {value.strip() for name, value in row.items() if plain_name(name) in CONTEXT and isinstance(value, str)}
    return f"{question}\n{found.pop()}" if len(found) == 1 and isinstance(question, str) else question


def sides_of(row: Row) -> tuple[list[str], list[str]]:
    """(paths of questions, paths of answers) by their names, each text once."""
    asked, answered = sides(_open_paths(row))
    return _different(row, asked), _different(row, answered)


def _to_learn(paths: list[str]) -> list[str]:
    """The answers but those of a model that stand beside one other."""
    others = [path for path in paths if not is_a_models(path)]
    return others if len(others) == 1 else paths


def _named_depth(path: str, part: str) -> int:
    """How deep the name stands that says what a path holds."""
    return max(i for i, name in enumerate(path.split(".")) if part_of(name) == part)


def _is_code(question: Any) -> bool:
    """Whether a question is JSON, JSON in JSON, or how Python shows an object."""
    return isinstance(question, str) and _CODE.match(question) is not None


def _different(row: Row, paths: Sequence[str]) -> list[str]:
    """One path for each text."""
    return list({str(at(row, path)).strip(): path for path in reversed(paths)}.values())


def _open_paths(row: Row) -> dict[str, Any]:
    """The texts of a row that stand in no list and below no note."""
    found: dict[str, Any] = {}
    for path, value in nodes(row):
        if is_note(path) or any(part_of(name) == "media" or "." in name for name in path) or "[]" in path:
            continue
        if isinstance(value, dict):
            continue
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            value = value[0] if len(set(value)) == 1 else value
        found[".".join(path)] = value
    return found


def at(row: Row, path: str) -> Any:
    value: Any = row
    for key in path.split("."):
        value = parsed(value)
        value = value.get(key) if isinstance(value, dict) else None
    return value


def nodes(row: Row) -> Iterator[Node]:
    """Everything in a row, outer things first; lists and objects that are written as text too."""
    waiting: list[Node] = [Node((str(key),), value) for key, value in row.items()]
    seen = 0
    while waiting and seen < MAX_NODES:
        node = waiting.pop(0)
        seen += 1
        value = parsed(node.value) if isinstance(node.value, str) and is_json_text(node.value) else node.value
        yield Node(node.path, value)
        if len(node.path) >= MAX_DEPTH:
            continue
        if isinstance(value, dict):
            waiting += [Node((*node.path, str(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [Node((*node.path, "[]"), inner) for inner in value]


def left_out(
    row: Row, messages: Sequence[Message], tools: Tools, used: Sequence[tuple[str, ...]]
) -> tuple[str, ...] | None:
    """The first path with written text that the conversation does not hold. Raises RowRefused for media."""
    texts = [message.content for message in messages] + [message.reasoning or "" for message in messages]
    calls = [str(call) for message in messages for call in message.tool_calls]
    whole = "\n".join([*texts, *calls, *(str(dict(tool)) for tool in tools)])
    for path, value in nodes(row):
        above = max((len(one) for one in used if path[: len(one)] == one), default=0)
        named = [name for name in (path[above:] or path) if name != "[]"]
        parts = [part_of(name) for name in named]
        if not isinstance(value, str) or not value.strip() or is_note(named or path) or _ADDRESS.match(value):
            continue
        if (above and any(path == one for one in used)) or (above and path[:-1] in used):
            continue  # the text itself, or other answers beside it
        if above and names_role(path[-1]) and names_party(value):
            continue
        if "media" in parts:
            raise RowRefused("unsupported-content", f"{'.'.join(path)[:60]}: only text can be learned")
        if _matters(value, parts, nested=len(path) > 1) and not _is_said(value, texts, whole):
            return path
    return None


def _matters(value: str, parts: Sequence[str], *, nested: bool) -> bool:
    """Whether a text has to be explained: by the name nearest to it that says something, else by its length."""
    known = next((part for part in reversed(parts) if part != "unknown"), "unknown")
    if known != "unknown":
        return True
    return looks_like_content(value) and (not nested or len(value.split()) >= NESTED_WORDS)


def _is_said(value: str, texts: Sequence[str], whole: str) -> bool:
    """Whether a text stands in the conversation, or is written of nothing but what was said there."""
    stripped = value.strip()
    if stripped in whole or " ".join(stripped.split()) in " ".join(whole.split()):
        return True
    rest = value
    for text in sorted({text.strip() for text in texts if text.strip()}, key=len, reverse=True):
        rest = rest.replace(text, " ")
    return rest != value and len([word for word in rest.split() if any(c.isalpha() for c in word)]) < _FEW_WORDS


def _paths(paths: Iterator[tuple[str, ...]]) -> str:
    return ", ".join(".".join(path) for path in paths)[:120]


def _text(value: Any) -> str | None:
    return None if value is None else str(value).strip()

"""What makes a conversation of turns that a program logged, exported or keeps: lines of a session, chats, tickets.

What its program left out and what is missing is said. Of a tree of turns the branch that was kept is read; retries and
edits that were given up are counted (`other-branches`). Help desks keep messages as HTML.
"""

import html
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.fields import as_time
from hivetune.data.pieces.logs import path_to
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, Tools, listed, one_of
from hivetune.data.pieces.turns import conversation_of, read_messages, read_turn
from hivetune.data.reasons import REASONS, RowRefused
from hivetune.records import Message

_AGENTS = ("claude-code", "codex")  # programs that may hide what was thought
ASSISTANT = "hivetune_assistant"  # who answers, as the user says (`data.columns: {assistant: NAME}`)
_MAX_NAMED = 5


_NO_TEXT = (NOT_HELD, "unsupported-content")  # why a conversation ends before a turn


def read_session(row: Row) -> Conversation:
    """Return the conversation that a file's format joined from many lines. Raise RowRefused."""
    if not isinstance(row.get("messages"), list):
        raise RowRefused("wrong-type", "messages: a list of objects")
    turns, system = _with_roles(row["messages"], row.get(ASSISTANT)), row.get("system")
    cut: tuple[str, ...] = ()
    try:
        read = read_messages(turns, system)
    except RowRefused as refused:
        if refused.reason not in _NO_TEXT:
            raise
        read_turns, _, cut = before_media(turns, read_turn)  # up to the first turn that holds an image or a file
        read = read_messages(turns[: len(read_turns)], system)
    name = str(row["hivetune_session"])
    answered = [message for message in read if not is_lone_thought(message, silent=name in _AGENTS)]
    first_question = next((i for i, message in enumerate(answered) if message.role == "user"), None)
    if first_question is None:
        raise RowRefused("no-question")
    # Results in front of the first question are left out: their calls stand elsewhere.
    begun = [message for i, message in enumerate(answered) if i >= first_question or message.role != "tool"]
    messages: list[Message] = []
    changed = dict.fromkeys(() if len(answered) == len(read) else ("lone-thought",))
    for message in begun:
        before = messages[-1] if messages else Message("system", "")
        if message.role == "tool" and before.role == "user":
            changed["result-without-call"] = None
            continue
        is_answer = message.role == "assistant" and bool(message.content.strip() or not message.tool_calls)
        if is_answer and before.role == "assistant" and before.tool_calls:
            messages += [Message("tool", "", tool_call_id=call.get("id")) for call in before.tool_calls]
            changed["call-without-result"] = None
        messages.append(message)
    # A file of others may have such a field too: only reasons are believed.
    left_out = (reason for reason in listed(row.get("left_out")) if isinstance(reason, str) and reason in REASONS)
    return conversation_of(name, _system_first(messages), changed=(*left_out, *cut, *changed))


def _with_roles(turns: list[Any], assistant: Any) -> list[Any]:
    """Return turns that name a `speaker`, with the role that each has when `assistant` answers: all others ask. The
    name of a speaker stays before what they say where several ask. Raise RowRefused: who-answers.
    """
    speakers = Counter(str(turn["speaker"]) for turn in turns if isinstance(turn, dict) and "speaker" in turn)
    if not speakers:
        return turns
    if assistant not in speakers:
        named = ", ".join(f"{name} ({count})" for name, count in speakers.most_common(_MAX_NAMED))
        raise RowRefused(
            "who-answers", f"{named}: say who answers, as in --columns assistant={speakers.most_common(1)[0][0]}"
        )
    with_role: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict) and "speaker" in turn:
            speaker, rest = str(turn["speaker"]), {key: value for key, value in turn.items() if key != "speaker"}
            if speaker != assistant and len(speakers) > 2 and isinstance(rest.get("content"), str):
                rest["content"] = f"{speaker}: {rest['content']}"
            turn = {"role": "assistant" if speaker == assistant else "user", **rest}
        with_role.append(turn)
    return with_role


def is_lone_thought(message: Message, *, silent: bool) -> bool:
    """Return whether a turn holds a thought alone: the session ends there, or the user stopped it. `silent`: its
    program may hide what was thought, so that nothing is there.
    """
    has_content = message.role != "assistant" or bool(message.tool_calls) or bool(message.content.strip())
    return not has_content and (silent or bool(message.reasoning))


def _system_first(messages: list[Message]) -> list[Message]:
    """Return turns with a system text between two questions moved before them."""
    ordered: list[Message] = []
    for i, message in enumerate(messages):
        index = len(ordered)
        if message.role == "system":
            following = next((other.role for other in messages[i + 1 :] if other.role != "system"), None)
            while following == "user" and index and ordered[index - 1].role == "user":
                index -= 1
        ordered.insert(index, message)
    return ordered


def ordered_conversation(
    name: str, messages: list[Message], tools: Tools, changed: tuple[str, ...] = ()
) -> Conversation:
    """Return the conversation of the format `name`."""
    return conversation_of(name, _system_first(messages), tools, changed)


_MARKUP = re.compile(r"</?(?:p|div|br|b|i|a|ul|ol|li|span|strong|em|img|h[1-6]|blockquote|pre|code)\b[^<>]*>", re.I)
_BREAK = re.compile(r"<(?:br\b[^<>]*|(?:/p|/div|/li|/h[1-6]|/blockquote|/pre)\s*/?)>", re.I)


def without_markup(body: str) -> str:
    """Return what a person reads of a message's HTML; text without tags is only rid of its entities."""
    text = _MARKUP.sub("", _BREAK.sub("\n", body)) if _MARKUP.search(body) else body
    lines = (" ".join(line.split()) for line in html.unescape(text).strip().split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


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
    return conversation_of(name, messages, changed=(("other-branches",) if left_out else ()) + cut)


class NotLearned(Exception):
    """A turn that is read and not learned, and why."""

    def __init__(self, refused: RowRefused, *messages: Message):
        self.refused = refused
        unlearned = [replace(message, weight=0) if message.role == "assistant" else message for message in messages]
        self.messages = unlearned or [Message("assistant", "", 0)]


def before_media(
    turns: Iterable[Any], read: Callable[[Any], list[Message]]
) -> tuple[list[list[Message]], list[RowRefused], tuple[str, ...]]:
    """Return (messages of each turn up to the first that holds what is not a text, why some of them are not learned,
    reasons of severity warn): what follows rests on what nobody can read. Raise RowRefused where nothing is learned
    before it.
    """
    messages: list[list[Message]] = []
    refusals: list[RowRefused] = []
    for turn in turns:
        try:
            messages.append(read(turn))
        except NotLearned as noted:
            refusals.append(noted.refused)
            messages.append(noted.messages)
        except RowRefused as refused:
            learned = any(m.role == "assistant" and m.weight for read_before in messages for m in read_before)
            if refused.reason not in _NO_TEXT or not learned:
                raise
            return messages, refusals, ("ends-before-media",)
    return messages, refusals, ()


def chat_messages(turns: Iterable[Any], read: Callable[[Any], list[Message]]) -> tuple[list[Message], tuple[str, ...]]:
    """Return (messages, reasons of severity warn) of turns: an answer is read and not learned if it is incomplete, or
    if it used a tool whose results the export lacks. `read` raises NotLearned for such a turn.
    """
    read_so_far, refusals, cut = before_media(turns, read)
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

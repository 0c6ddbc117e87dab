"""What makes a conversation of turns that a program logged, exported or keeps: lines of a session, chats, tickets.

What its program left out and what is missing is said. Of a tree of turns the branch that was kept is read; retries and
edits that were given up are counted (`other-branches`). Help desks keep messages as HTML.
"""

import html
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hivetune.data.pieces.logs import path_to
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, Tools, listed
from hivetune.data.pieces.turns import conversation_of, read_messages, read_system, read_tools, read_turn
from hivetune.data.reasons import REASONS, RowRefused
from hivetune.records import Message

ASSISTANT = "hivetune_assistant"  # who answers, as the user says (`data.columns: {assistant: NAME}`)
_AGENTS = ("claude-code", "codex")  # programs that may hide what was thought
_MAX_NAMED = 5
_NO_TEXT = (NOT_HELD, "unsupported-content")  # why a conversation ends before a turn
_Read = Callable[[Any], list[Message]]


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
        before, _, cut = _before_media(turns, read_turn)  # up to the first turn that holds an image or a file
        read = read_messages(turns[: len(before)], system)
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
        last = messages[-1] if messages else Message("system", "")
        if message.role == "tool" and last.role == "user":
            changed["result-without-call"] = None
            continue
        is_answer = message.role == "assistant" and bool(message.content.strip() or not message.tool_calls)
        if is_answer and last.role == "assistant" and last.tool_calls:
            messages += [Message("tool", "", tool_call_id=call.get("id")) for call in last.tool_calls]
            changed["call-without-result"] = None
        messages.append(message)
    # A file of others may have such a field too: only reasons are believed.
    left_out = (reason for reason in listed(row.get("left_out")) if isinstance(reason, str) and reason in REASONS)
    return ordered_conversation(name, messages, read_tools(row.get("tools")), (*left_out, *cut, *changed))


def _with_roles(turns: list[Any], assistant: Any) -> list[Any]:
    """Return turns that name a `speaker`, with the role that each has when `assistant` answers: all others ask. The
    name of a speaker stays before what they say where several ask. Raise RowRefused: who-answers.
    """
    said = [str(turn["speaker"]) for turn in turns if isinstance(turn, dict) and "speaker" in turn]
    if not said:
        return turns
    speakers = Counter(said)
    if assistant not in speakers:
        named = ", ".join(f"{name} ({count})" for name, count in speakers.most_common(_MAX_NAMED))
        # Who begins asks; of the others the one who speaks most.
        answers = Counter(name for name in said if name != said[0]).most_common(1)
        likely = answers[0][0] if answers else said[0]
        raise RowRefused("who-answers", f"{named}: say who answers, as in --columns assistant={likely}")
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


def ordered_conversation(
    name: str, messages: Sequence[Message], tools: Tools = (), changed: tuple[str, ...] = ()
) -> Conversation:
    """Return the conversation of the format `name`; a system text between two questions is moved before them."""
    ordered: list[Message] = []
    for i, message in enumerate(messages):
        index = len(ordered)
        if message.role == "system":
            following = next((other.role for other in messages[i + 1 :] if other.role != "system"), None)
            while following == "user" and index and ordered[index - 1].role == "user":
                index -= 1
        ordered.insert(index, message)
    return conversation_of(name, ordered, tools, changed)


_MARKUP = re.compile(r"</?(?:p|div|br|b|i|a|ul|ol|li|span|strong|em|img|h[1-6]|blockquote|pre|code)\b[^<>]*>", re.I)
_BREAK = re.compile(r"<(?:br\b[^<>]*|(?:/p|/div|/li|/h[1-6]|/blockquote|/pre)\s*/?)>", re.I)


def without_markup(body: str) -> str:
    """Return what a person reads of a message's HTML; text without tags is only rid of its entities."""
    text = _MARKUP.sub("", _BREAK.sub("\n", body)) if _MARKUP.search(body) else body
    lines = (" ".join(line.split()) for line in html.unescape(text).strip().split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def branch(parents: Mapping[str, Any], leaf: str) -> list[str]:
    """Return the nodes from the root to `leaf`. Raise RowRefused when they go in a circle."""
    path = path_to(leaf, parents)
    if leaf in parents and not path:
        raise RowRefused("wrong-type", "the messages' parents go in a circle")
    return path


class NotLearned(Exception):
    """A turn that is read and not learned, and why."""

    def __init__(self, refused: RowRefused, *messages: Message):
        self.refused = refused
        self.messages = [replace(m, weight=0) if m.role == "assistant" else m for m in messages]
        self.messages = self.messages or [Message("assistant", "", 0)]


def _before_media(turns: Iterable[Any], read: _Read) -> tuple[list[list[Message]], list[RowRefused], tuple[str, ...]]:
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


def chat(name: str, turns: Iterable[Any], read: _Read, others: int, system: Any = None) -> Conversation:
    """Return the conversation of an exported chat; `others` is the number of answers on branches that were given up.

    An answer is read and not learned if it is incomplete, or if it used a tool whose results the export lacks: `read`
    raises NotLearned for such a turn.
    """
    read_so_far, refusals, cut = _before_media(turns, read)
    messages: list[Message] = []
    asks = ("user", "system")
    for is_question, turn in itertools.groupby(itertools.chain.from_iterable(read_so_far), lambda m: m.role in asks):
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
    changed = ("other-branches",) if others else ()
    return ordered_conversation(name, [*read_system(system), *messages], changed=(*changed, *cut))

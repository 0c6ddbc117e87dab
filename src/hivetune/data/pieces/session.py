"""A conversation that was put together from the lines of a session: what its program left out, and what is missing."""

from collections import Counter
from typing import Any

from hivetune.data.pieces.said import NO_TEXT, Conversation, Row, Tools, before_media, names
from hivetune.data.pieces.turns import in_order, read_messages, read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_AGENTS = ("claude-code", "codex", "pi", "antigravity")  # programs that may hide what was thought
BESIDE = names("trajectory replay_config task intent knowledge topic summary description notes note comment comments")
# Answers beside a list of messages, of which nothing else in the row can be the answer.
TEXT_ANSWERS = (
    *("response_text", "output_text", "completion_text", "answer_text", "assistant_message", "assistant_reply"),
    *("response_content", "raw_response", "raw_output", "llm_output", "result"),
)
ASSISTANT = "hivetune_assistant"  # who answers, as the user says (`data.columns: {assistant: NAME}`)
_MAX_NAMED = 5


def spoken(name: str, turns: list[tuple[str, Any]], assistant: Any) -> Conversation:
    """Return the conversation of people: `turns` are (speaker, text), `assistant` is who answers."""
    messages = [{"speaker": speaker, "content": text} for speaker, text in turns]
    return read_session({"hivetune_session": name, "messages": messages, ASSISTANT: assistant})


def read_session(row: Row) -> Conversation:
    """Return the conversation that a file's format joined from many lines. Raise RowRefused."""
    turns, system = _with_roles(row["messages"], row.get(ASSISTANT)), row.get("system")
    cut: tuple[str, ...] = ()
    try:
        read = read_messages(turns, system)
    except RowRefused as refused:
        if refused.reason not in NO_TEXT:
            raise
        read_turns, cut = before_media(turns, read_turn)  # up to the first turn that holds an image or a file
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
    ordered, more = in_order(_system_first(messages))
    return Conversation(name, ordered, changed=(*row.get("left_out", ()), *cut, *changed, *more))


def _with_roles(turns: list[Any], assistant: Any) -> list[Any]:
    """Return turns that name a `speaker`, with the role that each has when `assistant` answers: all others ask. The
    name of a speaker stays before what they say where several ask. Raise RowRefused: who-answers.
    """
    speakers = Counter(turn["speaker"] for turn in turns if isinstance(turn, dict) and "speaker" in turn)
    if not speakers:
        return turns
    if assistant not in speakers:
        named = ", ".join(f"{name} ({count})" for name, count in speakers.most_common(_MAX_NAMED))
        raise RowRefused(
            "who-answers", f"{named}: say who answers, as in --columns assistant={speakers.most_common(1)[0][0]}"
        )
    with_role: list[Any] = []
    for turn in turns:
        if "speaker" in turn:
            speaker, rest = turn["speaker"], {key: value for key, value in turn.items() if key != "speaker"}
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
    name: str, messages: list[Message], tools: Tools, changed: tuple[str, ...] = (), used: tuple[str, ...] = ()
) -> Conversation:
    """Return the conversation of the format `name`. `used`: the columns that it was read from."""
    ordered, more = in_order(_system_first(messages))
    return Conversation(name, ordered, tools, changed=(*changed, *more), explained=used)

"""Chats of Copilot that VS Code exports: `requests`, each with the question and the parts of the response.

The parts are what the page shows. Where an agent worked, `toolCallRounds` holds what the model wrote, round by round,
and `toolCallResults` what its tools gave back: then these are read.

https://code.visualstudio.com/docs/copilot/chat/copilot-chat (Chat: Export Chat)
"""

from collections.abc import Mapping
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import NOT_HELD, Conversation, Row, listed, objects, one_of, text_of
from hivetune.data.pieces.session import NotLearned, chat_messages, finish_chat
from hivetune.data.pieces.turns import read_turn
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_REFERENCE = "inlineReference"  # to a file or a symbol
_TEXT_KINDS = (None, "markdownContent", "markdownVuln", _REFERENCE)
_TOOLS = ("toolInvocationSerialized", "textEditGroup", "notebookEditGroup", "multiDiffData")
_STOPPED = (2, 3)  # states of a request: cancelled, failed


def read(row: Row) -> Conversation | None:
    if "responder_username" not in row or objects(row["requests"]) is None:
        return None
    messages, cut = chat_messages(row["requests"], _turns)
    return finish_chat("copilot-chat", messages, 0, cut)


def _turns(request: Any) -> list[Message]:
    variables = listed(one_of(one_of(request, "variableData"), "variables"))
    if any(one_of(variable, "kind") == "image" for variable in variables):
        raise RowRefused(NOT_HELD, "a question about an image that the export does not hold")
    parts = [part for part in listed(one_of(request, "response")) if isinstance(part, dict)]
    shown = [(part, _text(part)) for part in parts if part.get("kind") in _TEXT_KINDS]
    question = Message("user", text_of(one_of(one_of(request, "message"), "text"), "message.text"))
    thoughts = "\n".join(_text(part) for part in parts if part.get("kind") == "thinking")
    answer = Message("assistant", "".join(text for _, text in shown).strip(), reasoning=thoughts or None)
    used_tools = any(part.get("kind") in _TOOLS for part in parts)
    if not answer.content and not used_tools:
        return []  # stopped before a word of an answer: mostly asked once more
    result = one_of(request, "result")
    metadata = one_of(result, "metadata")
    stopped = one_of(request, "isCanceled") or one_of(one_of(request, "modelState"), "value") in _STOPPED
    if stopped or one_of(result, "errorDetails") or not answer.content:
        raise NotLearned(RowRefused("cut-off-answer", "an answer was stopped before its end"), question, answer)
    if rounds := objects(one_of(metadata, "toolCallRounds")):
        try:
            return [question, *_worked(rounds, one_of(metadata, "toolCallResults"))]
        except RowRefused as refused:
            raise NotLearned(refused, question, answer) from refused
    if used_tools:
        raise NotLearned(RowRefused(NOT_HELD, "Copilot's own tools took part"), question, answer)
    if any(part.get("kind") == _REFERENCE and not text for part, text in shown):  # the sentence has a hole
        raise NotLearned(RowRefused(NOT_HELD, "a name in an answer is not held"), question, answer)
    return [question, answer]


def _worked(rounds: list[dict[str, Any]], results: Any) -> list[Message]:
    """Return the rounds of an agent with the results of its calls. Raise RowRefused: one is missing, or it did not
    end.
    """
    messages: list[Message] = []
    for step in rounds:
        calls = listed(step.get("toolCalls"))
        thought = one_of(step.get("thinking"), "text")
        turn = {"role": "assistant", "content": step.get("response") or "", "tool_calls": calls}
        messages += read_turn({**turn, "reasoning_content": thought if isinstance(thought, str) else ""})
        for call in calls:
            called = str(one_of(call, "id"))
            values = [one_of(part, "value") for part in listed(one_of(one_of(results, called), "content"))]
            if not values or not all(isinstance(value, str) or one_of(value, "node") is not None for value in values):
                raise RowRefused(NOT_HELD, "a tool's result is not held")
            # Texts, or trees of pieces of text.
            texts = [v if isinstance(v, str) else _pieces(v["node"]).strip() for v in values]
            messages.append(Message("tool", "\n".join(texts), tool_call_id=called))
    if messages[-1].role != "assistant" or not messages[-1].content.strip():
        raise RowRefused("cut-off-answer", "an agent was stopped before its end")
    return messages


def _pieces(node: Any) -> str:
    text = one_of(node, "text")
    before = "\n" if isinstance(text, str) and one_of(node, "lineBreakBefore") is True else ""
    said = text if isinstance(text, str) else ""
    return before + said + "".join(map(_pieces, listed(one_of(node, "children"))))


def _text(part: Mapping[str, Any]) -> str:
    """Return the text of a part; of a reference to a file or a symbol, its name as code, as the model wrote it."""
    if part.get("kind") == _REFERENCE:
        reference = part.get("inlineReference")
        path = one_of(reference, "path") or one_of(one_of(reference, "uri"), "path") or ""
        name = one_of(part, "name") or one_of(reference, "name") or str(path).rstrip("/").rpartition("/")[2]
        return f"`{name}`" if name else ""
    value = part.get("value", part.get("content"))
    if isinstance(value, list):
        return "".join(text for text in value if isinstance(text, str))
    text = one_of(value, "value") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


FORMAT = Format("copilot-chat", read, needs=frozenset(("requests",)))

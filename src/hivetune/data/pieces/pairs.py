"""Rows of one question and one answer in columns of their own, and text that is learned whole."""

import json
from collections.abc import Sequence
from typing import Any

from hivetune.data.columns import (
    ANSWERED,
    CONTEXT,
    SYSTEM,
    TOOLS,
    TURNS,
    names_document,
    says_none,
    system_of,
    thoughts_of,
    tools_of,
)
from hivetune.data.pieces.calls import calls_in_text, read_tools
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.rendered import (
    asked_turns,
    goes_on,
    is_rendered,
    turns_of,
    without_end,
    without_header,
)
from hivetune.data.pieces.said import (
    Conversation,
    Row,
    all_texts,
    first_of,
    names,
    objects,
    parsed,
    said,
    text_of,
)
from hivetune.data.pieces.turns import ROLE_KEYS, in_order, read_messages, read_system
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

MAX_WORDS = 12  # of an answer that others may say in other words
# An object with one of these is a message, a response, or an answer with what was written about it.
_HOLD_TEXT = frozenset(("role", "from", "parts", "choices", "candidates", "messages", "error", *TURNS, *ANSWERED))
_HOLD_TEXT |= {"content", "text", "message", "body", "data", "result", "value"}
_HOLD_TEXT -= {"label", "target", "targets"}
_PARTS = names("text image thinking message function function_call tool_use tool_call tool_result")  # kinds of them
EXPLAINED = frozenset((*SYSTEM, *TOOLS, "history", "chat_history"))


def read_parties(name: str, row: Row, column: str) -> Conversation | None:
    """Return what `user` and `assistant` said, behind what `column` says to the model. None without the two."""
    both = [row.get("user"), row.get("assistant")]
    if not all(isinstance(text, str) and text for text in both) or system_of(row) is not None:
        return None
    return read_pair(name, {**row, "system": row[column]}, ("user",), ("assistant",))


def read_pair(
    name: str, row: Row, asked: tuple[str, ...], answered: tuple[str, ...], extra: tuple[str, ...] = CONTEXT
) -> Conversation:
    """Return the conversation of a row: system prompt, history, question with what belongs to it, thoughts and
    answer.
    """
    question_column, answer_column = first_of(row, asked), first_of(row, answered)
    assert question_column is not None and answer_column is not None  # `recognise` looked
    question, answer = _without_headers(row[question_column], row[answer_column])
    bare = (question, answer) != (row[question_column], row[answer_column])
    if all_texts(question) and all_texts(answer) and len(question) == len(answer):
        return _dialogue(name, row, (question_column, answer_column))
    answer, told = _one_answer(answer, _columns_of(row, question_column, extra), answer_column)
    turns, replies = _turns(question) or spoken_prompt(question), _turns(answer)
    if turns:
        answer = _unmarked(answer, question, turns)
        before = _without_answer(read_messages(turns, system_of(row)), answer)
    else:
        before = [*read_system(system_of(row)), *_history(row.get("history") or row.get("chat_history"))]
        before.append(Message("user", _question(row, question_column, question, extra)))
    after = read_messages(replies, None) if replies else [_written(row, answer, answer_column)]
    messages, changed = in_order([*before, *after])
    read = (*((question_column,) if turns or bare else ()), *((answer_column,) if replies or told or bare else ()))
    told = (*changed, *told, *_read_from_text(question, turns, bare))
    return Conversation(name, messages, read_tools(tools_of(row)), changed=told, explained=read)


def _unmarked(answer: Any, question: Any, turns: list[dict[str, Any]]) -> Any:
    """Return an answer without the mark at its end that the template of a question, which is one text, has too."""
    in_text = isinstance(answer, str) and turns != _turns(question)
    return without_end(answer, "") if in_text else answer


def _read_from_text(question: Any, turns: list[dict[str, Any]] | None, bare: bool) -> tuple[str, ...]:
    """Return the reason of severity warn, where marks were taken off or turns were found in a text that is no JSON."""
    spoken = turns and isinstance(parsed(question), str)
    return ("turns-from-text",) if bare or spoken else ()


def _written(row: Row, answer: Any, column: str) -> Message:
    """Return an answer that is a text. Raise RowRefused where the next turns stand behind it."""
    text, calls = calls_in_text(text_of(answer, column))
    if goes_on(text):
        raise RowRefused("rendered-text")
    return Message("assistant", text, tool_calls=calls, reasoning=thoughts_of(row))


def _without_headers(question: Any, answer: Any) -> tuple[Any, Any]:
    """Return question and answer without the headers and the end mark of a template that somebody left in the
    columns.
    """
    if isinstance(question, str) and isinstance(answer, str):
        return without_header(question, answer=False), without_end(without_header(answer, answer=True), question)
    return question, answer


def _columns_of(row: Row, question: str, extra: tuple[str, ...]) -> str:
    """Return the columns of a question as `--columns` takes them, with what belongs to it."""
    more = next((name for name in extra if name != question and row.get(name)), None)
    return f"prompt={question}" if more is None else f"{question}={question},{more}={more}"


def _one_answer(answer: Any, asked: str, column: str) -> tuple[Any, tuple[str, ...]]:
    """Return (an answer as text where it is an object or several ways to say the same, reasons of severity warn). Raise
    RowRefused for other lists of texts. `asked`: the columns of the question, as `--columns` takes them.
    """
    if isinstance(answer, str):
        return answer, ()
    if all_texts(answer) and len(answer) > 1:
        if say_the_same(answer):
            return answer[0], ("other-answers",)
        kind = f"{column} holds {len(answer)} texts, and nothing says whether they are answers or pieces of one"
        first = f"--columns {asked},completion={column}.0 learns the first"
        raise RowRefused("wrong-type", f"{kind}: {first}, completion={column}.as_json all of them as JSON")
    written = as_json_text(answer)
    return (answer, ()) if written is None else (written, ("json-answer",))


def say_the_same(texts: Sequence[str]) -> bool:
    """Return whether short texts are ways to say one answer: each has half of its words in common with the first, or
    the first with it. Others may be pieces of one answer, or several that are right together.
    """
    said = [{word.strip(".,;:!?'\"()").lower() for word in text.split()} - {""} for text in texts]
    if any(not one or len(one) > MAX_WORDS for one in said) or any("\n" in text for text in texts):
        return False
    return all(2 * len(said[0] & other) >= min(len(said[0]), len(other)) for other in said[1:])


def as_json_text(answer: Any) -> str | None:
    """Return an answer that is an object, as JSON text; None for another, and for one that is a message or holds a
    text.
    """
    items = objects([answer] if isinstance(answer, dict) else answer)
    if items is None or any(plain_name(key) in _HOLD_TEXT for item in items for key in item):
        return None
    if any(str(item.get("type")) in _PARTS for item in items):
        return None
    return json.dumps(items[0] if isinstance(answer, dict) else items, ensure_ascii=False)


def _without_answer(before: list[Message], answer: Any) -> list[Message]:
    """Return the turns of a prompt; where it is the whole row as a template wrote it, without the answer at its end."""
    last = before[-1]
    return before[:-1] if last.role == "assistant" and last.content.strip() == str(answer).strip() else before


def _dialogue(name: str, row: Row, columns: tuple[str, str]) -> Conversation:
    """Return everything that was asked in one list, everything that was answered in another."""
    messages = list(read_system(system_of(row)))
    for asked, answered in zip(row[columns[0]], row[columns[1]], strict=True):
        messages += [Message("user", asked), Message("assistant", answered)]
    return Conversation(name, tuple(messages), read_tools(tools_of(row)))


def _turns(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a list of turns, maybe as JSON text. Any other JSON is the text that somebody wrote."""
    turns = parsed(value)
    turns = objects([turns] if isinstance(turns, dict) and "content" in turns else turns)
    return turns if turns and all(any(key in turn for key in ROLE_KEYS) for turn in turns) else None


def spoken_prompt(prompt: Any) -> list[dict[str, str]] | None:
    """Return the turns of a prompt that ends where the answer begins: "Human: .. Assistant:". Raise RowRefused when its
    speakers do not take turns.
    """
    turns = asked_turns(prompt) if isinstance(prompt, str) else None
    if turns is None and isinstance(prompt, str) and is_rendered(prompt):
        turns = turns_of(prompt)  # None: the marks stand in a text, or nobody can tell its turns
    if turns == [] or (turns is None and isinstance(prompt, str) and prompt.lstrip().startswith("<s>")):
        raise RowRefused("rendered-text")
    return turns


def _question(row: Row, column: str, question: Any, extra: tuple[str, ...]) -> str:
    text = text_of(question, column)
    more = first_of(row, tuple(name for name in extra if name != column))
    value = parsed(row[more]) if more is not None else None
    if all_texts(value):
        return "\n".join([text, *(piece for piece in value if not names_document(piece))])  # found for the question
    value = row[more] if more is not None else None
    if (
        isinstance(value, str)
        and value.strip()
        and not (more == "input" and says_none(value))
        and value not in text
        and not (more in CONTEXT and names_document(value))
    ):
        return f"{text}\n{value}"
    return text


def _history(history: Any) -> list[Message]:
    history = parsed(history) or []
    if _turns(history):
        return read_messages(history, None)
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowRefused("wrong-type", "history: a list of [question, answer] pairs")
    return [
        message
        for asked, answered in history
        for message in (said("user", asked, "history"), said("assistant", answered, "history"))
    ]

"""Rows of one question and one answer in columns of their own, under the names in data/columns.toml.

https://huggingface.co/docs/trl/dataset_formats#prompt-completion (`prompt`, `completion`),
https://github.com/tatsu-lab/stanford_alpaca#data-release (`instruction`, `input`, `output`),
https://huggingface.co/datasets/openai/gsm8k (`question`, `answer`),
https://github.com/allenai/natural-instructions (`input`, `output`)
"""

import json
from collections.abc import Sequence
from typing import Any

from hivetune.data.columns import (
    ANSWERED,
    CONTEXT,
    QUESTIONS,
    SYSTEM,
    TOOLS,
    TURNS,
    names_document,
    says_none,
    system_of,
    thoughts_of,
    tools_of,
)
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.parts import calls_in_text, read_tools
from hivetune.data.pieces.rendered import has_marks, rendered_turns
from hivetune.data.pieces.said import Conversation, Row, all_texts, first_of, names, objects, parsed, text_of
from hivetune.data.pieces.turns import ROLE_KEYS, conversation_of, read_messages, read_system
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_MAX_WORDS = 12  # of an answer that others may say in other words
# An object with one of these is a message, a response, or an answer with what was written about it.
_HOLD_TEXT = frozenset(("role", "from", "parts", "choices", "candidates", "messages", "error", *TURNS, *ANSWERED))
_HOLD_TEXT |= names("content text message body data result value")
_HOLD_TEXT -= names("label target targets")
_PARTS = names("text image thinking message function function_call tool_use tool_call tool_result")  # kinds of them


def _read_parties(name: str, row: Row, column: str) -> Conversation | None:
    """Return the texts of `user` and `assistant`, after the instruction in `column`. None without both."""
    texts = [row.get("user"), row.get("assistant")]
    if not all(isinstance(text, str) and text for text in texts) or system_of(row) is not None:
        return None
    return _read_pair(name, {**row, "system": row[column]}, ("user",), ("assistant",))


def _read_pair(
    name: str, row: Row, prompts: tuple[str, ...], answers: tuple[str, ...] = ANSWERED, extra: tuple[str, ...] = CONTEXT
) -> Conversation | None:
    """Return the conversation of a row: system prompt, history, question with what belongs to it, thoughts and
    answer; None without a question or an answer.
    """
    question_column, answer_column = first_of(row, prompts), first_of(row, answers)
    if question_column is None or answer_column is None:
        return None
    question, answer = row[question_column], row[answer_column]
    if all_texts(question) and all_texts(answer) and len(question) == len(answer):  # questions and answers in turn
        dialogue = read_system(system_of(row))
        for q, a in zip(question, answer, strict=True):
            dialogue += [Message("user", q), Message("assistant", a)]
        return Conversation(name, tuple(dialogue), read_tools(tools_of(row)))
    answer, more = _one_answer(row, question_column, answer, answer_column, extra)
    listed, replies = _turns(question), _turns(answer)
    turns = listed or _spoken_prompt(question)
    if turns:
        before = read_messages(turns, system_of(row))
        if before[-1].role == "assistant" and before[-1].content.strip() == str(answer).strip():
            before.pop()  # the prompt is the whole row as a template wrote it
    else:
        before = read_system(system_of(row))
        history = parsed(row.get("history") or row.get("chat_history")) or []
        if _turns(history):
            before += read_messages(history, None)
        elif isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            for pair in history:
                before += [
                    Message("user", text_of(pair[0], "history")),
                    Message("assistant", text_of(pair[1], "history")),
                ]
        else:
            raise RowRefused("wrong-type", "history: a list of [question, answer] pairs")
        before.append(Message("user", _question(row, question_column, question, extra)))
    if replies:
        after = read_messages(replies, None)
    else:
        text, calls = calls_in_text(text_of(answer, answer_column))
        after = [Message("assistant", text, tool_calls=calls, reasoning=thoughts_of(row))]
    read = (*((question_column,) if turns else ()), *((answer_column,) if replies or more else ()))
    from_text = turns and isinstance(parsed(question), str)
    changed = (*more, *(("turns-from-text",) if from_text else ()))
    return conversation_of(name, [*before, *after], read_tools(tools_of(row)), changed, read)


def _one_answer(row: Row, prompt: str, answer: Any, column: str, extra: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Return (an answer as text where it is an object or several ways to say the same, reasons of severity warn). Raise
    RowRefused for other lists of texts.
    """
    if isinstance(answer, str):
        return answer, ()
    if all_texts(answer) and len(answer) > 1:
        if _are_variants(answer):
            return answer[0], ("other-answers",)
        more = next((name for name in extra if name != prompt and row.get(name)), None)
        columns = f"prompt={prompt}" if more is None else f"{prompt}={prompt},{more}={more}"
        kind = f"{column} holds {len(answer)} texts, and nothing says whether they are answers or pieces of one"
        first = f"--columns {columns},completion={column}.0 learns the first"
        raise RowRefused("wrong-type", f"{kind}: {first}, completion={column}.as_json all of them as JSON")
    items = objects([answer] if isinstance(answer, dict) else answer)
    holds_text = any(plain_name(key) in _HOLD_TEXT for item in items or () for key in item)
    if items is None or holds_text or any(str(item.get("type")) in _PARTS for item in items):
        return answer, ()
    return json.dumps(items[0] if isinstance(answer, dict) else items, ensure_ascii=False), ("json-answer",)


def _are_variants(texts: Sequence[str]) -> bool:
    """Return whether short texts are variants of one answer: each shares half of its words with the first, or the first
    with it. Other texts may be parts of one answer.
    """
    sets = [{word.strip(".,;:!?'\"()").lower() for word in text.split()} - {""} for text in texts]
    if any(not words or len(words) > _MAX_WORDS for words in sets) or any("\n" in text for text in texts):
        return False
    return all(2 * len(sets[0] & words) >= min(len(sets[0]), len(words)) for words in sets[1:])


def _turns(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a list of turns, maybe as JSON text. Any other JSON is the text that somebody wrote."""
    turns = parsed(value)
    turns = objects([turns] if isinstance(turns, dict) and "content" in turns else turns)
    return turns if turns and all(any(key in turn for key in ROLE_KEYS) for turn in turns) else None


def _spoken_prompt(prompt: Any) -> list[dict[str, str]] | None:
    """Return the turns of a prompt that a template has written. Raise RowRefused for the marks of another one."""
    if not isinstance(prompt, str):
        return None
    turns = rendered_turns(prompt, whole=False)
    if turns is None and has_marks(prompt):
        raise RowRefused("rendered-text")
    return turns


def _question(row: Row, column: str, question: Any, extra: tuple[str, ...]) -> str:
    """Return a question with the text or the documents that belong to it, but not with the name of a document."""
    text = text_of(question, column)
    more = first_of(row, tuple(name for name in extra if name != column))
    value = row[more] if more is not None else None
    if all_texts(pieces := parsed(value)):
        return "\n".join([text, *(piece for piece in pieces if not names_document(piece))])
    if not isinstance(value, str) or not value.strip() or value in text:
        return text
    says_nothing = (more == "input" and says_none(value)) or (more in CONTEXT and names_document(value))
    return text if says_nothing else f"{text}\n{value}"


def _prompt(row: Row) -> Conversation | None:
    name = "prompt-completion"
    return _read_parties(name, row, "prompt") or _read_pair(name, row, ("prompt", *QUESTIONS))


def _alpaca(row: Row) -> Conversation | None:
    pair = _read_parties("alpaca", row, "instruction")
    return pair or _read_pair("alpaca", row, ("instruction",), extra=("input", *CONTEXT))


def _input(row: Row) -> Conversation | None:
    return _read_pair("input-output", row, QUESTIONS)


def _pair(row: Row) -> Conversation | None:
    return None if first_of(row, QUESTIONS) == "input" else _read_pair("question-answer", row, QUESTIONS)


_BESIDE = frozenset((*SYSTEM, *TOOLS, "history", "chat_history"))
_PROMPT, _INSTRUCTION = names("prompt completion"), names("instruction")
PROMPT_FORMAT = Format("prompt-completion", _prompt, needs=names("prompt"), rank=24, explains=_BESIDE | _PROMPT)
ALPACA_FORMAT = Format("alpaca", _alpaca, needs=_INSTRUCTION, rank=25, explains=_BESIDE | _INSTRUCTION)
INPUT_FORMAT = Format("input-output", _input, needs=names("input"), rank=32, explains=_BESIDE)
FORMAT = Format("question-answer", _pair, needs=frozenset(QUESTIONS), rank=33, explains=_BESIDE)

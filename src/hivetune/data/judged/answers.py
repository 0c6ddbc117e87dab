"""Rows that hold two answers to one question: preference pairs of any layout, and corrections of an answer."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.data.columns import CONTEXT, QUESTIONS, SYSTEM, TOOLS, column_kind, plain_row
from hivetune.data.conversation import preference_columns, read_conversation
from hivetune.data.pieces.said import Conversation, Row, objects, one_of, parsed
from hivetune.data.pieces.turns import read_messages
from hivetune.data.reasons import RowRefused
from hivetune.records import Example, LessonKind, Message

CORRECTIONS = (
    *("correction", "corrected_answer", "corrected_output", "corrected_response", "corrected_completion"),
    *("edited_answer", "edited_output", "edited_response", "edited_completion"),
)
REJECTED_ANSWER = "rejected_answer"  # the gateway's: the answer that a correction took the place of
_CORRECTED = frozenset((*CORRECTIONS, REJECTED_ANSWER))


_ANSWERS = ("assistant", "gpt", "model")  # the roles of who answers
_TURNS = ("messages", "conversations", "conversation", "prompt")
_PROMPT = ("prompt", "instruction", *QUESTIONS, "input", *CONTEXT, "history")
# Pairs that differ in less push both answers down (arXiv 2410.08847): the better one is learned alone.
MIN_DIFFERENCE = 0.1
MAX_COMPARED_WORDS = 2000


class TwoAnswers(NamedTuple):
    """The conversation with the better answer at its end, the worse one, and the kind of row that judged them."""

    conversation: Conversation
    worse: Message
    lesson: LessonKind


def read_corrected(row: Row, *, mapped: bool = False) -> TwoAnswers | None:
    """Return a row with an answer and its correction, None for any other. Raise RowRefused as `read_conversation`."""
    row = plain_row(row)
    if _CORRECTED.isdisjoint(row):
        return None
    turns = objects(parsed(row.get("messages")))
    if row.get(REJECTED_ANSWER) is not None and turns is not None:
        good = read_conversation({key: value for key, value in row.items() if key != REJECTED_ANSWER}, mapped=mapped)
        rejected = row[REJECTED_ANSWER]
        rejected = rejected if isinstance(rejected, dict) else {"role": "assistant", "content": rejected}
        tools = {key: row[key] for key in TOOLS if key in row}
        before = read_conversation({**tools, "messages": [*turns[:-1], rejected]}, mapped=True)
        return _two(good, before, "correction")
    name = next((name for name in CORRECTIONS if isinstance(row.get(name), str) and row[name].strip()), None)
    if name is None:
        return None
    before = read_conversation({key: value for key, value in row.items() if key != name}, mapped=mapped)
    if before.messages[-1].role != "assistant":
        raise RowRefused("no-answer", f"{name}: there is no answer that it corrects")
    good = before._replace(messages=(*before.messages[:-1], Message("assistant", row[name])))
    return _two(good, before, "correction")


def with_answers_apart(row: Row) -> Row:
    """Return a row whose conversation ends with a better and a worse turn (`chosen_gpt`, `rejected_gpt`), with these as
    columns of their own; any other row as it is.
    """
    for name in _TURNS:
        turns = objects(row.get(name)) or []
        ends: dict[str, Any] = {}
        for turn in turns[-2:]:
            parts = re.split(r"[\W_]+", str(_speaker(turn)).lower())
            ends |= {side: turn for side in ("chosen", "rejected") if side in parts}
        if len(ends) == 2 and len(turns) > 2 and not ends.keys() & row.keys():
            answers: Row = {side: one_of(turn, "content", "value") for side, turn in ends.items()}
            return {**row, name: turns[:-2], **answers}
    return row


def read_preference(row: Row) -> TwoAnswers | None:
    """Return a row with a better and a worse answer, None for any other. Raise RowRefused: pair-differs, equal-pair."""
    row = plain_row(row)
    columns = preference_columns(row)
    if columns is None:
        return None
    if media := next((name for name, value in row.items() if value and column_kind(name) == "media"), None):
        raise RowRefused("unsupported-content", f"the column {media[:40]}: only text can be learned")
    good, bad = (_with_answer(row, parsed(row[name])) for name in columns)
    return _two(good, bad, "pair")


def _with_answer(row: Row, answer: Any) -> Conversation:
    """Return the row as if it held this answer only: a text, a turn, some turns, or a whole conversation."""
    base: dict[str, Any] = {key: row[key] for key in (*SYSTEM, *TOOLS) if row.get(key) is not None}
    turns = objects([answer] if isinstance(answer, dict) else answer)
    before = next((turns_read for key in _TURNS if (turns_read := objects(parsed(row.get(key)))) is not None), None)
    if turns is None and isinstance(answer, str) and before is not None:
        turns = [{"role": "assistant", "content": answer}]
    if turns is None:
        base |= {key: row[key] for key in _PROMPT if row.get(key) is not None}
        if not any(key in base for key in _PROMPT):
            return read_conversation({**base, "text": answer}, mapped=True)  # "Human: ... Assistant: ..." in each
        return read_conversation({**base, "output" if "instruction" in base else "completion": answer}, mapped=True)
    if all(_speaker(turn) in _ANSWERS for turn in turns):
        if before is None and any(isinstance(row.get(key), str) for key in _PROMPT):
            # The question and its context stand in other columns, read as if they had an answer.
            request = {**base, **{key: row[key] for key in _PROMPT if row.get(key) is not None}}
            request["output" if "instruction" in request else "completion"] = "."
            question = read_conversation(request, mapped=True)
            return question._replace(messages=(*question.messages[:-1], *read_messages(turns, None)))
        before = before or []  # some files repeat the better answer there
        turns = [*(before[:-1] if before and _speaker(before[-1]) in _ANSWERS else before), *turns]
    return read_conversation({**base, "messages": turns}, mapped=True)


def _speaker(turn: Mapping[str, Any]) -> Any:
    return turn.get("role", turn.get("from"))


def _two(good: Conversation, bad: Conversation, lesson: LessonKind) -> TwoAnswers:
    better, worse = good.messages[-1], bad.messages[-1]
    before = [tuple(replace(m, weight=1.0) for m in conversation.messages[:-1]) for conversation in (good, bad)]
    if before[0] != before[1] or better.role != "assistant" or worse.role != "assistant":
        raise RowRefused("pair-differs")
    if replace(better, weight=1.0) == replace(worse, weight=1.0):
        raise RowRefused("equal-pair")
    return TwoAnswers(good, worse, lesson)


def is_small_edit(better: Message, worse: Message) -> bool:
    """Return whether two answers differ too little for a pair."""
    if better.tool_calls != worse.tool_calls or better.reasoning != worse.reasoning:
        return False
    better_words, worse_words = (message.content.split()[:MAX_COMPARED_WORDS] for message in (better, worse))
    matcher = difflib.SequenceMatcher(None, better_words, worse_words, autojunk=False)
    least = 1 - MIN_DIFFERENCE
    return matcher.real_quick_ratio() > least and matcher.quick_ratio() > least and matcher.ratio() > least


def only_last_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the conversation with only its last answer trained: only this one was judged."""
    last = max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return tuple(
        replace(message, weight=0.0) if message.role == "assistant" and number != last else message
        for number, message in enumerate(messages)
    )


def with_worse(example: Example) -> tuple[Message, ...] | None:
    """Return the conversation with the worse answer at its end."""
    return None if example.worse is None else (*example.messages[:-1], example.worse)

"""Rows with two answers to one question: preference pairs, and corrections of an answer."""

import difflib
from dataclasses import replace
from typing import Any, NamedTuple

from hivetune.data.columns import QUESTIONS, SYSTEM, TOOLS, plain_row
from hivetune.data.formats import read_conversation
from hivetune.data.pieces.format import Conversation
from hivetune.data.pieces.turns import ROLE_KEYS, role_of
from hivetune.data.pieces.values import Row, objects, one_of, parsed
from hivetune.data.reasons import RowRefused
from hivetune.records import Example, LessonKind, Message

CORRECTION = "correction"
REJECTED_ANSWER = "rejected_answer"  # the gateway's: the answer that a correction took the place of
_TURNS = ("messages", "conversations", "conversation", "prompt")
_ASKED = (*QUESTIONS, "context", "history")
# Pairs that differ in less push both answers down (arXiv 2410.08847): the better one is learned alone.
MIN_DIFFERENCE = 0.1
MAX_COMPARED_WORDS = 2000


class TwoAnswers(NamedTuple):
    """The conversation with the better answer, the worse answer, and the kind of row: preference or correction."""

    conversation: Conversation
    worse: Message
    lesson: LessonKind


def read_corrected(row: Row) -> TwoAnswers | None:
    """Return a row with an answer and its correction, None for any other. Raise RowRefused as `read_conversation`."""
    row = plain_row(row)
    turns = objects(parsed(row.get("messages")))
    if row.get(REJECTED_ANSWER) is not None and turns is not None:
        good = read_conversation({key: value for key, value in row.items() if key != REJECTED_ANSWER})
        rejected = row[REJECTED_ANSWER]
        rejected = rejected if isinstance(rejected, dict) else {"role": "assistant", "content": rejected}
        tools = {key: row[key] for key in TOOLS if key in row}
        before = read_conversation({**tools, "messages": [*turns[:-1], rejected]})
        return _two(good, before, "correction")
    corrected = row.get(CORRECTION)
    if not isinstance(corrected, str) or not corrected.strip():
        return None
    before = read_conversation({key: value for key, value in row.items() if key != CORRECTION})
    if before.messages[-1].role != "assistant":
        raise RowRefused("empty-turn", f"the row has a {CORRECTION}, but no answer that it corrects: add the answer")
    good = before._replace(messages=(*before.messages[:-1], Message("assistant", corrected)))
    return _two(good, before, "correction")


def read_preference(row: Row) -> TwoAnswers | None:
    """Return a row with a better and a worse answer, None for any other. Raise RowRefused("pair-differs")."""
    row = plain_row(row)
    sides = [parsed(row.get(name)) for name in ("chosen", "rejected")]
    if any(side in (None, "", []) for side in sides):
        return None
    if row.get("images") or row.get("image"):
        raise RowRefused("unsupported-content", "the pair is about an image, but only text can be learned")
    good, bad = (_with_answer(row, side) for side in sides)
    return _two(good, bad, "pair")


def _with_answer(row: Row, answer: Any) -> Conversation:
    """Return the conversation of a row with this answer only: a text, a turn, some turns, or a whole conversation."""
    if isinstance(answer, dict) and isinstance(parsed(answer.get("messages")), list):
        return read_conversation(answer)
    beside = {key: row[key] for key in (*SYSTEM, *TOOLS) if row.get(key) is not None}
    turns = objects([answer] if isinstance(answer, dict) else answer)
    if turns is not None and any(role_of(one_of(turn, *ROLE_KEYS)) != "assistant" for turn in turns):
        return read_conversation({**beside, "messages": turns})
    before = next((read for key in _TURNS if (read := objects(parsed(row.get(key)))) is not None), None)
    if before is not None:
        turns = turns or [{"role": "assistant", "content": answer}]
        repeats = role_of(one_of(before[-1], *ROLE_KEYS)) == "assistant"  # some files have the better answer there too
        return read_conversation({**beside, "messages": [*(before[:-1] if repeats else before), *turns]})
    asked = {key: row[key] for key in _ASKED if row.get(key) is not None}
    if not asked:
        hint = "the row has two answers, but no column with their question: map it, as in --columns prompt=QUESTION"
        raise RowRefused("pair-differs", hint)
    return read_conversation({**beside, **asked, "completion": turns or answer})


def _two(good: Conversation, bad: Conversation, lesson: LessonKind) -> TwoAnswers:
    better, worse = good.messages[-1], bad.messages[-1]
    before = [tuple(replace(m, weight=1.0) for m in conversation.messages[:-1]) for conversation in (good, bad)]
    if before[0] != before[1] or better.role != "assistant" or worse.role != "assistant":
        raise RowRefused("pair-differs")
    if replace(better, weight=1.0) == replace(worse, weight=1.0):
        raise RowRefused("pair-differs", "the better and the worse answer are the same: correct one, or delete the row")
    return TwoAnswers(good, worse, lesson)


def is_small_edit(better: Message, worse: Message) -> bool:
    """Return whether two answers differ so little that the worse one is not used."""
    if better.tool_calls != worse.tool_calls or better.reasoning != worse.reasoning:
        return False
    better_words, worse_words = (message.content.split()[:MAX_COMPARED_WORDS] for message in (better, worse))
    matcher = difflib.SequenceMatcher(None, better_words, worse_words, autojunk=False)
    least = 1 - MIN_DIFFERENCE
    return matcher.real_quick_ratio() > least and matcher.quick_ratio() > least and matcher.ratio() > least


def only_last_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the conversation with loss on its last answer only, because only that answer was rated."""
    last = max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return tuple(
        replace(message, weight=0.0) if message.role == "assistant" and number != last else message
        for number, message in enumerate(messages)
    )


def with_worse(example: Example) -> tuple[Message, ...] | None:
    """Return the conversation with the worse answer at its end."""
    return None if example.worse is None else (*example.messages[:-1], example.worse)

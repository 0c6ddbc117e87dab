"""The exact names of columns: of a question and its answer in published tables, and of what stands beside them."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Row, texts_in

SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input", "user", "human")
ANSWERS = ("completion", "output", "response", "answer", "solution", "assistant")
REASONING = ("reasoning_content", "reasoning", "thinking")
# What `data.columns` may map, each with what it is. `hivetune check --help` prints this.
FIELDS: Mapping[str, str] = {
    "prompt": "the question; a+b joins columns",
    "completion": "the answer; a+b writes columns as JSON",
    "messages": "a list of turns",
    "role": "of a turn: who speaks",
    "text": "of a turn: the words; without messages: a text that is learned whole",
    "assistant": "the speaker who answers; all others ask",
    "user": "the user's id",
    "system": "the system prompt, a column or a text in quotes",
    "tools": "the tools that may be called",
    "history": "earlier turns, or pairs of question and answer",
    "reasoning": "what was thought before the answer",
    "chosen": "the better of two answers",
    "rejected": "the worse of two answers",
    "correction": "the answer that a person put in the place of the answer",
    "session": "the conversation that a row belongs to",
    "agent": "the agent, a column or a name in quotes",
    "category": "the category, a column or a name in quotes",
    "time": "when it was said",
    "success": "whether the answer was good: true or false, yes or no, 1 or 0",
    "feedback": "the user's judgement: a number, or up or down",
    "checker": "the checker of the answer, an object",
    "weight": "1 to learn the row, 0 not to",
    "rows": "the path of the rows in a record",
    "where": "the rows to read: a=b, a!=b, or a in b|c",
}
_MIN_WORDS, _MIN_WIDE_CHARS = 4, 8  # Chinese and Japanese write without spaces
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def plain_row(row: Row) -> Row:
    """Return `row` with names in snake_case: `systemPrompt`, "System Prompt" and `system_prompt` are one.

    A name that would be there twice stays as it is.
    """
    renamed = _plain_names(tuple(row))
    return row if renamed is None else dict(zip(renamed, row.values(), strict=True))


@lru_cache(512)
def _plain_names(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the plain name of each column; None when all are plain already."""
    plain: list[str] = []
    for name in names:
        new = plain_name(name)
        plain.append(name if new in plain or (new != name and new in names) else new)
    return None if tuple(plain) == names else tuple(plain)


def is_sentence(value: Any) -> bool:
    """Return whether a text, or one inside of a list or an object, has at least four words, or as many signs of a
    script without spaces.
    """
    return any(
        len(text.split(None, _MIN_WORDS)) >= _MIN_WORDS
        or (not text.isascii() and len(_WIDE.findall(text)) >= _MIN_WIDE_CHARS)
        for text in texts_in(value)
    )

"""What a model is asked: to make a question and its answer of a passage. And how its reply is read. Pure."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.synth.make.draft import Draft
from hivetune.synth.sources.page import DocPage

SHORTEST_PASSAGE_CHARS, LONGEST_PASSAGE_CHARS = 80, 1500
PAIR_TOKENS = 320
CHARS_PER_TOKEN = 4  # of English prose, to count what a prompt costs where nobody tells
ASKED_KIND = "asked"
_SYSTEM = (
    "You write training rows for an assistant: one question that a person might type, and its answer. Use only what "
    "the passage says. Bring in no option, path, number, name or fact that the passage does not have. Keep names, "
    "options and numbers exactly as they are written there. Reply with JSON alone: "
    '{"question": "...", "answer": "..."}. If the passage has nothing to ask about, reply {"question": null}.'
)
_WISHES = (
    "Let a beginner ask, in plain words.",
    "Let the question be a task that somebody wants to get done.",
    "Let the question be short, and the answer a command or a name with one sentence.",
    "Let somebody ask who reads a script and does not know what a part of it does.",
    "Let somebody ask who got an unexpected result.",
    "Let the question combine two facts of the passage.",
    "Let the question begin with something other than How or What.",
)
_REFUSAL = re.compile(
    r"^\W*(?:I'?m sorry|I am sorry|Sorry|I can(?:no|')t|As an AI|I am unable|I'm unable)\b", re.IGNORECASE
)
_LABELLED = re.compile(r"(?:^|\n)\W*(?:question|q)\W*:\s*(.+?)\n+\W*(?:answer|a)\W*:\s*(.+)", re.IGNORECASE | re.DOTALL)
_CODE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def passages_of(page: DocPage) -> Iterator[tuple[str, str]]:
    """(section, text) of each stretch of the page that one question can be made of."""
    for entry in page.entries:
        yield entry.section, f"{entry.usage}\n{entry.text}"
    for example in page.examples:
        yield example.section, f"{example.explanation}\n{example.code}"
    for passage in page.passages:
        yield passage.heading, passage.text


def fits(text: str) -> bool:
    return SHORTEST_PASSAGE_CHARS <= len(text) <= LONGEST_PASSAGE_CHARS


def request(page: DocPage, section: str, passage: str, draw: random.Random) -> tuple[dict[str, str], ...]:
    """The messages; what is wished for varies, so that the questions do."""
    command = f" It documents the command `{page.command}`." if page.command else ""
    asked = f"From {page.label}, section {section}.{command}\n\nPASSAGE\n{passage}\n\n{draw.choice(_WISHES)}"
    return {"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}


def read_reply(text: str) -> tuple[str, str] | str:
    """(question, answer), or the reason why there is none. JSON, also with text around it, or lines with labels."""
    start = text.find("{")
    found: Any = None
    if start >= 0:
        try:
            found, _ = json.JSONDecoder(strict=False).raw_decode(text[start:])
        except (ValueError, RecursionError):
            found = None
    if isinstance(found, Mapping) and "question" in found:
        if found["question"] is None:
            return "refused"
        asked, answered = found["question"], found.get("answer")
    elif labelled := _LABELLED.search(text):
        asked, answered = labelled[1], labelled[2]
    else:
        return "refused" if _REFUSAL.match(text) else "not-a-pair"
    if not isinstance(asked, str) or not isinstance(answered, str) or not asked.strip() or not answered.strip():
        return "not-a-pair"
    return "refused" if _REFUSAL.match(answered) else (asked.strip(), answered.strip())


def draft_of(pair: tuple[str, str], section: str, passage: str) -> Draft:
    """The pair as a draft; code in its answer is parsed like any other."""
    blocks = [(language, code.strip("\n")) for language, code in _CODE.findall(pair[1])]
    shell = tuple(code for language, code in blocks if language in ("", "bash", "sh", "shell", "console"))
    python = tuple(code for language, code in blocks if language in ("python", "py"))
    return Draft(ASKED_KIND, (pair,), section, passage, commands=shell, python=python)

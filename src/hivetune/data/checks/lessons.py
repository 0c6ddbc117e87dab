"""The lesson of a row, what it asks and what it teaches: as words to compare rows, and as hashes that tie rows.

Two rows teach the same only if both their answers with calls and their questions are similar.
"""

import json
import marshal
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from hivetune.records import Message

MAX_WORD_CHARS = 20  # characters per word on average; above it a text has no spaces
_NUMBER = re.compile(r"\d+")
# One changed word changes three triples, two neighbours four, three neighbours five. More changed neighbours are
# another question or answer, such as another review behind the same instruction.
MAX_EDIT_TRIPLES = 5
AT_END = 1  # what a run at the beginning or the end counts more, since a word there is in fewer triples
Triple = tuple[str, ...]
SALT = b"hivetune split 1"


@dataclass(frozen=True, slots=True)
class Lesson:
    """The words of a row in lower case: system prompts and tools, other read text, and trained text."""

    context: Sequence[str]
    question: Sequence[str]
    learned: Sequence[str]
    calls: tuple[str, ...]  # each trained call as JSON
    numbers: tuple[str, ...]  # sorted


class Similarity(NamedTuple):
    """How similar two rows are by their word triples (Jaccard, 0 to 1).

    `asked` is the lower similarity of the system prompts and of the other text that is read: one question about two
    documents in system prompts is two lessons. `share` is the lowest of these and of the answers. `asks_alike`: what is
    read differs in a few words at most; `same`: so do the answers, and numbers and calls are equal.
    """

    asked: float
    share: float
    asks_alike: bool
    same: bool


def lesson_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Lesson:
    """Return the lesson of a row's messages and tools."""
    question, learned, calls = texts_of(messages)
    numbers = tuple(sorted(_NUMBER.findall(f"{question}\n{learned}")))
    context = [message.content.lower() for message in messages if message.role == "system"]
    if tools:
        context.append(_plain([dict(tool) for tool in tools]))
    return Lesson(words_of("\n".join(context)), words_of(question), words_of(learned), calls, numbers)


def packed_lesson(lesson: Lesson) -> bytes:
    """Return the lesson as bytes for `unpacked_lesson` of the same Python."""
    # marshal takes 4 us to read a row of 500 characters; the row's JSON and a search for its words take 70.
    parts: Any = (lesson.context, lesson.question, lesson.learned, lesson.calls, lesson.numbers)
    return marshal.dumps(parts)


def unpacked_lesson(packed: bytes | memoryview) -> Lesson:
    return Lesson(*marshal.loads(packed))


def texts_of(messages: Sequence[Message]) -> tuple[str, str, tuple[str, ...]]:
    """Return (asked text, trained text, trained calls); the trained text includes the calls."""
    questions, learned, calls = [], [], []
    for message in messages:
        if message.role == "assistant" and message.weight:
            if message.reasoning:
                learned.append(message.reasoning)
            learned.append(message.content)
            for call in message.tool_calls:
                calls.append(_plain(call.get("function", call)))  # without its id, which is always new
                learned.append(calls[-1])
        elif message.role != "system":
            questions.append(message.content)
    return "\n".join(questions).lower(), "\n".join(learned).lower(), tuple(calls)


def words_of(text: str) -> Sequence[str]:
    """Return the words of a text; of text without spaces (Chinese, Japanese) its characters."""
    words = text.split()
    return words if len(words) * MAX_WORD_CHARS >= len(text) else text


def triples_of(words: Sequence[str]) -> Sequence[Triple]:
    """Return all triples of neighbouring words; a shorter text is one piece."""
    triples: list[Triple] = list(zip(words, words[1:], words[2:], strict=False))
    return triples or ([tuple(words)] if words else [])


def share_of_triples(a: Sequence[str], b: Sequence[str]) -> float:
    """Return the Jaccard similarity of two texts, given as words, by their triples."""
    left, right = set(triples_of(a)), set(triples_of(b))
    return len(left & right) / len(left | right) if left or right else 1.0


def compare(a: Lesson, b: Lesson) -> Similarity:
    """Return the similarity of two rows."""
    asked, edits = _similar(a.question, b.question)
    if a.context != b.context:
        of_context, context_edits = _similar(a.context, b.context)
        asked, edits = min(asked, of_context), max(edits, context_edits)
    answers, answer_edits = _similar(a.learned, b.learned)
    asks_alike = edits <= MAX_EDIT_TRIPLES
    same = asks_alike and answer_edits <= MAX_EDIT_TRIPLES and a.calls == b.calls and a.numbers == b.numbers
    return Similarity(asked, min(asked, answers), asks_alike, same)


def _similar(a: Sequence[str], b: Sequence[str]) -> tuple[float, int]:
    """Return the share of common triples, and the longest run of triples in either text that the other one lacks."""
    if a == b:
        return 1.0, 0
    return share_of_triples(a, b), _longest_edit(triples_of(a), triples_of(b))


def lesson_hashes(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> array:  # type: ignore[type-arg]
    """Return a 64-bit hash for each trained answer, of itself and everything before it.

    A row whose last hash is an earlier hash of another row is the beginning of that row.
    """
    digest = blake2b(digest_size=8)
    if tools:
        digest.update(_plain([dict(tool) for tool in tools]).encode("utf-8", "surrogatepass"))
    hashes = array("Q")
    for m in messages:
        text = f"{m.role} {m.weight} {len(m.content)} {m.content}"
        if m.tool_calls or m.name or m.reasoning:  # without ids of calls, which Ollama's clients do not send back
            text += _plain([m.name, [call.get("function", call) for call in m.tool_calls], m.reasoning])
        digest.update(text.encode("utf-8", "surrogatepass"))
        if m.role == "assistant" and m.weight:
            hashes.append(int.from_bytes(digest.copy().digest(), "little"))
    return hashes


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=dict)


def _longest_edit(a: Sequence[Triple], b: Sequence[Triple]) -> int:
    """Return the length of the longest run of triples in either text that the other text lacks.

    A run at an end of a text counts AT_END more.
    """
    longest = 0
    for triples, in_other in ((a, set(b)), (b, set(a))):
        run = AT_END
        for triple in triples:
            if triple in in_other:
                run = 0
            else:
                run += 1
                if run > longest:  # max() would take half of the time of this loop
                    longest = run
        longest = max(longest, run + AT_END if run else 0)
    return longest


def question(messages: Sequence[Message]) -> str:
    """Return all text before the first answer without system prompts; of plain text its beginning."""
    texts = []
    for message in messages:
        if message.role == "assistant":
            break
        if message.role != "system":
            texts.append(" ".join(message.content.split()).casefold())
    return "\n".join(texts) if texts else messages[0].content[:200]


def read_hash(messages: Sequence[Message]) -> int:
    """Return a 64-bit hash of all text except answers."""
    read = [f"{m.role} {m.content}" for m in messages if m.role != "assistant"]
    return group_hash("read:" + "\n".join(read or [messages[0].content]))


def group_hash(key: str) -> int:
    """Return a uniform 64-bit hash of `key`."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=SALT).digest(), "little")

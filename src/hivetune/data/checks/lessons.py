"""The words of a row, for comparison: its question and its answer as word triples, and as hashes that group rows.

Two rows teach the same thing only if both their answers (with calls) and their questions are similar.
"""

import json
import marshal
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from hivetune.records import Message

MAX_WORD_CHARS = 20  # characters per word on average; above it a text has no spaces
_NUMBER = re.compile(r"\d+")
# One changed word changes three triples, two neighbours four, three neighbours five. More changed neighbours are
# another question or answer, such as another review after the same instruction.
MAX_EDIT_TRIPLES = 5
AT_END = 1  # what a run at the beginning or the end counts more, since a word there is in fewer triples
Triple = str | int  # three words with spaces between, or their hash
SALT = b"hivetune split 1"


class Lesson(NamedTuple):
    """The word triples of a row in lower case, as three sets: of system prompts and tools, other untrained text,
    trained text."""

    context: Sequence[Triple]
    question: Sequence[Triple]
    learned: Sequence[Triple]
    calls: tuple[str, ...]  # each trained call as JSON
    numbers: tuple[str, ...]  # sorted


def lesson_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Lesson:
    """Return the word triples of a row's messages and tools."""
    question, learned, calls = texts_of(messages)
    numbers = tuple(sorted(_NUMBER.findall(f"{question}\n{learned}")))
    context = [message.content.lower() for message in messages if message.role == "system"]
    if tools:
        context.append(_plain([dict(tool) for tool in tools]))
    texts = triples_of("\n".join(context)), triples_of(question), triples_of(learned, "=")
    return Lesson(*texts, calls, numbers)


def packed_lesson(lesson: Lesson) -> bytes:
    """Return a lesson as bytes, with each triple as a hash, for `unpacked_lesson` of the same Python and hash seed."""
    # Two texts of 80 words are compared in 18 us by hashes, in 73 us by tuples of words.
    hashes = [array("q", map(hash, triples)).tobytes() for triples in (lesson.context, lesson.question, lesson.learned)]
    parts: Any = (*hashes, lesson.calls, lesson.numbers)
    return marshal.dumps(parts)


def unpacked_lesson(packed: bytes | memoryview) -> Lesson:
    context, question, learned, calls, numbers = marshal.loads(packed)
    return Lesson(
        memoryview(context).cast("q"), memoryview(question).cast("q"), memoryview(learned).cast("q"), calls, numbers
    )


def texts_of(messages: Sequence[Message]) -> tuple[str, str, tuple[str, ...]]:
    """Return (untrained text, trained text, trained tool calls); the trained text includes the calls."""
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


def triples_of(text: str, front: str = "") -> list[str]:
    """Return the triples of neighbouring words, each prefixed with `front`; a shorter text is one piece. Of text
    without spaces (Chinese, Japanese) the characters are its words."""
    words: Sequence[str] = text.split()
    if len(words) * MAX_WORD_CHARS < len(text):
        words = text
    if len(words) < 3:
        return [front + " ".join(words)] if words else []
    return [f"{front}{a} {b} {c}" for a, b, c in zip(words, words[1:], words[2:], strict=False)]


def asked_alike(a: Lesson, b: Lesson, least: float = 0) -> float | None:
    """Return the similarity of the untrained texts of two rows (Jaccard of triples, 0 to 1); None if it is below
    `least`, or if they differ in more than a few words. Of the system prompts and the other untrained text, the less
    similar one counts, so one question about two documents in system prompts is two lessons."""
    asked = _similarity(a.question, b.question, least)
    context = _similarity(a.context, b.context, least) if asked is not None else None
    return None if asked is None or context is None else min(asked, context)


def taught_alike(a: Lesson, b: Lesson, least: float = 0) -> float | None:
    """Return the similarity of two trained texts (0 to 1); None if it is below `least`, or if they differ in more than
    a few words, in a number or in a call."""
    return _similarity(a.learned, b.learned, least) if a.calls == b.calls and a.numbers == b.numbers else None


def _similarity(a: Sequence[Triple], b: Sequence[Triple], least: float) -> float | None:
    if a == b:
        return 1.0
    left, right = set(a), set(b)
    common = len(left & right)
    similarity = common / (len(left) + len(right) - common)
    # Of the candidates of a search most end here.
    is_other = similarity < least or _is_edited(a, right) or _is_edited(b, left)
    return None if is_other else similarity


def _is_edited(triples: Sequence[Triple], other: Collection[Triple]) -> bool:
    """Return whether more than MAX_EDIT_TRIPLES in a row are not in the other text; at an end AT_END count more."""
    run = AT_END
    for triple in triples:
        run = 0 if triple in other else run + 1
        if run > MAX_EDIT_TRIPLES:
            return True
    return run > 0 and run + AT_END > MAX_EDIT_TRIPLES


def lesson_hashes(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> array:  # type: ignore[type-arg]
    """Return for each trained answer a 64-bit hash of all turns up to and including it.

    If the last hash of a row is an earlier hash of another row, the row is the beginning of that other row.
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


def question(messages: Sequence[Message]) -> str:
    """Return all text before the first answer, without system prompts; of a row that is plain text, its beginning."""
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

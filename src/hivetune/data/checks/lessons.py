"""The lesson of a row, what it asks and what it teaches: as words, to compare rows, and as one hash per answer.

Two rows teach the same only if both their answers with calls and their questions are similar. Words that many rows
share, such as an instruction before each question, don't count.
"""

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from hivetune.records import Message

MAX_WORD_CHARS = 20  # characters per word on average; above it a text has no spaces
_NUMBER = re.compile(r"\d+")
# One changed word changes three triples, two neighbours four, three neighbours five. More changed neighbours are
# another question or answer, such as another review behind the same instruction.
MAX_EDIT_TRIPLES = 5
Triple = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The words of a row in lower case: system prompts and tools, other read text, and trained text."""

    context: Sequence[str]
    question: Sequence[str]
    learned: Sequence[str]
    calls: tuple[str, ...]  # each trained call as JSON
    numbers: tuple[str, ...]  # sorted


class Similarity(NamedTuple):
    """The Jaccard `share` of two rows' word triples (0 to 1), and whether they differ only in a few words (`same`).

    `share` is the lowest of the system prompts, of the other text that is read, and of the answers: one question about
    two documents in system prompts is two lessons. Rows that are the `same` have equal numbers and calls, too.
    """

    share: float
    same: bool


def lesson_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Lesson:
    """Return the lesson of a row's messages and tools."""
    question, learned, calls = texts_of(messages)
    numbers = tuple(sorted(_NUMBER.findall(f"{question}\n{learned}")))
    context = [message.content.lower() for message in messages if message.role == "system"]
    if tools:
        context.append(_plain([dict(tool) for tool in tools]))
    return Lesson(words_of("\n".join(context)), words_of(question), words_of(learned), calls, numbers)


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


def compare(a: Lesson, b: Lesson, shared: frozenset[Triple] = frozenset()) -> Similarity:
    """Return the similarity of two rows; the `shared` triples of many questions don't count."""
    questions = (
        [t for t in triples_of(a.question) if t not in shared],
        [t for t in triples_of(b.question) if t not in shared],
    )
    answers = triples_of(a.learned), triples_of(b.learned)
    edits = max(_longest_edit(*questions), _longest_edit(*answers))
    share = min(_jaccard(*questions), _jaccard(*answers))
    if a.context != b.context:
        contexts = triples_of(a.context), triples_of(b.context)
        share, edits = min(share, _jaccard(*contexts)), max(edits, _longest_edit(*contexts))
    return Similarity(share, edits <= MAX_EDIT_TRIPLES and a.calls == b.calls and a.numbers == b.numbers)


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
        if m.tool_calls or m.tool_call_id or m.name or m.reasoning:
            text += _plain([m.name, m.tool_call_id, [dict(call) for call in m.tool_calls], m.reasoning])
        digest.update(text.encode("utf-8", "surrogatepass"))
        if m.role == "assistant" and m.weight:
            hashes.append(int.from_bytes(digest.copy().digest(), "little"))
    return hashes


def shared_triples(lessons: Iterable[Lesson]) -> frozenset[Triple]:
    """Return the triples that more than half of these rows have in their questions."""
    sets = [set(triples_of(lesson.question)) for lesson in lessons]
    counts: dict[Triple, int] = {}
    for triples in sets:
        for triple in triples:
            counts[triple] = counts.get(triple, 0) + 1
    return frozenset(triple for triple, count in counts.items() if 2 * count > len(sets))


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=dict)


def _jaccard(left: Sequence[Triple], right: Sequence[Triple]) -> float:
    a, b = set(left), set(right)
    return len(a & b) / len(a | b) if a or b else 1.0


def _longest_edit(a: Sequence[Triple], b: Sequence[Triple]) -> int:
    """Return the length of the longest run of triples in either text that the other text lacks."""
    longest = 0
    for triples, in_other in ((a, set(b)), (b, set(a))):
        run = 0
        for triple in triples:
            run = 0 if triple in in_other else run + 1
            longest = max(longest, run)
    return longest

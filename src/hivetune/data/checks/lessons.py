"""What a row asks and what it teaches: as words, to say how alike two rows are, and as one hash for each answer.

Two rows teach the same only if their answers and calls are alike and so is what asks for them. What many rows ask in
the same words (an instruction in front of each question) says nothing about that and can be left out.
"""

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from hivetune.records import Message

LONGEST_WORDS = 20  # characters a word on average, above which text has no spaces
_NUMBER = re.compile(r"\d+")
# A changed word takes three triples with it, two neighbours four, three neighbours five. Where more than three words in
# a row differ, somebody asked or answered something else: two reviews behind one instruction, the next answer of a
# history that grows.
LONGEST_EDIT_TRIPLES = 5
Triple = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One row in words of lower case: system prompts and tools, what else is only read, and what is trained."""

    given: Sequence[str]
    asked: Sequence[str]
    learned: Sequence[str]
    calls: tuple[str, ...]  # JSON of each trained call
    numbers: tuple[str, ...]  # sorted


@dataclass(frozen=True, slots=True)
class Likeness:
    """Shares of word triples in common (Jaccard, 0 to 1), and whether the difference is a matter of a few words.

    `asked`: of all that is read, the lower one of the system prompts' share and of the rest's: two documents in two
    system prompts make two lessons of one question.
    """

    asked: float
    learned: float
    small_edits: bool
    same_facts: bool  # the same numbers and the same calls

    def is_copy(self, threshold: float) -> bool:
        """Whether one of the two rows can go: nothing else is learned from it."""
        return self.small_edits and self.same_facts and min(self.asked, self.learned) >= threshold

    def is_leak(self, threshold: float) -> bool:
        """Whether a model that was trained on one of the two has seen the other."""
        return min(self.asked, self.learned) >= threshold

    @property
    def share(self) -> float:
        return min(self.asked, self.learned)


def lesson_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Lesson:
    asked, learned, calls = texts_of(messages)
    numbers = tuple(sorted(_NUMBER.findall(f"{asked}\n{learned}")))
    given = [message.content.lower() for message in messages if message.role == "system"]
    if tools:
        given.append(_plain([dict(tool) for tool in tools]))
    return Lesson(words_of("\n".join(given)), words_of(asked), words_of(learned), calls, numbers)


def texts_of(messages: Sequence[Message]) -> tuple[str, str, tuple[str, ...]]:
    """(what is asked, what is learned, the calls that are learned); the learned text holds the calls too."""
    asked, learned, calls = [], [], []
    for message in messages:
        if message.role == "assistant" and message.weight:
            if message.reasoning:
                learned.append(message.reasoning)
            learned.append(message.content)
            for call in message.tool_calls:
                calls.append(_plain(call.get("function", call)))  # without its id, which is another one each time
                learned.append(calls[-1])
        elif message.role != "system":
            asked.append(message.content)
    return "\n".join(asked).lower(), "\n".join(learned).lower(), tuple(calls)


def words_of(text: str) -> Sequence[str]:
    """Words; in text without spaces (Chinese, Japanese) characters stand in for them."""
    words = text.split()
    return words if len(words) * LONGEST_WORDS >= len(text) else text


def triples_of(words: Sequence[str]) -> Sequence[Triple]:
    """Every three words in a row; a shorter text is one piece, an empty one none."""
    triples: list[Triple] = list(zip(words, words[1:], words[2:], strict=False))
    return triples or ([tuple(words)] if words else [])


def compare(one: Lesson, other: Lesson, shared: frozenset[Triple] = frozenset()) -> Likeness:
    """How alike two rows are; `shared`: triples of what is asked that many rows have, which do not count."""
    asked = (
        [t for t in triples_of(one.asked) if t not in shared],
        [t for t in triples_of(other.asked) if t not in shared],
    )
    learned = triples_of(one.learned), triples_of(other.learned)
    edits = max(_longest_edit(*asked), _longest_edit(*learned))
    likeness = _jaccard(*asked)
    if one.given != other.given:
        given = triples_of(one.given), triples_of(other.given)
        likeness, edits = min(likeness, _jaccard(*given)), max(edits, _longest_edit(*given))
    return Likeness(
        likeness,
        _jaccard(*learned),
        edits <= LONGEST_EDIT_TRIPLES,
        one.calls == other.calls and one.numbers == other.numbers,
    )


def lesson_hashes(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> array:  # type: ignore[type-arg]
    """64 bits for each trained answer, over itself and everything before it: equal ones teach exactly the same.

    A row whose last lesson is an earlier lesson of another row is the beginning of that row.
    """
    digest = blake2b(digest_size=8)
    if tools:
        digest.update(_plain([dict(tool) for tool in tools]).encode("utf-8", "surrogatepass"))
    found = array("Q")
    for m in messages:
        text = f"{m.role} {m.weight} {len(m.content)} {m.content}"
        if m.tool_calls or m.tool_call_id or m.name or m.reasoning:
            text += _plain([m.name, m.tool_call_id, [dict(call) for call in m.tool_calls], m.reasoning])
        digest.update(text.encode("utf-8", "surrogatepass"))
        if m.role == "assistant" and m.weight:
            found.append(int.from_bytes(digest.copy().digest(), "little"))
    return found


def shared_triples(lessons: Iterable[Lesson]) -> frozenset[Triple]:
    """Triples of what is asked that more than half of these rows have."""
    sets = [set(triples_of(lesson.asked)) for lesson in lessons]
    counts: dict[Triple, int] = {}
    for triples in sets:
        for triple in triples:
            counts[triple] = counts.get(triple, 0) + 1
    return frozenset(triple for triple, count in counts.items() if 2 * count > len(sets))


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=dict)


def _jaccard(one: Sequence[Triple], other: Sequence[Triple]) -> float:
    a, b = set(one), set(other)
    return len(a & b) / len(a | b) if a or b else 1.0


def _longest_edit(one: Sequence[Triple], other: Sequence[Triple]) -> int:
    """The longest run of triples in either text that the other one has nowhere."""
    longest = 0
    for triples, known in ((one, set(other)), (other, set(one))):
        run = 0
        for triple in triples:
            run = 0 if triple in known else run + 1
            longest = max(longest, run)
    return longest

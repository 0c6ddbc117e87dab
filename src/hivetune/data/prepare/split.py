"""The split into training and held-out rows. Rows that belong together are a group, and a group has one side.

Rows are tied by an equal question or text, by their session, by a long text that few rows share, by most of their
words, and by their user. A group is a connected component of these ties. Its side is a function of the hash of its
oldest row's session or question: no state is kept, the order of the input does not matter, and shares are exact only on
average. docs/decisions/0012 ranks these promises.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING

from hivetune.data.checks.dedupe import Table
from hivetune.data.snapshot import SPLITS
from hivetune.records import Example, Message, Split

if TYPE_CHECKING:  # pydantic would take 0.3 s at the start of each worker
    from hivetune.config import DataConfig

SALT = b"hivetune split 1"
SCALE = 1 << 64
NONE = 0  # the hash of a session or user that a row does not name
READ, SAID, SESSION, TEXT, USER = range(5)
# A user is kept together only up to this share of the held-out rows (by default 2 % of all rows), since otherwise
# the side of one user would decide the verdict.
USERS_SHARE = 0.1
# The ties in the order in which groups grow. A row is in its largest group of these levels that is small enough to be
# held out, else in its group of the last level, READ.
GROWTH = (READ, SAID, SESSION, TEXT, USER)
LEVELS = (USER, TEXT, SESSION, SAID, READ)
# A text is long from 20 words (answers) or 50 words (paragraphs).
LONG_ANSWER_CHARS, LONG_CONTEXT_CHARS, MAX_CONTEXTS = 120, 300, 8
# A text that more rows share than this share of the held-out rows is an instruction or a stock answer.
TEXTS_SHARE, FEW_ROWS = 0.25, 8


def question(messages: Sequence[Message]) -> str:
    """Return all text before the first answer without system prompts; of plain text its beginning."""
    texts = []
    for message in messages:
        if message.role == "assistant":
            break
        if message.role != "system":
            texts.append(" ".join(message.content.split()).casefold())
    return "\n".join(texts) if texts else messages[0].content[:200]


def tie_hashes(example: Example) -> tuple[int, int, int, int]:
    """Return 64-bit hashes of the text that is read, the question, the session and the user (NONE if missing)."""
    return (
        read_hash(example.messages),
        group_hash("question:" + question(example.messages)),
        group_hash(f"session:{example.session}") if example.session else NONE,
        group_hash(f"user:{example.user}") if example.user else NONE,
    )


def text_hashes(messages: Sequence[Message]) -> "array[int]":
    """Return 64-bit hashes of the last answer and of the paragraphs that are read, if they are long."""
    answer = " ".join(messages[-1].content.split()).casefold()
    texts = [f"answer:{answer}"] if messages[-1].role == "assistant" and len(answer) >= LONG_ANSWER_CHARS else []
    for message in messages:
        if message.role != "assistant" and len(message.content) >= LONG_CONTEXT_CHARS:
            lines = (line for line in message.content.split("\n") if len(line) >= LONG_CONTEXT_CHARS)
            texts += [f"context:{' '.join(line.split()).casefold()}" for line in lines]
    return array("Q", map(group_hash, dict.fromkeys(texts[: MAX_CONTEXTS + 1])))


def read_hash(messages: Sequence[Message]) -> int:
    """Return a 64-bit hash of all text except answers."""
    read = [f"{m.role} {m.content}" for m in messages if m.role != "assistant"]
    return group_hash("read:" + "\n".join(read or [messages[0].content]))


def group_hash(key: str) -> int:
    """Return a uniform 64-bit hash of `key`."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=SALT).digest(), "little")


def split_of(hash64: int, validation: float, test: float) -> Split:
    """Return the split of a group by its hash. The rest is trained."""
    position = hash64 / SCALE
    if position < test:
        return "test"
    return "validation" if position < test + validation else "train"


@dataclass(frozen=True, slots=True)
class Ties:
    """The ties of all rows, with one entry per input row. `time` is in seconds since 1970, infinite if unknown.

    `texts` has hashes of long texts; `text_rows` has the row of each at the same place, ascending.
    """

    read: "array[int]"
    question: "array[int]"
    session: "array[int]"
    user: "array[int]"
    time: "array[float]"
    text_rows: "array[int]" = field(default_factory=lambda: array("I"))
    texts: "array[int]" = field(default_factory=lambda: array("Q"))


@dataclass(frozen=True, slots=True)
class Sides:
    """The result: for each input row `side`, an index into SPLITS, and `group`, a row that identifies its group.

    `counts` is for the report: how many groups there are, the size of the largest, and the rows that are broken up, as
    their session or user is too large to be kept together, or are trained because their group is
    too large, larger than all that may be held out.
    """

    side: bytearray
    group: "array[int]"
    counts: dict[str, int]


def sides(
    rows: Sequence[int],
    ties: Ties,
    alike: Iterable[tuple[int, int]],
    data: "DataConfig",
    twins: Iterable[tuple[int, int]] = (),
) -> Sides:
    """Return the side of each of `rows`. `alike` are pairs of nearly equal rows, `twins` pairs that share most words.

    A group that is larger than validation and test together can't be held out. Then only smaller groups are kept
    together: the session, else the question, else all text that is read (one question about many documents, one
    greeting before many conversations). If that is still too large, the group is trained.
    """
    num_rows = len(ties.time)
    levels = LEVELS
    limit = (data.validation + data.test) * len(rows)
    group, level_of, fits = array("I", bytes(4 * num_rows)), bytearray(num_rows), bytearray(num_rows)
    member = bytearray(num_rows)
    for row in rows:
        member[row] = 1
    groups, sizes = _Groups(num_rows), array("I")
    groups.join((row, copy) for row, copy in alike if member[row] and member[copy])
    equal = {READ: ties.read, SAID: ties.question, SESSION: ties.session, USER: ties.user}
    for level in GROWTH:
        if level == TEXT:
            groups.join(_sharing_texts(ties, member, max(FEW_ROWS, int(TEXTS_SHARE * limit))))
            groups.join(twins)
        else:
            first = Table()
            named = ((row, equal[level][row]) for row in rows if equal[level][row] != NONE)
            groups.join((first_row, row) for row, value in named if (first_row := first.put(value, row)) is not None)
        roots = groups.closed(rows)
        if level not in levels:
            continue
        sizes = _sizes(rows, roots)
        largest = max(1.0, limit * USERS_SHARE if level == USER else limit)
        for row in rows:
            if level == levels[-1] or sizes[roots[row]] <= largest:
                group[row], level_of[row], fits[row] = roots[row], level, sizes[roots[row]] <= largest
    in_group = _sizes(rows, group)
    counts = {
        "groups": sum(map(bool, in_group)),
        "largest": max(in_group, default=0),
        "broken_up": sum(in_group[group[row]] != sizes[roots[row]] for row in rows),
        "too_large": len(rows) - sum(fits),
    }
    side = bytearray(num_rows)
    anchors = _anchors(rows, ties, group, level_of)
    for row in rows:
        if fits[row]:
            side[row] = SPLITS.index(split_of(anchors[group[row]], data.validation, data.test))
    return Sides(side, group, counts)


class _Groups:
    """Sets of rows that belong together (union-find). A set is named by its first row, its root."""

    def __init__(self, num_rows: int):
        self._roots = array("I", range(num_rows))

    def join(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Join the sets of the rows of each pair."""
        roots = self._roots
        for pair in pairs:
            a, b = map(self._root, pair)
            roots[max(a, b)] = min(a, b)

    def closed(self, rows: Sequence[int]) -> "array[int]":
        """Return the root of each of `rows`, by row."""
        for row in rows:
            self._roots[row] = self._root(row)
        return self._roots

    def _root(self, row: int) -> int:
        roots = self._roots
        while (above := roots[row]) != row:
            roots[row] = row = roots[above]
        return row


def _sharing_texts(ties: Ties, member: bytearray, max_rows: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of rows that share a long text, unless more than `max_rows` have it."""
    indices = sorted((i for i, row in enumerate(ties.text_rows) if member[row]), key=ties.texts.__getitem__)
    for _, same in groupby(indices, key=ties.texts.__getitem__):
        first, *others = (ties.text_rows[i] for i in same)
        if len(others) < max_rows:
            yield from ((first, other) for other in others)


def _sizes(rows: Sequence[int], roots: "array[int]") -> "array[int]":
    sizes = array("I", bytes(4 * len(roots)))
    for row in rows:
        sizes[roots[row]] += 1
    return sizes


def _anchors(
    rows: Sequence[int],
    ties: Ties,
    group: "array[int]",
    level_of: bytearray,
) -> "array[int]":
    """Return for each group the hash that decides its side: of its oldest row, without times the smallest hash."""
    times = array("d", [float("inf")]) * len(group)
    anchors = array("Q", [SCALE - 1]) * len(group)
    for row in rows:
        key = ties.session[row] if level_of[row] >= SESSION else NONE
        key = key or (ties.question if level_of[row] >= SAID else ties.read)[row]
        root, time = group[row], ties.time[row]
        if (time, key) < (times[root], anchors[root]):
            times[root], anchors[root] = time, key
    return anchors

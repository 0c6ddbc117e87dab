"""Rows worth looking at: the longest, those with the least to learn, those that were changed, and some at random."""

import json
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.data.fates import Decisions, fates, open_result
from hivetune.data.snapshot import SPLITS

NUM_RANDOM = 4
MAX_TOKENS = 1200
_QUERY = "SELECT n, source, length, trained, changed, hash64 FROM rows WHERE reason IS NULL ORDER BY n"


@dataclass(frozen=True, slots=True)
class Sample:
    """A usable row. `why` it is shown; `runs`: (text, trained) pieces, None without a model; `changed`: reasons."""

    why: str
    source: str
    messages: list[dict[str, Any]]
    length: int
    trained: int | None
    changed: str | None
    runs: list[tuple[str, bool]] | None


@dataclass(slots=True)
class _Best:
    """The best row so far under one measure; smaller is better."""

    why: str
    measure: Callable[[int, int | None, str | None, int], tuple[float, ...] | None]
    score: tuple[float, ...] | None = None
    place: tuple[int, int] | None = None  # chunk, row in the chunk


def choose_samples(
    results: Sequence[Path], decisions: Decisions, decode: Callable[[Sequence[int]], str] | None
) -> list[Sample]:
    """Read once through all rows; keeps places only."""
    best = [
        _Best("the longest", lambda length, _t, _c, _h: (-length,)),
        _Best("the least to learn", lambda length, t, _c, _h: None if t is None else (t / max(1, length), t)),
        _Best("changed", lambda _l, _t, changed, h: (h,) if changed else None),
    ]
    at_random: list[tuple[int, tuple[int, int]]] = []
    for number, path in enumerate(results):
        fate_of = dict(fates(decisions, number))
        with closing(open_result(path)) as database:
            for n, _, length, trained, changed, hash64 in database.execute(_QUERY):
                if fate_of[n] >= len(SPLITS):
                    continue
                for one in best:
                    score = one.measure(length, trained, changed, hash64)
                    if score is not None and (one.score is None or score < one.score):
                        one.score, one.place = score, (number, n)
                if len(at_random) < NUM_RANDOM or hash64 < at_random[-1][0]:
                    at_random = sorted([*at_random, (hash64, (number, n))])[:NUM_RANDOM]
    wanted = {one.place: one.why for one in reversed(best) if one.place is not None}
    chosen = [(wanted[place], place) for place in reversed(wanted)]
    chosen += [("at random", place) for _, place in at_random if place not in wanted]
    return [_read(results, place, why, decode) for why, place in chosen]


def _read(
    results: Sequence[Path], place: tuple[int, int], why: str, decode: Callable[[Sequence[int]], str] | None
) -> Sample:
    with closing(open_result(results[place[0]])) as database:
        source, length, trained, changed, messages, tokens, mask = database.execute(
            "SELECT source, coalesce(num_tokens, length), trained, changed, messages, tokens, mask"
            " FROM rows JOIN bodies USING (n) WHERE n = ?",
            (place[1],),
        ).fetchone()
    runs = _runs(tokens, mask, decode) if decode is not None and tokens is not None else None
    return Sample(why, source, json.loads(messages), length, trained, changed, runs)


def _runs(tokens: bytes, mask: bytes, decode: Callable[[Sequence[int]], str]) -> list[tuple[str, bool]]:
    """Consecutive tokens of one kind decoded together, since a character may take several tokens."""
    ids = array("I")
    ids.frombytes(tokens)
    runs: list[tuple[str, bool]] = []
    start, end = 0, min(len(ids), MAX_TOKENS)
    for i in range(1, end + 1):
        if i == end or mask[i] != mask[start]:
            runs.append((decode(ids[start:i]), bool(mask[start])))
            start = i
    if len(ids) > MAX_TOKENS:
        runs.append((f" ... {len(ids) - MAX_TOKENS:,} more tokens", False))
    return runs

"""Which held-out rows stand for all of them: the same ones at every validation of a run, spread over their kinds."""

from collections.abc import Callable, Sequence
from typing import Any


def spread_sample(rows: Sequence[int], most: int, kind: Callable[[int], Any]) -> list[int]:
    """At most `most` of `rows`, at equal distances in the order of `kind`: each kind has its share, to within a row.

    A systematic sample from an ordered list is a stratified one (Cochran, Sampling Techniques, 1977, chapter 8).
    """
    if len(rows) <= most:
        return list(rows)
    ordered = sorted(rows, key=lambda row: (kind(row), row))
    return [ordered[(2 * number + 1) * len(ordered) // (2 * most)] for number in range(most)]

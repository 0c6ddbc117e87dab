"""Bad row or bad kernel: the search with scripted replays. With real children: test_isolate_real.py."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.process.protocol import Item
from hivetune.train.supervise.isolate import Ending, Findings, isolate

GOOD = 99  # a row of another step


class Card:
    """A scripted card: `kills(item, other)` ends the child at that item, `nan` rows are not finite."""

    def __init__(self, kills: Callable[[Item, bool], bool], nan: frozenset[int] = frozenset()):
        self.kills, self.nan = kills, nan
        self.children = 0

    def replay(self, items: Sequence[Item], other: bool) -> Ending:
        self.children += 1
        finite: list[bool] = []
        for item in items:
            if self.kills(item, other):
                return Ending(tuple(finite), "was killed by SIGABRT")
            finite.append(not self.nan & set(item.rows))
        return Ending(tuple(finite))

    def isolate(self, size: int, control: int | None = GOOD, most: int = 40) -> Findings:
        findings = isolate(range(size), self.replay, most=most, control=control)
        assert findings.children == self.children and findings.words
        return findings


def bad_rows(*rows: int) -> Callable[[Item, bool], bool]:
    return lambda item, other: bool(set(rows) & set(item.rows))


@pytest.mark.parametrize("control", [GOOD, None])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_one_bad_row_costs_three_children(size: int, control: int | None) -> None:
    for position in {0, size // 2, size - 1}:
        card = Card(bad_rows(position))
        assert list(card.isolate(size, control).rows) == [position]
        assert card.children <= 3


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.sets(st.integers(0, 39)))
def test_exactly_the_bad_rows_are_found(size: int, kill: set[int], nan: set[int]) -> None:
    kill, nan = {row for row in kill if row < size}, frozenset(row for row in nan if row < size)
    card = Card(bad_rows(*kill), nan)
    assert list(card.isolate(size).rows) == sorted(kill | nan)
    assert card.children <= 2 * (len(kill) + 1)


@pytest.mark.parametrize(
    ("kills", "rows", "words"),
    [
        (lambda item, other: 5 in item.rows and not item.padded, [], "bad kernel: row 5"),
        (lambda item, other: 5 in item.rows and not other, [], "bad kernel: row 5"),
        (lambda item, other: 3 in item.rows or (5 in item.rows and not other), [3], "bad kernel: row 5"),
        (lambda item, other: False, [], "each row of the step is fine alone"),
        (lambda item, other: True, [], "before the first"),
    ],
    ids=["one shape", "one library", "a row and a library", "chance", "everything"],
)
def test_only_what_fails_in_both_ways_is_a_bad_row(
    kills: Callable[[Item, bool], bool], rows: list[int], words: str
) -> None:
    findings = Card(kills).isolate(16)
    assert list(findings.rows) == rows and words in findings.words


def test_a_machine_that_fails_everywhere_costs_no_rows() -> None:
    nan_weights = Card(lambda item, other: False, frozenset(range(100)))
    assert not nan_weights.isolate(16).rows and nan_weights.children == 1
    findings = isolate(range(16), lambda items, other: Ending((), "no torch", started=False), most=16, control=GOOD)
    assert (dict(findings.rows), findings.children) == ({}, 1)


def test_more_bad_rows_than_are_tolerated_are_the_machine() -> None:
    """Without a row that is known to be good it is all that ends the search."""
    assert list(Card(bad_rows(3, 5)).isolate(16, None, most=2).rows) == [3, 5]
    assert not Card(bad_rows(3, 5)).isolate(16, None, most=1).rows
    everything = Card(lambda item, other: True)
    assert not everything.isolate(64, None, most=16).rows and everything.children == 17


def test_a_fault_at_random_times_rarely_costs_a_row() -> None:
    """A card that dies in one replay of 20, whatever the row: both replays of one row must hit it (1 in 400)."""
    random_numbers = random.Random(0)
    wrong = sum(len(Card(lambda item, other: random_numbers.random() < 0.05).isolate(8).rows) for _ in range(500))
    assert wrong <= 30  # 500 x 8 rows x 1/400 = 10 expected; 30 is six standard deviations above

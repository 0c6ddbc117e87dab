"""Bad row or bad kernel: the search with scripted replays, then with real children that really die."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.process.protocol import Item
from hivetune.train.plan.steps import max_quarantined
from hivetune.train.supervise.isolate import Ending, Findings, isolate, within


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


def bad_rows(*rows: int) -> Callable[[Item, bool], bool]:
    return lambda item, other: bool(set(rows) & set(item.rows))


def found(findings: Findings) -> list[int]:
    return list(findings.rows)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16, 64, 256])
def test_one_bad_row_costs_few_children(size: int) -> None:
    for position in {0, size // 2, size - 1}:
        card = Card(bad_rows(100 + position))
        findings = isolate(range(100, 100 + size), card.replay, control=7)
        assert (findings.culprit, found(findings)) == ("row", [100 + position])
        assert card.children == findings.children <= math.ceil(math.log2(size)) + 2


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.sets(st.integers(0, 39)))
def test_exactly_the_bad_rows_are_found(size: int, kill: set[int], nan: set[int]) -> None:
    kill, nan = {row for row in kill if row < size}, frozenset(row for row in nan if row < size)
    card = Card(bad_rows(*kill), nan)
    findings = isolate(range(size), card.replay, control=99)
    assert found(findings) == sorted(kill | nan)
    assert findings.culprit == ("row" if kill | nan else "chance")
    assert card.children <= 2 * (len(kill) + 1)


def test_a_kernel_that_dies_at_one_shape_is_no_bad_row() -> None:
    card = Card(lambda item, other: 5 in item.rows and not item.padded)
    findings = isolate(range(16), card.replay, control=99)
    assert (findings.culprit, findings.rows) == ("kernel", {})
    assert "bad kernel: row 5" in findings.words


def test_a_library_that_dies_of_one_row_is_no_bad_row() -> None:
    card = Card(lambda item, other: 5 in item.rows and not other)
    assert isolate(range(16), card.replay, control=99).culprit == "kernel"


def test_a_bad_row_and_a_bad_kernel_in_one_batch_are_told_apart() -> None:
    card = Card(lambda item, other: 3 in item.rows or (5 in item.rows and not other))
    findings = isolate(range(16), card.replay, control=99)
    assert (findings.culprit, found(findings)) == ("row", [3])
    assert "bad row 3" in findings.words and "bad kernel: row 5" in findings.words


def test_rows_that_die_only_together_are_not_quarantined() -> None:
    findings = isolate(range(16), Card(lambda item, other: len(item.rows) > 4).replay, control=99)
    assert (findings.culprit, findings.rows) == ("kernel", {})
    assert "the size of the batch" in findings.words
    findings = isolate(range(16), Card(lambda item, other: len(item.rows) > 4 and not item.padded).replay, control=99)
    assert "another order" in findings.words


def test_what_does_not_happen_again_is_chance() -> None:
    card = Card(lambda item, other: False)
    assert isolate(range(16), card.replay, control=99).culprit == "chance"
    assert card.children == 2


def test_a_machine_that_fails_everywhere_costs_no_rows() -> None:
    for control in (None, 99):
        card = Card(lambda item, other: True)
        findings = isolate(range(16), card.replay, control=control)
        assert (findings.culprit, findings.rows) == ("machine", {})
        assert card.children <= 3
    findings = isolate(range(16), lambda items, other: Ending((), "MachineNotFit: no torch", started=False), control=99)
    assert (findings.culprit, findings.children) == ("machine", 1)
    nan_weights = Card(lambda item, other: False, frozenset(range(100)))
    assert isolate(range(16), nan_weights.replay, control=99).culprit == "machine"


def test_a_fault_at_random_times_rarely_costs_a_row() -> None:
    """A card that dies in one replay of 20, whatever the row: both replays of one row must hit it (1 in 400)."""
    random_numbers = random.Random(0)
    wrong = 0
    for _ in range(500):
        card = Card(lambda item, other: random_numbers.random() < 0.05)
        wrong += len(isolate(range(8), card.replay, control=99).rows)
    assert wrong <= 30  # 500 x 8 rows x 1/400 = 10 expected; 30 is six standard deviations above


def test_more_bad_rows_than_are_borne_are_the_machine() -> None:
    findings = isolate(range(16), Card(bad_rows(3, 5)).replay, control=99)
    assert within(findings, 14, 16) == findings
    stopped = within(findings, 15, 16)
    assert (stopped.culprit, stopped.rows) == ("machine", {})
    assert max_quarantined(10_000, 0.2) == 2000 and max_quarantined(10, 0.2) == 16

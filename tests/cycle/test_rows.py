"""The choice of a cycle's rows: every row is used or has a reason."""

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.cycle.rows import by_source, choose_rows, new_groups
from hivetune.data.leave_out import LEAVE_OUT
from hivetune.data.snapshot import PoolRow


def row(number: int, **about: Any) -> PoolRow:
    fields: dict[str, Any] = {
        "id": f"{number:04}",
        "source": f"gateway:helpdesk@1:{number}",
        "split": "train",
        "tied": number,
        "agent": None,
        "category": None,
        "user": None,
        "time": float(number),
        "answered_by": None,
        "length": 100,
        "trained": 50,
        "numbers": (number,),
    }
    return PoolRow(**{**fields, **about})


def rows(count: int, first: int = 0, **about: Any) -> list[PoolRow]:
    return [row(number, **about) for number in range(first, first + count)]


def ids(found: list[PoolRow]) -> set[str]:
    return {one.id for one in found}


def test_all_rows_while_they_fit() -> None:
    found = rows(40)
    assert choose_rows(found, ids(found[:30]), 4000) == choose_rows(found, (), None) == {}


def test_all_new_rows_and_a_random_part_of_the_old_ones() -> None:
    old, new = rows(1000), rows(20, first=1000)
    left_out = choose_rows([*old, *new], ids(old), 52_000)
    assert Counter(left_out.values()) == {"not-replayed": 500}
    kept = [number for number, one in enumerate(old) if one.id not in left_out]
    assert 350 < sum(kept) / len(kept) < 650, "neither the oldest nor the newest"


def test_new_rows_beyond_the_budget_wait_their_turn() -> None:
    old, new = rows(100), rows(100, first=100)
    left_out = choose_rows([*old, *new], ids(old), 6000)
    assert Counter(left_out.values()) == {"not-replayed": 100, "next-cycle": 40}
    assert {identity for identity, why in left_out.items() if why == "next-cycle"} == ids(new[60:])


def test_own_answers_are_never_evidence_and_open_no_cycle() -> None:
    found = [*rows(3, answered_by="helpdesk@1"), *rows(2, first=10, answered_by="helpdesk@1", split="test")]
    assert choose_rows(found, (), None) == {"0010": "own-evidence", "0011": "own-evidence"}
    assert new_groups(found, ()) == 0


def test_only_new_groups_count_towards_the_threshold() -> None:
    """A group counts once, however many rows it has."""
    found = [*rows(3, tied=7), *rows(2, first=10), *rows(4, first=20)]
    assert new_groups(found, ids(rows(4, first=20))) == 3


POOL = st.lists(
    st.builds(
        row,
        st.integers(0, 400),
        split=st.sampled_from(["train", "train", "train", "validation", "test"]),
        answered_by=st.sampled_from([None, None, "a@1"]),
        time=st.none() | st.floats(0, 1e9),
        length=st.integers(10, 300),
    ),
    unique_by=lambda one: one.id,
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(POOL, st.floats(0, 1), st.none() | st.integers(0, 10_000))
def test_whatever_comes_every_row_is_accounted(found: list[PoolRow], known: float, budget: int | None) -> None:
    old = {one.id for one in found[: int(known * len(found))]}
    left_out = choose_rows(found, old, budget)
    assert left_out.keys() <= ids(found)
    assert set(left_out.values()) <= set(LEAVE_OUT)
    assert choose_rows(list(reversed(found)), old, budget) == left_out  # the order of the rows says nothing
    trained = [one for one in found if one.id not in left_out and one.split == "train"]
    if budget is not None and left_out.keys() - {i for i, why in left_out.items() if why == "own-evidence"}:
        assert sum(one.length for one in trained) <= budget


def test_the_same_choice_for_rows_that_only_moved() -> None:
    found = rows(200)
    moved = [replace(one, numbers=(one.numbers[0] + 1,)) for one in found]
    known = ids(found[:150])
    assert choose_rows(found, known, 9000) == choose_rows(moved, known, 9000)


def test_sources_are_counted_the_largest_first() -> None:
    found = [*rows(2, source="b.jsonl:1"), *rows(3, source="a.jsonl:7"), *rows(1, source="store")]
    assert by_source(found) == "3 of a.jsonl, 2 of b.jsonl, 1 of store"
    many = [row(number, source=f"{number % 7}.jsonl:1") for number in range(70)]
    assert by_source(many).endswith("2 more sources")

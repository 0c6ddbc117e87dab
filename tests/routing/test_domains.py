"""Domains are what rows declare."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.errors import UsageError
from hivetune.records import Split
from hivetune.release.registry import MAX_NAME_LENGTH, RELEASE_NAME
from hivetune.routing.domains import (
    MIN_ROWS,
    MIN_SESSIONS,
    KeyedRow,
    RowDomain,
    choose_kind,
    declared_keys,
    domains_of,
    title_of,
    too_small,
)
from hivetune.routing.steps import specialist_name


def row(number: int, split: Split = "train", **keys: str) -> KeyedRow:
    return KeyedRow(str(number), split, f"s{number}", (number,), keys, "")


def test_the_first_kind_that_divides_the_rows_makes_the_domains() -> None:
    rows = [row(n, agent="one", category="ab"[n % 2]) for n in range(4)]
    assert choose_kind(rows, "auto") == "category"
    assert choose_kind(rows, "agent") == "agent"
    assert choose_kind([row(0), row(1)], "auto") is None
    assert [domain.label for domain in domains_of([*rows, row(9, category="b")], "category", {})] == [
        "category=b",
        "category=a",
    ]


def test_a_system_prompt_counts_by_its_words() -> None:
    first, second = (declared_keys(None, None, text, ()) for text in ("You are  brief.\n", "You are brief."))
    assert first == second and first.keys() == {"system"}
    assert declared_keys("coder", "", "  ", ("b", "a", "a")).keys() == {"agent", "tools"}
    assert title_of("system", "word " * 100, ()).endswith("...")


def test_an_agent_and_a_category_are_one_key_in_any_case() -> None:
    assert declared_keys("Billing", "Über  uns ", None, ()) == declared_keys("billing", "über uns", None, ())
    assert declared_keys(" ", "", None, ()) == {}


def test_small_domains_are_told_apart_by_rows_and_by_sessions() -> None:
    few = [row(n) for n in range(MIN_ROWS - 1)]
    assert f"of {MIN_ROWS} rows" in too_small(few)
    one_session = [KeyedRow(str(n), "validation", "s", (n,), {}, "") for n in range(MIN_ROWS)]
    assert f"1 of {MIN_SESSIONS} independent sessions" in too_small(one_session)
    assert not too_small([row(n, "validation" if n < MIN_SESSIONS else "train") for n in range(MIN_ROWS)])


@given(st.text(min_size=1, max_size=60), st.sampled_from(["team", "a" * 64]))
def test_every_domain_has_the_name_of_a_release(value: str, shared: str) -> None:
    """Whatever people call their agents."""
    name = specialist_name(shared, RowDomain("agent", (value,)))
    assert RELEASE_NAME.fullmatch(name) and len(name) <= MAX_NAME_LENGTH


def test_names_of_different_domains_differ() -> None:
    names = [specialist_name("team", RowDomain("agent", (value,))) for value in ("a b", "a-b", "A B", "a_b", "ä b")]
    assert names[1] == "team-a-b" and len(set(names)) == len(names)


def test_a_name_that_no_release_can_have_is_refused() -> None:
    with pytest.raises(UsageError):
        specialist_name("Team", RowDomain("agent", ("x",)))

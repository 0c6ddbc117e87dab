"""The rows of a cycle: every row is used or has a reason, refused ones are read again only when they changed; and which
values have a domain of their own."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cycle.small import append_rows, make_config, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import hivetune.cycle.rows
from hivetune.base.database import open_database, transaction
from hivetune.config import RunConfig, load_config, parse_config
from hivetune.cycle.record import CycleRow, Domain, begin_cycle, end_cycle
from hivetune.cycle.rows import RowsNow, affordable_tokens, choose_rows, domains_of, pool_of, read_rows_now
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import PoolRow
from hivetune.release.registry import champion_of

CYCLE = CycleRow("a1", "demo", 10.0, "rows", {}, None)


def row(number: int, **about: Any) -> PoolRow:
    fields: dict[str, Any] = {
        "id": f"{number:04}",
        "source": f"gateway:helpdesk@1:{number}",
        "split": "train",
        "group_id": number,
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


def config_of(path: Path = Path("rows.jsonl"), **cycle: Any) -> RunConfig:
    tree = {"model": "smollm2-135m", "data": {"path": str(path)}, "cycle": {"name": "desk", **cycle}}
    return parse_config(tree, "a test")


def test_all_new_rows_and_a_random_part_of_the_old_ones() -> None:
    old, new = rows(1000), rows(20, first=1000)
    left_out = choose_rows([*old, *new], ids(old), 52_000)
    assert Counter(left_out.values()) == {"not-drawn": 500}
    kept = [number for number, one in enumerate(old) if one.id not in left_out]
    assert 350 < sum(kept) / len(kept) < 650, "neither the oldest nor the newest"


def test_new_rows_beyond_the_budget_wait_their_turn() -> None:
    old, new = rows(100), rows(100, first=100)
    left_out = choose_rows([*old, *new], ids(old), 6000)
    assert Counter(left_out.values()) == {"not-drawn": 140}
    assert left_out.keys() & ids(new) == ids(new[60:])


def test_own_answers_are_never_evidence() -> None:
    found = [*rows(3, answered_by="helpdesk@1"), *rows(2, first=10, answered_by="helpdesk@1", split="test")]
    assert choose_rows(found, (), None) == {"0010": "own-answer", "0011": "own-answer"}


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


@settings(max_examples=100, deadline=None)
@given(POOL, st.floats(0, 1), st.none() | st.integers(0, 10_000))
def test_whatever_comes_every_row_is_accounted(found: list[PoolRow], known: float, budget: int | None) -> None:
    old = {one.id for one in found[: int(known * len(found))]}
    left_out = choose_rows(found, old, budget)
    assert left_out.keys() <= ids(found) and all(
        REASONS[reason].severity == "set_aside" for reason in left_out.values()
    )
    moved = [replace(one, numbers=(one.numbers[0] + 1,)) for one in reversed(found)]
    assert choose_rows(moved, old, budget) == left_out  # order and place of the rows say nothing
    trained = [one for one in found if one.id not in left_out and one.split == "train"]
    if budget is not None:
        assert sum(one.length for one in trained) <= budget


def test_the_budget_of_hours_is_one_of_tokens() -> None:
    assert affordable_tokens(config_of(), rows(1000), 5.0) is None
    assert affordable_tokens(config_of(hours=6.0), rows(1000), 5.0) is None
    assert affordable_tokens(config_of(hours=1.0), rows(1000), 5.0) == 20_000
    assert affordable_tokens(config_of(hours=0.01), rows(1000), 5.0) == 10 * 16 * 100  # ten steps are the least
    assert affordable_tokens(config_of(hours=1.0), rows(9, split="test"), 5.0) is None  # all rows are held out


@pytest.mark.slow
def test_rows_of_a_champion_that_a_person_deployed_are_not_new(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivetune.cycle.rows, "planned", lambda config, rows: (1.0, ""))
    config, known = load_config(make_config(tmp_path)), RowsNow()
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 30))
    snapshot = pool_of(config)
    with closing(open_database()) as database:
        assert read_rows_now(config, database, "demo", None, known).groups == 30
        with transaction(database):
            columns = "name, version, run, model, model_sha256, adapter_sha256, snapshot, proof, created"
            values = "('demo', 1, '', '', '', '', ?, '{}', 0)"
            database.execute(f"INSERT INTO releases ({columns}) VALUES {values}", (snapshot.hash,))
            database.execute("INSERT INTO moves VALUES (NULL, 'demo', 1, 'promoted', 0, '', '', 0)")
        champion = champion_of(database, "demo")
        assert read_rows_now(config, database, "demo", champion, known).groups == 0
        again = [{**one, "session_id": "s31"} for one in make_rows(31, 4)]  # a group counts once
        append_rows(tmp_path / "rows.jsonl", [*make_rows(30, 1), *again])
        assert read_rows_now(config, database, "demo", champion, known).groups == 2
        database.execute("INSERT INTO tainted VALUES (?, 'user', 'u1', 3, 20)", (snapshot.hash,))
        now = read_rows_now(config, database, "demo", champion, known)
        assert now.groups == 5  # forgotten rows of the champion count, once: a later cycle was without them
        begin_cycle(database, replace(CYCLE, opened=30.0))
        end_cycle(database, CYCLE, "refused", "worse", 31.0)
        assert read_rows_now(config, database, "demo", champion, now).groups == 2


def of(agent: str | None, train: int, held_out: int, first: int) -> list[PoolRow]:
    return [*rows(train, first, agent=agent), *rows(held_out, first + train, agent=agent, split="test")]


def test_values_with_enough_rows_have_a_domain() -> None:
    found = [
        *of("Billing  Team", 200, 20, 0),
        *of("it", 300, 30, 1000),
        *of("few", 199, 20, 2000),
        *of("unheard", 200, 19, 3000),
        *of("模型", 200, 20, 4000),  # no name of a release
        *of("a b", 200, 20, 5000),
        *of("a-b", 200, 20, 6000),  # the same name
        *of(None, 500, 50, 7000),
    ]
    domains = domains_of(config_of(by="agent"), found)
    told = [("desk-billing-team", "billing team", 2), ("desk-it", "it", 2)]
    assert [(domain.name, domain.value, domain.shares) for domain in domains] == told


def test_rows_of_other_domains_are_left_out_on_both_sides_of_the_split() -> None:
    mine, others, domain = of("IT", 3, 2, 0), of("billing", 3, 2, 10), Domain("desk", "agent", "it")
    assert choose_rows([*mine, *others], (), None, domain) == {one.id: "filtered" for one in others}
    own = row(50, agent="it", split="test", answered_by="desk@1")
    assert choose_rows([own], (), None, domain) == {own.id: "own-answer"}

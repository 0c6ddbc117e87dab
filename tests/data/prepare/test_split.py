"""A row's side is its own: it never depends on other rows, and what belongs together stays together."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import chat
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.config import DataConfig, parse_config
from hivetune.data.prepare.prepare import prepare
from hivetune.data.prepare.split import group_hash, group_key, split_of
from hivetune.records import Example, Message


def example(question: str, answer: str, **more: Any) -> Example:
    return Example("", "f:1", (Message("user", question), Message("assistant", answer)), **more)


@settings(derandomize=True)
@given(st.integers(0, 2**64 - 1), st.floats(0, 0.5), st.floats(0, 0.49))
def test_shares_only_ever_grow_out_of_training_rows(place: int, validation: float, more: float) -> None:
    """A larger test share keeps every row of the smaller one."""
    if split_of(place, validation, 0.2) == "test":
        assert split_of(place, validation, 0.2 + more) == "test"


def test_the_same_question_is_on_one_side() -> None:
    one, other = example("What  is\nthis?", "a"), example("what is this?", "another answer")
    assert group_key(one, "none") == group_key(other, "none")
    assert group_key(example("what is that?", "a"), "none") != group_key(one, "none")


def test_what_is_grouped() -> None:
    row = example("q", "a", session="s", user="u")
    assert group_key(row, "auto") == group_key(row, "session") == "session:s"
    assert group_key(row, "user") == "user:u"
    assert group_key(row, "none").startswith("question:")
    assert group_key(example("q", "a"), "user") == group_key(row, "none")


def test_shares_hold_for_every_stratum() -> None:
    """10,000 questions: each share within 5 standard deviations (0.3 % each) of what was asked for."""
    counts = Counter(split_of(group_hash(f"question:{i}"), 0.1, 0.1) for i in range(10_000))
    assert abs(counts["test"] - 1000) < 150
    assert abs(counts["validation"] - 1000) < 150


def sides(path: Path, chatml: Path, **data: Any) -> dict[str, str]:
    """{answer: split} of a prepared file."""
    config = parse_config({"model": "m", "data": {"path": str(path), "near_duplicates": 0, **data}})
    snapshot = prepare(config, chatml)
    infos = [snapshot.info(row) for row in range(snapshot.num_rows)]
    return {info.messages[-1].content: info.split for info in infos}


def test_adding_rows_moves_no_row(write_rows: Callable[..., Path], chatml: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}", session=f"s{i % 40}", agent=f"a{i % 3}") for i in range(300)]
    added = [chat(f"new {i}", f"added {i}", session=f"s{i % 60}", agent="a0") for i in range(200)]
    before = sides(write_rows(rows, "old.jsonl"), chatml)
    after = sides(write_rows([*added[:100], *rows, *added[100:]], "new.jsonl"), chatml)
    assert len(after) == 500
    assert {answer: after[answer] for answer in before} == before
    assert set(before.values()) == {"train", "validation", "test"}


@pytest.mark.parametrize(("group_by", "key"), [("auto", "session"), ("user", "user")])
def test_sessions_and_users_are_never_divided(
    group_by: str, key: str, write_rows: Callable[..., Path], chatml: Path
) -> None:
    rows = [chat(f"question {i}", f"answer {i}", **{key: f"g{i % 30}"}) for i in range(300)]
    found = sides(write_rows(rows), chatml, group_by=group_by)
    for group in range(30):
        assert len({found[f"answer {i}"] for i in range(group, 300, 30)}) == 1


def test_balance_evens_out_training_and_keeps_the_evidence(write_rows: Callable[..., Path], chatml: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}", agent="big" if i % 5 else "small") for i in range(400)]
    path = write_rows(rows)
    config = parse_config({"model": "m", "data": {"path": str(path), "balance": "agent"}})
    snapshot = prepare(config, chatml)
    plain = sides(path, chatml)
    trained = Counter(snapshot.info(row).agent for row in snapshot.rows("train"))
    assert trained["big"] == trained["small"]
    held_out = {
        snapshot.info(row).messages[-1].content for row in (*snapshot.rows("test"), *snapshot.rows("validation"))
    }
    assert held_out == {answer for answer, split in plain.items() if split != "train"}
    assert snapshot.manifest["accounting"]["set_aside"] == {"balance": 400 - snapshot.num_rows}


def test_quotas_take_rows_by_their_content(write_rows: Callable[..., Path], chatml: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}", session="loud" if i < 50 else f"s{i}") for i in range(80)]
    path = write_rows(rows)
    kept = sides(path, chatml, quota_per_session=5)
    assert sum(1 for answer in kept if int(answer.split()[1]) < 50) == 5
    assert len(kept) == 35
    turned = sides(write_rows(rows[::-1], "turned.jsonl"), chatml, quota_per_session=5)
    assert turned == kept
    assert len(sides(path, chatml, quota_per_source=20)) == 20


def test_defaults_are_the_documented_shares() -> None:
    data = DataConfig(path="x")
    assert (data.validation, data.test, data.group_by) == (0.1, 0.1, "auto")

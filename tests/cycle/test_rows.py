"""The choice of a cycle's rows: every row is used or has a reason, and nobody has more than a share."""

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.cycle.pool import (
    GENERAL_SHARE,
    MAX_IN_A_ROW,
    MIN_VOICES,
    OWN_SHARE,
    VOICE_SHARE,
    ChoiceSettings,
    begins_from,
    choose_rows,
    needs_scores,
    new_groups,
)
from hivetune.data.fates import LEAVE_OUT
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


def reasons(choice: Any) -> Counter[str]:
    return Counter(choice.left_out.values())


def test_suspect_rows_train_no_cycle_and_are_no_evidence() -> None:
    found = [*rows(40), *rows(10, 40), *rows(5, 50, split="test")]
    suspect = ids(found[40:])
    wishes = ChoiceSettings(known=ids(found), suspect=suspect)
    choice = choose_rows(found, wishes)
    assert choice.left_out == dict.fromkeys(suspect, "suspect")
    assert choice.old_tokens == 40 * 50 and new_groups(found, wishes) == 0
    assert new_groups(found, replace(wishes, known=ids(found[:40]))) == 0  # they open no cycle either
    assert not needs_scores(found, replace(wishes, budget_tokens=4000))  # what is left fits


def test_all_rows_while_they_fit() -> None:
    found = rows(40)
    choice = choose_rows(found, ChoiceSettings(known=ids(found[:30]), budget_tokens=4000))
    assert choice.left_out == {}
    assert (choice.old_tokens, choice.new_tokens) == (1500, 500)


def test_all_new_rows_and_the_old_ones_that_the_champion_scores_worst() -> None:
    """There are 100 old rows, 40 % of them of agent b, and room for 50."""
    old = [row(number, agent="b" if number % 5 < 2 else "a") for number in range(100)]
    new = rows(20, first=100)
    scores = {one.id: float(number) for number, one in enumerate(old)}
    choice = choose_rows([*old, *new], ChoiceSettings(known=ids(old), budget_tokens=7000, scores=scores))
    assert reasons(choice) == {"not-replayed": 50}
    kept = [one for one in old if one.id not in choice.left_out]
    assert Counter(one.agent for one in kept) == {"a": 30, "b": 20}
    for agent in "ab":
        worst = sorted((one for one in old if one.agent == agent), key=lambda one: -scores[one.id])
        assert ids(worst[: len([one for one in kept if one.agent == agent])]) == {
            o.id for o in kept if o.agent == agent
        }


def test_old_rows_keep_their_half_and_new_ones_wait_their_turn() -> None:
    """New rows fill more than half of the budget: the oldest are used now, the others stay new."""
    old, new = rows(100), rows(100, first=100)
    choice = choose_rows([*old, *new], ChoiceSettings(known=ids(old), budget_tokens=10_000))
    assert reasons(choice) == {"not-replayed": 50, "next-cycle": 50}
    assert {identity for identity, why in choice.left_out.items() if why == "next-cycle"} == ids(new[50:])


def test_rows_without_a_finite_score_come_last() -> None:
    old = rows(10)
    scores = {one.id: 1.0 for one in old[2:]} | {old[0].id: float("nan")}
    choice = choose_rows([*old, *rows(2, first=10)], ChoiceSettings(known=ids(old), budget_tokens=1000, scores=scores))
    assert choice.left_out == {old[0].id: "not-replayed", old[1].id: "not-replayed"}


def test_going_on_replays_a_share_even_if_all_would_fit() -> None:
    old, new = rows(100), rows(30, first=100)
    choice = choose_rows([*old, *new], ChoiceSettings(known=ids(old), replay=0.1, going_on=True))
    assert choice.new_tokens == 1500
    assert 0.25 <= choice.old_tokens / (choice.old_tokens + choice.new_tokens) <= 0.30  # whole rows, at most 30 %


def test_from_the_base_again_after_five() -> None:
    assert [begins_from("last", done) for done in range(MAX_IN_A_ROW + 2)] == ["last"] * 5 + ["base"] * 2
    assert begins_from("base", 0) == "base"


def test_only_new_people_count_towards_the_threshold() -> None:
    """A group counts once, however many rows it has. Known rows, a release's own answers and general rows do not
    count."""
    found = [
        *rows(3, tied=7),
        *rows(2, first=10),
        *rows(4, first=20),
        *rows(5, first=30, answered_by="helpdesk@1"),
        *rows(6, first=40, source="general.jsonl:1"),
    ]
    wishes = ChoiceSettings(known=ids(rows(4, first=20)), general={"general.jsonl"})
    assert new_groups(found, wishes) == 3 == choose_rows(found, wishes).new_groups


def test_one_user_who_floods_is_held_to_a_share_of_training_and_of_evidence() -> None:
    """There are 50 users with 10 rows and one with 3,000, who gets at most 30 % of each split; no group of it counts
    beyond."""
    people = [row(n, user=f"u{n % 50}", split=("train", "test")[n % 5 == 0]) for n in range(500)]
    flood = [row(n, user="flood", split=("train", "test")[n % 5 == 0]) for n in range(1000, 4000)]
    choice = choose_rows([*people, *flood], ChoiceSettings())
    assert not ids(people) & choice.left_out.keys()
    for split in ("train", "test"):
        left = [one for one in flood if one.split == split and one.id not in choice.left_out]
        others = sum(one.split == split for one in people)
        assert 0.28 <= len(left) / (len(left) + others) <= VOICE_SHARE
    assert choice.new_groups == len(people) + sum(one.id not in choice.left_out for one in flood)


def test_a_few_people_are_not_held_to_each_others_silence() -> None:
    found = [*rows(100, user="ada"), *rows(1, first=200, user="bob")]
    assert choose_rows(found, ChoiceSettings()).left_out == {}


def test_who_always_wrote_most_may_go_on() -> None:
    """Half of the champion's rows were ada's, so her share stays a half, and another's is 30 %."""
    old = [row(n, user="ada" if n % 2 else f"u{n % 12}") for n in range(120)]
    new = [*rows(100, first=200, user="ada"), *rows(400, first=400, user="u2")]
    choice = choose_rows([*old, *new], ChoiceSettings(known=ids(old)))
    kept = [one for one in (*old, *new) if one.id not in choice.left_out]
    share = Counter(one.user for one in kept)
    assert 0.40 <= share["ada"] / len(kept) <= 0.5
    assert 0.28 <= share["u2"] / len(kept) <= VOICE_SHARE


def test_one_source_of_many_is_held_to_its_share() -> None:
    found = [*rows(500, source="loud.jsonl:1"), *(row(600 + n, source=f"log{n % 6}.jsonl:{n}") for n in range(60))]
    choice = choose_rows(found, ChoiceSettings())
    assert set(choice.left_out.values()) == {"source-share"}
    kept = [one for one in found if one.id not in choice.left_out]
    assert sum(one.source == "loud.jsonl:1" for one in kept) <= VOICE_SHARE * len(kept)


def test_own_answers_are_a_quarter_at_most_and_never_evidence() -> None:
    found = [
        *rows(90),
        *rows(100, first=200, answered_by="helpdesk@1"),
        *rows(5, first=400, answered_by="x@1", split="test"),
    ]
    choice = choose_rows(found, ChoiceSettings())
    assert reasons(choice) == {"own-share": 70, "own-evidence": 5}
    kept = [one for one in found if one.id not in choice.left_out and one.answered_by]
    assert ids(kept) == ids(rows(30, first=270))  # the newest


def test_general_rows_are_a_twentieth() -> None:
    found = [*rows(95), *rows(50, first=200, source="general.jsonl:1")]
    choice = choose_rows(found, ChoiceSettings(general={"general.jsonl"}))
    assert reasons(choice) == {"general-share": 45}
    assert choice.general_tokens == 250


def test_the_champion_scores_only_where_it_matters() -> None:
    old = rows(10)
    assert not needs_scores(old, ChoiceSettings(known=ids(old), budget_tokens=1000))
    assert needs_scores(old, ChoiceSettings(known=ids(old), budget_tokens=999))
    assert needs_scores(old, ChoiceSettings(known=ids(old), going_on=True))
    assert not needs_scores(old, ChoiceSettings(budget_tokens=1))


POOL = st.lists(
    st.builds(
        row,
        st.integers(0, 400),
        source=st.sampled_from(["gateway:a@1:1", "general.jsonl:1", *(f"log{n}.jsonl:1" for n in range(6))]),
        split=st.sampled_from(["train", "train", "train", "validation", "test"]),
        tied=st.integers(0, 30),
        agent=st.sampled_from([None, "a", "b"]),
        user=st.sampled_from([None, *(f"u{n}" for n in range(8)), *["flood"] * 8]),
        answered_by=st.sampled_from([None, None, "a@1"]),
        time=st.none() | st.floats(0, 1e9),
        length=st.integers(10, 300),
        trained=st.integers(1, 10),
    ),
    unique_by=lambda one: one.id,
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(POOL, st.floats(0, 1), st.none() | st.integers(0, 10_000), st.booleans(), st.floats(0, 1), st.data())
def test_whatever_comes_every_row_is_accounted_and_no_share_is_passed(
    found: list[PoolRow], known: float, budget: int | None, going_on: bool, replay: float, data: st.DataObject
) -> None:
    old = {one.id for one in found[: int(known * len(found))]}
    scores = {identity: data.draw(st.floats()) for identity in sorted(old)[:5]}
    wishes = ChoiceSettings(
        known=old,
        general={"general.jsonl"},
        budget_tokens=budget,
        replay=replay,
        going_on=going_on,
        scores=scores,
    )
    choice = choose_rows(found, wishes)
    assert choice.left_out.keys() <= ids(found)
    assert set(choice.left_out.values()) <= set(LEAVE_OUT)
    assert choose_rows(list(reversed(found)), wishes) == choice  # the order of the rows says nothing
    kept = [one for one in found if one.id not in choice.left_out]
    trained = [one for one in kept if one.split == "train"]
    tokens = sum(one.trained for one in trained)
    assert choice.new_tokens + choice.old_tokens + choice.general_tokens == tokens
    of_work = [one for one in trained if not one.source.startswith("general")]
    work_tokens = sum(one.trained for one in of_work)
    assert tokens - work_tokens <= GENERAL_SHARE * tokens + 1e-6
    assert sum(one.trained for one in of_work if one.answered_by) <= OWN_SHARE * work_tokens + 1e-6
    assert not [one for one in kept if one.answered_by and one.split != "train"]
    if budget is not None:
        assert sum(one.length for one in trained) <= budget
    if not old:
        users = Counter[str]()
        plain = [one for one in trained if not one.source.startswith("general")]
        for one in plain:
            users[one.user or ""] += one.trained
        named = {user for user in users if user}
        limit = VOICE_SHARE * sum(one.trained for one in plain)
        assert len(named) < MIN_VOICES or all(users[user] <= limit + 1e-6 for user in named)


def test_the_same_choice_for_rows_that_only_moved() -> None:
    found = rows(200, user="ada")
    moved = [replace(one, numbers=(one.numbers[0] + 1,)) for one in found]
    wishes = ChoiceSettings(known=ids(found[:150]), budget_tokens=9000)
    assert choose_rows(found, wishes) == choose_rows(moved, wishes)

"""Rows that were judged, from their lines to the snapshot: what is learned from each, what is set aside, and why."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig, LearnConfig, parse_config
from hivetune.data.prepare.prepare import check, prepare
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.snapshot import Snapshot
from hivetune.errors import DataRefused

ALL = ["sft", "corrections", "pairs", "failures"]
GOOD, BAD = "The invoice is on the second page of your account.", "I am only a model and I do not know anything at all."
ASKED = "Where do I find my last invoice?"
USER = {"role": "user", "content": ASKED}
BETTER, WORSE = {"role": "assistant", "content": GOOD}, {"role": "assistant", "content": BAD}
WHOLE = {"chosen": [USER, BETTER], "rejected": [USER, WORSE]}
SHAREGPT = {"chosen": {"from": "gpt", "value": GOOD}, "rejected": {"from": "gpt", "value": BAD}}


def read(row: Mapping[str, Any]) -> Any:
    return read_example(RawRow("rows.jsonl:1", json.dumps(row).encode()), {}, pairs=True).example


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]},
        {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
        WHOLE,
        {"prompt": ASKED, **WHOLE, "messages": [USER, BETTER]},
        {"prompt": ASKED, **WHOLE, "score_chosen": 8.5, "score_rejected": 2},
        {"instruction": ASKED, "input": "", "chosen": GOOD, "rejected": BAD},
        {"conversations": [{"from": "human", "value": ASKED}], **SHAREGPT},
        {"messages": [{"sender": "human", "text": ASKED}], "chosen": {"sender": "AI", "text": GOOD}, "rejected": WORSE},
    ],
    ids=["texts", "turns", "turns and texts", "whole", "ultrafeedback", "scores", "alpaca", "sharegpt", "senders"],
)
def test_pairs_of_every_layout(row: dict[str, Any]) -> None:
    example = read(row)
    assert (example.lesson, example.messages[-1].content, example.worse.content) == ("pair", GOOD, BAD)
    assert [m.content for m in example.messages[:-1]] == [ASKED]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": ASKED, "chosen": GOOD, "rejected": GOOD}, "pair-differs"),
        ({"chosen": [USER, BETTER], "rejected": [{**USER, "content": "Another?"}, WORSE]}, "pair-differs"),
        ({"prompt": ASKED, "chosen": [USER], "rejected": [WORSE]}, "empty-turn"),
    ],
)
def test_pairs_that_are_none(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused) as refused:
        read(row)
    assert refused.value.reason == reason


def test_a_correction_takes_the_answers_place() -> None:
    example = read({"prompt": ASKED, "completion": BAD, "correction": GOOD, "success": False})
    assert (example.lesson, example.messages[-1].content, example.worse.content) == ("correction", GOOD, BAD)
    assert example.success is None  # it was said of the answer before


def test_a_correction_of_the_gateway() -> None:
    earlier = [{"role": "user", "content": "Hello there?"}, {"role": "assistant", "content": "How can I help?"}]
    row = {"messages": [*earlier, USER, BETTER], "rejected_answer": WORSE, "feedback": 1}
    example = read(row)
    assert (example.lesson, example.worse.content) == ("correction", BAD)
    assert [m.weight for m in example.messages if m.role == "assistant"] == [0.0, 1.0]  # only what was judged


@pytest.mark.parametrize("success", [False, "false", "False", 0, "no"])
def test_false_is_false(success: object) -> None:
    assert read({"prompt": ASKED, "completion": BAD, "success": success}).lesson == "failure"


def words(number: int, kind: str) -> str:
    """Ten words that are nobody else's."""
    return " ".join(f"{kind}{number}{letter}" for letter in "abcdefghij")


def good(number: int, **about: Any) -> dict[str, Any]:
    return {"prompt": words(number, "q"), "completion": words(number, "a"), **about}


def pair(number: int, **about: Any) -> dict[str, Any]:
    return {"prompt": words(number, "q"), "chosen": words(number, "a"), "rejected": words(number, "b"), **about}


def report(path: Path, use: list[str] = ALL, **learn: Any) -> dict[str, Any]:
    data = DataConfig(path=str(path), validation=0, test=0, near_duplicates=0)
    return check(data, learn=LearnConfig(use=use, **learn)).document


def test_all_rows_negative_are_refused(write_rows: Callable[..., Path]) -> None:
    path = write_rows([good(n, success=False) for n in range(20)])
    with pytest.raises(DataRefused, match="none of the 20 rows is usable"):
        check(DataConfig(path=str(path)), learn=LearnConfig(use=ALL)).refuse(0.2)


def test_contradictory_labels_are_learned_in_neither_way(write_rows: Callable[..., Path]) -> None:
    rows = [good(0, feedback="up"), good(0, feedback="down"), good(1), good(2, success=False)]
    rows += [pair(3), pair(3, chosen=words(3, "b"), rejected=words(3, "a"))]
    document = report(write_rows(rows))
    assert document["set_aside"] == {"contradictory": 4, "for-lessons": 1}
    assert document["usable"] == 1 and document["learn"]["failures"] == 1 and document["learn"]["pairs"] == 0


def test_a_thousand_thumbs_of_one_user_are_a_hundred(write_rows: Callable[..., Path]) -> None:
    rows = [good(n, feedback="down", user="one") for n in range(1_000)]
    rows += [good(n, feedback="down", user=f"u{n}") for n in range(1_000, 1_040)] + [good(2_000)]
    document = report(write_rows(rows))
    assert document["set_aside"] == {"for-lessons": 140, "quota": 900}
    assert document["learn"]["failures"] == 140


def test_a_quota_counts_the_token_and_not_the_name_that_a_request_declares(write_rows: Callable[..., Path]) -> None:
    """300 wrong rows under 300 invented names went in."""
    rows = [good(n, feedback="down", user=f"u{n}", answered_by="a@1", client="laptop") for n in range(300)]
    rows += [good(n, feedback="down", user=f"u{n}", answered_by="a@1", client="desk") for n in range(300, 350)]
    rows += [good(n, feedback="down", user=f"u{n}", client="of another data set") for n in range(400, 520)]
    rows += [good(999)]
    document = report(write_rows(rows))
    assert document["set_aside"] == {"for-lessons": 270, "quota": 200}


def test_what_is_not_named_is_told_and_not_learned(write_rows: Callable[..., Path]) -> None:
    rows = [good(0), good(1, success=False), good(2, feedback="down"), good(3, success=False)]
    rows += [pair(4), good(5, correction=words(5, "c"))]
    document = report(write_rows(rows), ["sft", "corrections"])
    assert document["set_aside"] == {"failed": 3}
    assert document["rejected"] == {"preference-row": 1} and document["usable"] == 2
    assert document["learn"]["not_used"] == {"pairs": 1, "failures": 3} and document["learn"]["corrections"] == 1


def test_a_small_edit_is_a_correction_only(write_rows: Callable[..., Path]) -> None:
    answer = " ".join(words(n, "a") for n in range(3))
    rows = [{"prompt": "q", "chosen": answer, "rejected": answer.replace("a1c", "other")}]
    document = report(write_rows(rows))
    assert document["changed"] == {"worse-left-out": 1} and document["usable"] == 1 and document["learn"]["pairs"] == 0


def config(path: Path, use: list[str] = ALL, **data: Any) -> Any:
    settings = {"path": str(path), "validation": 0, "test": 0, "near_duplicates": 0, **data}
    return parse_config({"model": "tiny", "data": settings, "learn": {"use": use}})


def text(snapshot: Snapshot, row: int) -> str:
    return snapshot.info(row).messages[-1].content


def test_the_snapshot_links_each_bad_answer_with_the_better_one(write_rows: Callable[..., Path], chatml: Path) -> None:
    tried = {"prompt": words(1, "q"), "session": "s"}
    rows = [
        good(0),
        {**tried, "completion": words(1, "b"), "success": False, "timestamp": 100},
        {**tried, "completion": words(1, "a"), "success": True, "timestamp": 200},  # the failure stays one by itself
        pair(2),
        good(3, completion=words(3, "b"), correction=words(3, "a")),
        good(4, completion=words(4, "b"), feedback="down"),
        good(5),  # the pair below says the same of it
        pair(5),
    ]
    snapshot = prepare(config(write_rows(rows)), chatml)
    found = {
        (one.lesson, text(snapshot, one.row), None if one.better is None else text(snapshot, one.better))
        for one in snapshot.bad_rows()
    }
    assert found == {
        ("failure", words(1, "b"), None),
        ("pair", words(2, "b"), words(2, "a")),
        ("correction", words(3, "b"), words(3, "a")),
        ("failure", words(4, "b"), None),
        ("pair", words(5, "b"), words(5, "a")),
    }
    accounting = snapshot.manifest["accounting"]
    assert (accounting["rows_in"], accounting["usable"], accounting["duplicates"]) == (8, 5, 1)
    assert accounting["set_aside"] == {"for-lessons": 2}
    assert snapshot.rows("train") == [n for n in range(snapshot.num_rows) if not text(snapshot, n).startswith("b")]
    assert {text(snapshot, row) for row in snapshot.good_rows("train", 1)} == {words(n, "a") for n in (1, 2, 3)}
    assert all(one.trained == snapshot.num_trained(one.row) > 0 for one in snapshot.bad_rows())
    assert sorted(row for one in snapshot.pool() for row in one.numbers) == snapshot.rows("train")


def test_a_pair_never_straddles_a_split(write_rows: Callable[..., Path], chatml: Path) -> None:
    """Failures are tied to good answers by their session, worse answers go where the better one goes."""
    rows: list[dict[str, Any]] = []
    for n in range(120):
        tried = {"prompt": words(1000 + n, "q"), "session": f"s{n}"}
        rows += [
            pair(n),
            {**tried, "completion": words(n, "x"), "success": False},
            {**tried, "completion": words(n, "y")},
        ]
    snapshot = prepare(config(write_rows(rows), validation=0.2, test=0.2), chatml)
    train = set(snapshot.rows("train"))
    bad = snapshot.bad_rows()
    assert bad and {one.better for one in bad if one.lesson == "pair"} <= train and not {one.row for one in bad} & train
    assert snapshot.manifest["accounting"]["set_aside"]["not-learned"] > 10
    assert len([one for one in bad if one.lesson == "failure"]) > 40


def test_without_lessons_the_snapshot_holds_no_bad_answer(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows([good(0), good(1, success=False), good(2, correction=words(2, "c"))])
    snapshot = prepare(config(path, ["sft", "corrections"]), chatml)
    assert snapshot.num_bad == 0 and snapshot.bad_rows() == [] and snapshot.num_rows == 2


def test_a_secret_in_a_worse_answer_is_redacted(write_rows: Callable[..., Path], chatml: Path) -> None:
    secret = "my key is AKIAIOSFODNN7EXAMPLQ and nothing else is to be said here"
    snapshot = prepare(config(write_rows([pair(0, rejected=secret), good(1)])), chatml)
    (bad,) = snapshot.bad_rows()
    assert "AKIA" not in text(snapshot, bad.row) and "[SECRET" in text(snapshot, bad.row)


def test_what_is_left_out_later_is_compared_with_nothing(write_rows: Callable[..., Path], chatml: Path) -> None:
    """A better answer that another row calls bad, or that the balance of agents leaves out."""
    tried = {"prompt": words(1, "q"), "session": "s"}
    rows = [
        {**tried, "completion": words(1, "b"), "success": False, "agent": "one"},
        {**tried, "completion": words(1, "a"), "agent": "one"},
        {**tried, "completion": words(1, "a"), "feedback": "down", "agent": "one"},
        *(pair(n, agent="one") for n in range(2, 9)),
        good(20, agent="two"),
    ]
    snapshot = prepare(config(write_rows(rows), balance="agent"), chatml)
    bad = snapshot.bad_rows()
    assert snapshot.num_bad == len(bad) == 2  # the failure alone, and the worse one of the pair that was drawn
    assert {one.lesson for one in bad} == {"failure", "pair"}
    set_aside = snapshot.manifest["accounting"]["set_aside"]
    assert set_aside == {"not-drawn": 6, "contradictory": 2, "for-lessons": 1}


@pytest.mark.parametrize("beside", [{"user_feedback": "up"}, {"error": None}, {"error": "TimeoutError: upstream"}])
def test_a_column_of_errors_or_feedback_that_says_nothing_bad(beside: dict[str, Any]) -> None:
    assert read({"messages": [USER, BETTER], **beside}).lesson == "sft"

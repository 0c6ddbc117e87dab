"""Columns that hold a label in every row of a file, and a row in which the label has a few words more."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from data.prepare.faults import good_row

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.per_file import are_prompts, label_columns, pair_columns
from hivetune.data.rows.read import read_example

ASKED, ANSWERED = "Where is the depot of the town?", "It is in Bonn."
SHORT = ["maps", "mail", "old maps", "trains", "mail"]
LONG = "maps of the post"


def rows(extra: str, *, first: bool = True) -> list[dict[str, Any]]:
    return [
        {"theme_of_it": label, "question": ASKED, "answer": ANSWERED}
        if first
        else {"question": ASKED, "answer": "7", "theme_of_it": label}
        for label in [*SHORT, extra]
    ]


@pytest.mark.parametrize("first", [True, False])
def test_a_label_is_a_label_in_every_row(first: bool, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows(LONG, first=first))))
    assert [read_example(raw, {}).example.messages[0].content for raw in rows_of_files(str(file))] == [ASKED] * 6


def test_a_text_is_no_label(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    text = "The town has two depots, and both of them are closed in winter."
    file.write_text("\n".join(map(json.dumps, rows(text))))
    with pytest.raises(RowRefused, match="unexplained-column"):
        read_example(list(rows_of_files(str(file)))[-1], {})


def test_names_that_say_what_they_hold_are_no_labels() -> None:
    some = [{"context": "a town", "diagnosis": "flu", "emotion": "joy", "legal_question": "why", "app": "maps"}] * 6
    assert label_columns(some) == ("app",)
    assert label_columns(some[:3]) == ()


def messages_of(rows: list[dict[str, Any]], tmp_path: Path) -> list[list[str]]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return [[one.content for one in read_example(raw, {}).example.messages] for raw in rows_of_files(str(file))]


def test_what_is_learned_is_decided_for_the_file(tmp_path: Path) -> None:
    solved = [
        {"problem": f"How much is {n} and {n}?", "solution": f"Both together are {2 * n}.", "answer": str(2 * n)}
        for n in range(2, 8)
    ]
    padded = {"problem": "How much is ten and ten?", "solution": "Both together are 20.", "answer": "020"}
    assert messages_of([*solved, padded], tmp_path)[-1] == [padded["problem"], padded["solution"]]


def test_a_row_with_one_more_text_is_still_asked_about(tmp_path: Path) -> None:
    solved = [
        {"problem": f"How much is {n} and {n}?", "solution": f"Both together are {2 * n}.", "answer": str(2 * n)}
        for n in range(2, 8)
    ]
    other = {"held_first": "Somebody had told the pupils something else by then.", **solved[0], "answer": "020"}
    with pytest.raises(RowRefused, match="unexplained-column"):
        messages_of([*solved, other], tmp_path)


def test_rows_that_differ_decide_nothing() -> None:
    one = {"problem": "How much is two and two?", "solution": "Both together are 4.", "answer": "4"}
    two = {"problem": "How much is two and two?", "answer": "4"}
    assert pair_columns([one] * 6) == ("problem", "solution", "", "answer")
    assert pair_columns([one, two] * 6) == ()
    assert pair_columns([{"messages": [{"role": "user", "content": "a"}]}] * 6) == ()


SHOWN = "Question: Which of these is a lake?\nOptions: the Rhine, the Chiemsee\n\nAnswer: the Chiemsee"


def test_a_prompt_that_shows_an_answer_is_no_talk_among_prompts(tmp_path: Path) -> None:
    prompts = [{"prompt": f"How far is it from Bonn to depot {n}?", "id": n, "split": "test"} for n in range(5)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, [*prompts, {"prompt": SHOWN, "id": 5, "split": "test"}])))
    with pytest.raises(RowRefused, match="no-answer"):
        read_example(list(rows_of_files(str(file)))[-1], {})


def test_a_prompt_that_shows_an_answer_is_read_where_all_do(tmp_path: Path) -> None:
    shown = [{"prompt": SHOWN.replace("Chiemsee", f"Chiemsee {n}"), "id": n} for n in range(6)]
    assert not are_prompts(shown)
    assert [said[-1] for said in messages_of(shown, tmp_path)] == [f"the Chiemsee {n}" for n in range(6)]


def outcomes(answers: list[str], tmp_path: Path, *more: dict[str, Any]) -> list[str]:
    """Whether each answer is read or why it is not. `more`: what else stands in its row."""
    rows = [{"prompt": f"{ASKED} ({n})", "completion": answer} for n, answer in enumerate(answers)]
    return outcomes_of([row | (more[n] if more else {}) for n, row in enumerate(rows)], tmp_path)


def outcomes_of(rows: Sequence[Mapping[str, Any]], tmp_path: Path) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = []
    for raw in rows_of_files(str(file)):
        try:
            read_example(raw, {})
            found.append("read")
        except RowRefused as refused:
            found.append(refused.reason)
    return found


STORY = "The depot stands behind the hill, and whoever comes by train sees it late. " * 20


def test_answers_that_were_cut_at_one_length(tmp_path: Path) -> None:
    """Three points and an entity that was written out make them a few characters longer or shorter."""
    cut = [STORY[start : start + 500].strip() for start in (0, 20, 40, 60)]
    whole = [f"{STORY[:length]}." for length in range(150, 350, 40)]
    answers = [cut[0], f"{cut[1]} ...", ANSWERED, STORY[:450], cut[2], cut[3], STORY[:499] + "."]
    assert [text[-1:].isalpha() for text in cut] == [True] * 4
    told = ["cut-off-answer"] * 2 + ["read"] * 2 + ["cut-off-answer"] * 2 + ["read"]
    assert outcomes([*answers, *whole], tmp_path) == told + ["read"] * 5
    assert outcomes(answers, tmp_path) == ["read"] * 7, "too few answers"
    assert outcomes([*[ANSWERED] * 30, *answers, *whole], tmp_path) == ["read"] * 42, "its first rows do not tell"
    assert outcomes([*answers, *whole, STORY[:900] + "."], tmp_path) == ["read"] * 13, "one is longer"


def test_ends_say_nothing_where_no_answer_ends_as_a_sentence(tmp_path: Path) -> None:
    """Words drawn by chance: four of the longest were as long as each other, and nine good rows were refused."""
    longest = [STORY[start : start + 500].strip() for start in (0, 20, 40, 60)]
    shorter = [STORY[: 210 + 20 * n].strip() for n in range(12)]
    assert sum(text[-1].isalpha() for text in shorter) > 6
    assert outcomes([*longest, *shorter], tmp_path) == ["read"] * 16


def test_texts_of_one_length_that_are_whole(tmp_path: Path) -> None:
    whole = [f"{STORY[start : start + 400].strip()}." for start in range(0, 240, 20)]
    codes = [f"{n}".rjust(400, "A") for n in range(12)]
    short = [STORY[start : start + 100].strip() for start in range(0, 240, 20)]
    for answers in (whole, codes, short, [STORY[:500].strip()] * 12):
        assert outcomes(answers, tmp_path) == ["read"] * len(answers)


def test_nothing_is_decided_by_chance(tmp_path: Path) -> None:
    """Good rows of five layouts, words drawn from Python's documentation: the files differ, their outcomes do not."""
    for seed in range(60):
        rng = random.Random(seed)
        rows = [good_row(rng) for _ in range(rng.choice([4, 8, 20, 60]))]
        assert set(outcomes_of(rows, tmp_path)) == {"read"}, seed


INSIDE = "The depot stands behind the hill and"


def test_an_answer_of_as_many_tokens_as_a_limit_was_cut(tmp_path: Path) -> None:
    counts = [{"completion_tokens": count} for count in (40, 128, 128, 77)]
    assert outcomes([ANSWERED, INSIDE, ANSWERED, INSIDE], tmp_path, *counts) == [
        "read",
        "cut-off-answer",
        *["read"] * 2,
    ]
    usage = [{"usage": count} for count in counts]
    assert outcomes([ANSWERED, INSIDE, ANSWERED, INSIDE], tmp_path, *usage)[1] == "cut-off-answer"


def test_a_round_number_of_tokens_is_no_limit(tmp_path: Path) -> None:
    """Of all numbers 2 % are round: 64 tokens are a limit only if no other answer has more of them."""
    counts = [{"tokens": count} for count in (64, 200, "9" * 5000, 130)]
    assert outcomes([INSIDE, ANSWERED, ANSWERED, INSIDE], tmp_path, *counts) == ["read"] * 4
    ended = [{"tokens": 64, "finish_reason": "stop"}, {"tokens": 64, "finish_reason": ""}]
    assert outcomes([INSIDE, INSIDE], tmp_path, *ended) == ["read", "cut-off-answer"]

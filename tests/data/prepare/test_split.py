"""A row's side is its own: it never depends on other rows, and what belongs together stays together."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data.conftest import chat
from data.prepare.faults import WORDS

from hivetune.config import DataConfig, parse_config
from hivetune.data.prepare.prepare import check, prepare
from hivetune.records import Split
from hivetune.train.plan.run import checked_rows


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


def test_sessions_are_never_divided(write_rows: Callable[..., Path], chatml: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}", session=f"g{i % 30}") for i in range(300)]
    found = sides(write_rows(rows), chatml)
    for group in range(30):
        assert len({found[f"answer {i}"] for i in range(group, 300, 30)}) == 1


def wordy(rng: random.Random, number: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(number)]


@pytest.mark.parametrize("seed", range(6))
def test_a_group_is_one_draw_and_shares_hold_by_rows(seed: int, write_rows: Callable[..., Path], chatml: Path) -> None:
    """200 single questions, and 20 that ten rows ask in nearly the same words: the commonest are trained, too."""
    rng = random.Random(seed)
    rows = [chat(" ".join(wordy(rng, 12)), f"single {i}") for i in range(200)]
    for group in range(20):
        asked, answer = wordy(rng, 30), " ".join(wordy(rng, 20))
        rows += [chat(" ".join([*asked, f"B-{rng.randrange(10**6)}"]), f"{answer} {group} {i}") for i in range(10)]
    rng.shuffle(rows)
    path = write_rows(rows)
    snapshot = prepare(parse_config({"model": "m", "data": {"path": str(path)}}), chatml)
    infos = [snapshot.info(row) for row in range(snapshot.num_rows)]
    counts = Counter(info.split for info in infos)
    assert all(counts[split] / 400 <= 1.5 * 0.1 <= 1.5**2 * counts[split] / 400 for split in ("validation", "test"))
    answers: dict[str, set[Split]] = {}
    for info in infos:
        answers.setdefault(info.messages[-1].content.rpartition(" ")[0], set()).add(info.split)
    del answers["single"]
    assert len(answers) == 20 and all(len(found) == 1 for found in answers.values())
    assert sum(found == {"train"} for found in answers.values()) > 10


def test_a_share_that_is_missed_is_said(write_rows: Callable[..., Path], chatml: Path) -> None:
    """In the report and in the plan; `init` writes it into the config (tests/cli/test_machine.py)."""
    rows = [chat(f"question {i}", f"answer {i}", session=f"s{i % 5}") for i in range(100)]
    document = check(DataConfig(path=str(write_rows(rows))), model_folder=chatml).document
    missed = [split for split in ("test", "validation") if not 100 / 15 <= document["splits"][split] <= 15]
    assert missed and sorted(sentence.split()[0] for sentence in document["groups"]["missed"]) == missed
    assert all(sentence in checked_rows(document).words for sentence in document["groups"]["missed"])


def test_one_long_conversation_is_said_to_be_trained_alone(write_rows: Callable[..., Path], chatml: Path) -> None:
    """Its parts are one row, so no part of it is held out."""
    turns = [turn for i in range(40) for turn in chat(f"question {i} " * 9, f"answer {i} " * 9)["messages"]]
    path = write_rows([{"messages": turns}])
    document = check(DataConfig(path=str(path), on_overlong="split"), model_folder=chatml, max_length=400).document
    [said] = document["groups"]["missed"]
    assert document["changed"] == {"shortened": 1} and said.startswith("none of 1 rows is held out")


def test_few_large_groups_do_not_fill_the_held_out_splits(write_rows: Callable[..., Path]) -> None:
    """60 rows of six templates: 35 were tested and 13 trained."""
    rng = random.Random(1)
    templates = [wordy(rng, 20) for _ in range(6)]
    rows = [chat(" ".join([*templates[i % 6], str(i)]), f"answer {i}") for i in range(60)]
    splits = check(DataConfig(path=str(write_rows(rows)))).document["splits"]
    assert splits["train"] >= 40 and splits["test"] <= 15 and splits["validation"] <= 15


def test_what_is_asked_in_two_sessions_ties_them(write_rows: Callable[..., Path], chatml: Path) -> None:
    """590 questions, each asked in two sessions and answered in two ways: never on both sides."""
    rows = [chat(f"question {i}", f"answer {i} {n}", session=f"s{n}-{i}") for n in range(2) for i in range(590)]
    found = sides(write_rows(rows), chatml)
    assert all(found[f"answer {i} 0"] == found[f"answer {i} 1"] for i in range(590))
    assert Counter(found.values())["test"] > 60


def test_rows_that_say_nearly_the_same_are_on_one_side(write_rows: Callable[..., Path], chatml: Path) -> None:
    """200 rows with a copy that has 2 of 60 words changed in question and answer: not equal, but no evidence either."""
    rng = random.Random(3)
    rows = []
    for i in range(200):
        asked, answer = ([rng.choice(WORDS) for _ in range(60)] for _ in range(2))
        rows.append(chat(" ".join(asked), " ".join([*answer, f"one{i}"]), session=f"a{i}"))
        for place in (15, 40):
            asked[place] = answer[place] = "changed"
        rows.append(chat(" ".join(asked), " ".join([*answer, f"two{i}"]), session=f"b{i}"))
    found = {
        answer.split()[-1]: split for answer, split in sides(write_rows(rows), chatml, near_duplicates=0.9).items()
    }
    assert len(found) == 400
    assert sum(found[f"one{i}"] != found[f"two{i}"] for i in range(200)) == 0


def test_copies_under_new_sessions_move_no_row(write_rows: Callable[..., Path], chatml: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}", session=f"s{i}") for i in range(400)]
    before = sides(write_rows(rows, "old.jsonl"), chatml)
    held_out = [row for row in rows if before[row["messages"][1]["content"]] != "train"]
    for name in ("own", "shared"):
        copies = [{**row, "session": f"new {i}" if name == "own" else "new"} for i, row in enumerate(held_out)]
        assert sides(write_rows([*rows, *copies], f"{name}.jsonl"), chatml) == before


def test_newer_rows_that_tie_old_groups_follow_the_older_one(write_rows: Callable[..., Path], chatml: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}", session=f"s{i}", time=1_700_000_000 + i) for i in range(100)]
    before = sides(write_rows(rows, "old.jsonl"), chatml)
    newer = [chat(f"question {i}", f"new answer {i}", session=f"n{i}", time=1_800_000_000 + i) for i in range(100)]
    after = sides(write_rows([*newer, *rows], "new.jsonl"), chatml)
    assert {answer: after[answer] for answer in before} == before
    assert all(after[f"new answer {i}"] == before[f"answer {i}"] for i in range(100))


def test_what_is_too_large_for_one_side(write_rows: Callable[..., Path], chatml: Path) -> None:
    """One session with half of the rows is divided, so that something can be held out."""
    rows = [chat(f"question {i}", f"answer {i}", session="loud" if i % 2 else f"s{i}") for i in range(400)]
    path = write_rows(rows)
    found = sides(path, chatml)
    assert Counter(found[f"answer {i}"] for i in range(1, 400, 2))["train"] < 200
    document = check(DataConfig(path=str(path))).document
    held_out = [found[f"answer {i}"] != "train" for i in range(400)]
    told = (
        f"{sum(held_out[1::2])} of {sum(held_out)} held-out rows have the session or nearly the question of a trained"
    )
    assert document["groups"]["largest"] <= 80 and any(told in sentence for sentence in document["groups"]["missed"])


def test_near_questions_on_both_sides_are_counted(write_rows: Callable[..., Path]) -> None:
    asked = "how do I open the box that stands in the third room of the old house on hill number"
    rows = [chat(f"{asked} {i}", f"answer {i}", session=f"s{i}") for i in range(200)]
    groups = check(DataConfig(path=str(write_rows(rows)))).document["groups"]
    assert groups["largest"] <= 40 and "nearly the question of a trained row" in groups["missed"][-1]


def test_one_question_for_everything_is_trained(write_rows: Callable[..., Path]) -> None:
    rows = [chat("Go on.", f"answer {i}", session=f"s{i}") for i in range(50)]
    document = check(DataConfig(path=str(write_rows(rows)))).document
    assert document["splits"] == {"train": 50, "validation": 0, "test": 0}
    assert document["groups"]["largest"] == 50


def test_one_question_about_many_documents_is_divided_by_document(
    write_rows: Callable[..., Path], chatml: Path
) -> None:
    """The document stands in the system prompt, each is asked about twice; or one greeting opens all conversations."""
    documents = [chat("What is this about?", f"answer {i}", f"Document {i % 150}") for i in range(300)]
    found = sides(write_rows(documents, "documents.jsonl"), chatml)
    assert all(found[f"answer {i}"] == found[f"answer {i + 150}"] for i in range(150))
    assert 10 < Counter(found.values())["test"] < 60
    greeting = chat("Hello", "Hi!")["messages"]
    greeted = [{"messages": [*greeting, *chat(f"question {i}", f"answer {i}")["messages"]]} for i in range(300)]
    assert 10 < Counter(sides(write_rows(greeted, "greeted.jsonl"), chatml).values())["test"] < 60


def test_a_row_that_names_no_agent_sets_no_balance(write_rows: Callable[..., Path]) -> None:
    """One such row left one row of each agent to train."""
    rows = [chat(f"what is {i}?", f"it is {i}", **({"agent": "ab"[i % 2]} if i else {})) for i in range(200)]
    report = check(DataConfig(path=str(write_rows(rows)), balance="agent")).document
    trained = {agent: splits.get("train", 0) for agent, splits in report["agents"].items()}
    assert trained["a"] == trained["b"] > 60
    unnamed = [chat(f"what is {i}?", f"it is {i}") for i in range(50)]
    report = check(DataConfig(path=str(write_rows(unnamed)), balance="agent")).document
    assert report["usable"] == 50


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
    assert snapshot.manifest["accounting"]["set_aside"] == {"not-drawn": 400 - snapshot.num_rows}


def test_so_many_rows_are_trained_as_are_allowed(write_rows: Callable[..., Path]) -> None:
    path = str(write_rows([chat(f"question {n} about bees", f"answer {n}") for n in range(100)]))
    whole, some = (check(DataConfig(path=path, max_rows=rows)).document for rows in (None, 10))
    held = {split: whole["splits"][split] for split in ("validation", "test")}
    assert some["splits"] == {"train": 10, **held}
    assert some["set_aside"] == {"not-drawn": 90 - sum(held.values())}

"""Duplicates: exact ones by content, near ones as MinHash over word triples estimates them."""

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from data.conftest import chat, written
from data.prepare import faults

from hivetune.config import DataConfig
from hivetune.data.checks.lessons import asked_alike, lesson_of, taught_alike
from hivetune.data.prepare.near import Groups, Pair, dropped, near_pairs, sketch
from hivetune.data.prepare.prepare import check
from hivetune.data.read import content_id
from hivetune.records import Message


def said(asked: str, answer: str) -> tuple[Message, ...]:
    return (Message("system", "the same for all rows"), Message("user", asked), Message("assistant", answer))


def pairs_of(conversations: Sequence[Sequence[Message]], threshold: float = 0.85) -> list[Pair]:
    """The pairs found among rows, the best first."""
    lessons = [lesson_of(one) for one in conversations]
    sketches = io.BytesIO(b"".join(sketch(lesson, threshold) for lesson in lessons))
    return list(near_pairs(sketches, threshold, range(len(lessons)), lessons.__getitem__))


def copies(*conversations: Sequence[Message]) -> list[tuple[int, int]]:
    """The rows that are dropped as copies, each with the row that stays."""
    found = sorted(pair for pair in pairs_of(conversations) if pair.share is not None)
    return [(pair.row, pair.other) for pair in dropped(found)]


PLAIN_WORDS = [word for word in faults.WORDS if word.isalpha()]  # a number that differs is a lesson of its own


def words(rng: random.Random, number: int) -> list[str]:
    return [rng.choice(PLAIN_WORDS) for _ in range(number)]


def test_near_copies_are_those_above_the_threshold() -> None:
    """Pairs of 100 words with 0 to 14 of them changed, each alone: pairs with the same question are alike in any case,
    and copies if so many words of the answer are equal, too. Of pairs at the threshold one in a hundred may be missed.
    """
    rng = random.Random(5)
    conversations, truth = [], {}
    for pair in range(150):
        text = words(rng, 100)
        asked = words(rng, 40)
        conversations.append(said(" ".join(asked), " ".join(text)))
        for place in rng.sample(range(0, 100, 6), pair % 15):
            text[place] = "".join(rng.choice("abcdefgh") for _ in range(12))
        conversations.append(said(" ".join(asked), " ".join(text)))
        one, other = map(lesson_of, conversations[-2:])
        truth[2 * pair, 2 * pair + 1] = min(asked_alike(one, other) or 0, taught_alike(one, other) or 0)
    found = {(pair.other, pair.row): pair.share for pair in pairs_of(conversations)}
    assert found == {pair: share if share >= 0.85 else None for pair, share in truth.items()}


def test_nearly_equal_questions_are_connected_as_when_each_is_compared_with_each() -> None:
    """300 pairs of questions that share 70.5 % of their triples, just above the limit, and 20 questions of ten rows."""
    rng = random.Random(9)
    groups = []
    for size, edits in *((2, 6),) * 300, *((10, 2),) * 20:
        asked = words(rng, 106)
        copies_of = [[*asked] for _ in range(size)]
        for copy in copies_of[1:]:
            for place in rng.sample(range(3, 103, 7), edits):
                copy[place] = "".join(rng.choice("abcdefgh") for _ in range(12))
        groups.append([said(" ".join(copy), " ".join(words(rng, 20))) for copy in copies_of])
    connected = Groups(sum(map(len, groups)))
    for pair in pairs_of([row for group in groups for row in group]):
        connected.join(pair.row, pair.other)
    starts = [0, *accumulate(map(len, groups))]
    apart = [start for start, end in pairwise(starts) if len({connected.root(row) for row in range(start, end)}) > 1]
    assert len(set(connected.closed())) >= len(groups)  # and nothing else is
    assert len(apart) <= 0.03 * len(groups)


INSTRUCTION = " ".join(
    f"Rule {word}: read the review below with care, weigh what it praises and what it blames, and then say in one word"
    f" how the guest felt about the {word}."
    for word in ("food", "room", "staff", "price", "place")
)


@pytest.mark.parametrize("rows", [2, 5, 12, 40])
def test_few_questions_behind_one_instruction_are_different_questions_too(rows: int) -> None:
    rng = random.Random(rows)
    asked = [f"{INSTRUCTION} {' '.join(words(rng, 8))}" for _ in range(rows)]
    assert copies(*(said(one, "positive") for one in asked)) == []


def test_one_question_with_different_calls_is_kept() -> None:
    cities = [f"{one}{other}" for one in "ABCDEFGHIJ" for other in "abcdefghij"]
    rows = [
        (
            Message("user", "Find the weather of tomorrow for the city that the customer named above. " * 5),
            Message(
                "assistant",
                "I look that up for you at once, one moment, please, it does not take long. " * 5,
                tool_calls=({"type": "function", "function": {"name": "weather", "arguments": {"city": city}}},),
            ),
        )
        for city in cities
    ]
    assert copies(*rows) == []
    again = (rows[0][0], replace(rows[0][1], content=rows[0][1].content.replace("moment", "minute", 1)))
    assert copies(*rows, again) == [(100, 0)]


def test_one_question_again_and_again_with_nearly_the_same_answer_is_one_row() -> None:
    """More rows than a crowd has: what all of them share is the row itself."""
    rng = random.Random(3)
    answer = words(rng, 60)
    rows = []
    for number in range(50):
        varied = [*answer]
        varied[number] = rng.choice(("indeed", "perhaps", "mostly"))
        rows.append(said("How is the service doing right now?", " ".join(varied)))
    assert {row for row, _ in copies(*rows)} == set(range(1, 50))


def test_another_number_is_another_lesson() -> None:
    rng = random.Random(4)
    text = " ".join(words(rng, 80))
    assert copies(said("What do I owe?", f"{text} 120 euros"), said("What do I owe?", f"{text} 130 euros")) == []


def test_the_next_answer_of_a_history_is_another_lesson() -> None:
    """20 turns that are all but equal: the last answer is new."""
    rng = random.Random(6)
    turns = [said(" ".join(words(rng, 12)), " ".join(words(rng, 25)))[1:] for _ in range(21)]
    histories = [tuple(message for turn in turns[:end] for message in turn) for end in (19, 20, 21)]
    assert copies(*histories) == []


def test_the_order_of_the_rows_does_not_matter() -> None:
    rng = random.Random(8)
    texts = [(words(rng, 20), words(rng, 30)) for _ in range(60)]
    for asked, answer in texts[:40]:
        changed = [*answer]
        changed[rng.randrange(30)] = "other"
        texts.append((asked, changed))
    texts += [([*INSTRUCTION.split(), *words(rng, 6)], ["positive"]) for _ in range(60)]
    rows = [said(" ".join(asked), " ".join(answer)) for asked, answer in texts]
    stored = [*range(len(rows))]  # the place of each row among the sketches
    rng.shuffle(stored)
    row_at = sorted(range(len(rows)), key=stored.__getitem__)
    sketches = io.BytesIO(b"".join(sketch(lesson_of(rows[row]), 0.7) for row in row_at))
    assert list(near_pairs(sketches, 0.7, stored, lambda at: lesson_of(rows[row_at[at]]))) == pairs_of(rows, 0.7)


def test_text_without_spaces_is_compared_by_characters() -> None:
    text = "".join(chr(0x4E00 + i * 7 % 900) for i in range(300))
    rows = [said(one, one) for one in (text, text[:150] + "界" + text[151:], text[::-1])]
    assert copies(*rows) == [(1, 0)]


def test_equal_ids_mean_equal_lessons() -> None:
    base = (Message("user", "q"), Message("assistant", "a"))
    others = [
        (Message("user", "q"), Message("assistant", "a", weight=0)),
        (Message("user", "qa"), Message("assistant", "")),
        (Message("system", ""), *base),
        (Message("user", "q"), Message("assistant", "a", tool_calls=({"function": {"name": "f"}},))),
    ]
    ids = {content_id(messages) for messages in (base, *others)}
    assert len(ids) == 5
    assert content_id(base, ({"name": "t"},)) not in ids


def test_duplicates_are_counted_and_shown(write_rows: Callable[..., Path]) -> None:
    rng = random.Random(2)
    words = [rng.choice(faults.WORDS) for _ in range(100)]
    near = [*words[:50], "changed", *words[51:]]
    rows = [
        chat("What is it?", " ".join(words), session="one"),
        {"prompt": "What is it?", "completion": " ".join(words), "session": "two"},
        chat("What is it?", " ".join(near)),
        chat("What is it?", " ".join(words[::-1])),
    ]
    path = write_rows(rows)
    document = check(DataConfig(path=str(path))).document
    assert (document["exact_duplicates"], document["near_duplicates"], document["usable"]) == (1, 1, 2)
    near_copy, exact = written(path)["duplicates"]
    assert (exact["kind"], exact["source"], exact["same_as"]) == ("exact", f"{path}:2", f"{path}:1")
    assert (near_copy["kind"], near_copy["source"], near_copy["same_as"]) == ("near", f"{path}:1", f"{path}:3")
    assert 0.85 < near_copy["share"] < 1
    texts = [near_copy[name][1]["content"] for name in ("messages", "same_as_messages")]
    assert texts == [" ".join(words), " ".join(near)] and "messages" not in exact
    assert check(DataConfig(path=str(path), near_duplicates=0)).usable == 3


def history(turns: int, **more: object) -> dict[str, object]:
    said = [{"role": role, "content": f"{role} {i}"} for i in range(turns) for role in ("user", "assistant")]
    return {"messages": said, **more}


@pytest.mark.parametrize("order", [1, -1])
def test_the_longest_of_a_growing_history_stays(write_rows: Callable[..., Path], order: int) -> None:
    rows = [history(turns) for turns in range(1, 6)][::order]
    path = write_rows(rows)
    document = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert (document["beginnings"], document["duplicates"], document["usable"]) == (4, 4, 1)
    dropped = written(path, near_duplicates=0)["duplicates"]
    assert {e["same_as"].rpartition(":")[2] for e in dropped} == {"5" if order > 0 else "1"}


def test_a_beginning_stays_where_the_longer_row_does_not_train_its_answer(write_rows: Callable[..., Path]) -> None:
    longer = history(2)
    longer["messages"][1]["weight"] = 0  # type: ignore[index]
    assert check(DataConfig(path=str(write_rows([history(1), longer])))).usable == 2
    other = {
        "messages": [
            *history(1)["messages"],
            {"role": "user", "content": "more"},  # type: ignore[misc]
            {"role": "assistant", "content": "no"},
        ]
    }
    assert check(DataConfig(path=str(write_rows([history(2), other])))).usable == 2


def test_of_equal_rows_the_oldest_stays(write_rows: Callable[..., Path]) -> None:
    rows = [chat("What is it?", "A hive.", timestamp=time) for time in (1_700_000_300, 1_700_000_100, 1_700_000_200)]
    path = write_rows(rows)
    assert {(e["source"], e["same_as"]) for e in written(path)["duplicates"]} == {
        (f"{path}:1", f"{path}:2"),
        (f"{path}:3", f"{path}:2"),
    }

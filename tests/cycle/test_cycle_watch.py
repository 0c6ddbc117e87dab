"""The watch after a swap: an equal release is left alone for life, a worse one is noticed, and nothing goes in circles.

Full counts: make proof NAME=cycle-poisons.
"""

import random
from collections.abc import Callable
from contextlib import closing

import pytest

from hivetune.base.database import open_database, transaction
from hivetune.release.registry import Move
from hivetune.serve.gateway.capture import CapturedAnswer, Feedback, store_entries
from hivetune.serve.swap.watch import (
    MIN_BEFORE,
    ReleaseCounts,
    SeenAnswer,
    Service,
    predecessor,
    read_service,
    regression_reason,
)

KINDS = ("errors", "slow", "complaints")
RATES = {"errors": 0.01, "slow": 0.03, "complaints": 0.02, "refused": 0.03}


class Serving:
    """A release with random answers: rates of faults, and lengths around 300 characters."""

    def __init__(self, seed: int, label: str, *, longer: float = 1.0, **rates: float):
        self.random = random.Random(seed)
        self.rates = RATES | rates
        self.longer = longer
        self.counts = ReleaseCounts()
        self.answers: list[SeenAnswer] = []
        self.label = label

    def answer(self, count: int) -> Service:
        for _ in range(count):
            self.counts.answers += 1
            for kind in KINDS:
                setattr(self.counts, kind, getattr(self.counts, kind) + (self.random.random() < self.rates[kind]))
            length = int(self.longer * self.random.lognormvariate(5.7, 0.6))
            self.answers.append(SeenAnswer(length, self.random.random() < self.rates["refused"]))
        return Service(self.label, self.counts, self.answers)


def life(seed: int, answers: int, *, looks: int, **change: float) -> tuple[int, str] | None:
    """Return after how many answers, and why, a release is rolled back that was promoted after 300 answers of
    another."""
    before = Serving(2 * seed, "a@1").answer(300)
    now = Serving(2 * seed + 1, "a@2", **change)
    for look in range(1, looks + 1):
        found = regression_reason(before, now.answer(answers // looks))
        if found:
            return look * (answers // looks), found
    return None


def test_equal_releases_are_left_alone() -> None:
    assert [life(seed, 600, looks=6) for seed in range(15)] == [None] * 15


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"errors": 0.2}, "answers failed"),
        ({"slow": 0.5}, "twice as long a token"),
        ({"complaints": 0.2}, "complained about"),
        ({"refused": 0.3}, "answers refused"),
        ({"longer": 3.0}, "were shorter than"),
        ({"longer": 0.3}, "were shorter than"),
    ],
)
def test_each_way_to_be_worse_is_noticed_with_its_reason(change: dict[str, float], words: str) -> None:
    for seed in range(5):
        found = life(seed, 300, looks=10, **change)
        assert found is not None
        assert words in found[1] and "was usual with a@1" in found[1]


def test_other_questions_do_not_make_a_release_worse() -> None:
    """Longer questions get longer answers, so an equal release that is asked more of them is not worse."""

    def answers(seed: int, long: float, count: int) -> list[SeenAnswer]:
        draw = random.Random(seed)
        asked = [draw.random() < long for _ in range(count)]
        return [
            SeenAnswer(
                int((4 if is_long else 1) * draw.lognormvariate(5.7, 0.6)), draw.random() < 0.03, 5 + 5 * is_long
            )
            for is_long in asked
        ]

    for seed in range(50):
        before = Service("a@1", ReleaseCounts(), answers(2 * seed, 0.3, 400))
        now = Service("a@2", ReleaseCounts(), answers(2 * seed + 1, 0.9, 300))
        assert regression_reason(before, now) == ""
    strange = [SeenAnswer(9000, True, 20)] * 100  # questions of a kind that the one before was never asked
    assert regression_reason(before, Service("a@2", ReleaseCounts(), strange)) == ""


def test_little_is_known_and_nothing_is_said() -> None:
    """Few answers of the earlier release do not say what is usual, and ten of the new one prove nothing."""
    few = Serving(1, "a@1").answer(MIN_BEFORE - 1)
    bad = Serving(2, "a@2", refused=1.0, longer=9.0)
    assert regression_reason(few, bad.answer(100)) == ""
    assert regression_reason(Serving(1, "a@1").answer(300), Serving(2, "a@2", refused=1.0, errors=1.0).answer(10)) == ""


def test_what_the_gateway_captured_and_counted_is_read() -> None:
    text = "I'm sorry, but I can't help with that."
    with closing(open_database()) as database:
        for number, label in enumerate(["a@1"] * 60 + ["a@2"] * 40):
            said = f"answer {number}" if label == "a@1" else text
            entry = CapturedAnswer(
                f"hive-{number}", label, [{"role": "user", "content": f"q{number}"}],
                {"role": "assistant", "content": said}, time=1000.0 + number,
            )  # fmt: skip
            store_entries(database, [entry])
        store_entries(database, [Feedback("hive-99", "a@2", "ada", "down", correction="Do this.")])
        with transaction(database):
            database.execute("INSERT INTO served VALUES ('a@2', 41, 3, 2, 1)")
        before, now = (read_service(database, label, newest=label == "a@1") for label in ("a@1", "a@2"))
    assert [answer.length for answer in before.answers] == [len(f"answer {n}") for n in range(60)]
    assert now.counts == ReleaseCounts(41, 3, 2, 1)
    assert now.answers == [SeenAnswer(len(text), True)] * 40  # the corrected one as it was given
    assert regression_reason(before, now).startswith("20 of 20 answers refused")


def moved(*versions: int) -> list[Move]:
    """Return the history of a name with these champions in order."""
    before: int | None = None
    moves = []
    for version in versions:
        moves.append(Move("champion", version, before, 0.0, "me", "", False))
        moves.append(Move("previous", before, None, 0.0, "me", "", False))
        before = version
    return moves


def test_a_release_that_was_returned_to_is_not_held_against_an_older_one() -> None:
    assert predecessor([]) is None
    assert predecessor(moved(1)) is None
    assert predecessor(moved(1, 2)) == (2, 1)
    assert predecessor(moved(1, 2, 3, 2)) is None  # 3 was rolled back
    assert predecessor(moved(1, 2, 3, 2, 4)) == (4, 2)


@pytest.mark.proof
def test_false_alarms_over_a_life(record_property: Callable[[str, object], None]) -> None:
    """In 1,000 lives of 1,000 answers, looked at 20 times, five alarms of 1 % each are false in at most 5 %."""
    lives = 1000
    found = [alarm for seed in range(10_000, 10_000 + lives) if (alarm := life(seed, 1000, looks=20))]
    record_property("lives of an equally good release", lives)
    record_property("answers in each", 1000)
    record_property("false rollbacks", len(found))
    assert len(found) <= 0.05 * lives


@pytest.mark.proof
def test_how_soon_it_is_noticed(record_property: Callable[[str, object], None]) -> None:
    for words, change in (
        ("three times the errors, 9 %", {"errors": 0.09}),
        ("10 % of answers refuse", {"refused": 0.15}),
        ("answers twice as long", {"longer": 2.0}),
    ):
        after = [found[0] for seed in range(20_000, 20_200) if (found := life(seed, 1000, looks=20, **change))]
        record_property(f"{words}: rolled back in lives of 200", len(after))
        record_property(f"{words}: answers until then, at the median", sorted(after)[len(after) // 2])
        assert len(after) >= 190

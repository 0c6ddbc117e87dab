"""The router of texts: what it learns, when it abstains, how long it takes."""

import random
import statistics
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.routing.text_router import (
    MAX_HARM,
    MIN_CERTIFIED,
    READ_CHARS,
    RoutedText,
    TextRouter,
    features_of,
    harm_bound,
    learn_router,
    read_part,
    route_text,
)

THINGS = ("printer", "disk", "network", "password", "screen", "kernel", "mail", "backup")


def texts(cue: str, gains: dict[str, float], count: int, *, seed: int) -> list[RoutedText]:
    """Half of them held out."""
    said = random.Random(seed)
    return [
        RoutedText(f"{cue} what of the {said.choice(THINGS)} and the {said.choice(THINGS)}?", gains, n % 2 == 0)
        for n in range(count)
    ]


def learned(*, cue: bool = True, seed: int = 0) -> TextRouter:
    """Two domains of the same questions, each with an expert that is better on its own and worse on the other."""
    rows = texts("code" * cue, {"coder": 0.3, "tester": -0.4}, 200, seed=seed)
    rows += texts("test" * cue, {"coder": -0.4, "tester": 0.3}, 200, seed=seed + 1)
    return learn_router(rows, ["coder", "tester"])


def test_a_cue_is_found() -> None:
    router = learned()
    assert all(expert.threshold is not None for expert in router.specialists)
    for cue, expert in (("code", "coder"), ("test", "tester")):
        found = [route_text(router, row.text).specialist for row in texts(cue, {}, 100, seed=7)]
        assert found.count(expert) >= 98


def test_the_same_questions_without_a_cue_are_nobodys() -> None:
    router = learned(cue=False)
    assert all(expert.threshold is None and expert.why_not for expert in router.specialists)
    assert {route_text(router, row.text).specialist for row in texts("", {}, 50, seed=9)} == {None}


def test_texts_of_another_kind_are_left_alone() -> None:
    router = learned()
    outside = ("What is the capital of France?", "Schreibe mir ein Gedicht", "2 + 2 = ?", "", "\ud800", "写一首诗")
    assert {route_text(router, text).specialist for text in outside} == {None}
    assert (
        "code" in route_text(router, "code " * 50_000).reason
        or "characters" in route_text(router, "code " * 50_000).reason
    )


def test_few_held_out_rows_certify_nothing() -> None:
    rows = texts("code", {"coder": 0.3}, 2 * MIN_CERTIFIED - 4, seed=0)
    (expert,) = learn_router(rows, ["coder"]).specialists
    assert expert.threshold is None and str(MIN_CERTIFIED) in expert.why_not


def test_the_bound_of_harm() -> None:
    """By the tables of Clopper and Pearson, one-sided 95 %."""
    assert harm_bound(0, MIN_CERTIFIED) <= MAX_HARM < harm_bound(0, MIN_CERTIFIED - 1)
    assert abs(harm_bound(1, 93) - 0.05) < 1e-3
    assert harm_bound(0, 0) == harm_bound(5, 5) == 1.0
    assert harm_bound(200, 5000) < 0.05


@given(st.text(max_size=3 * READ_CHARS))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read(text: str) -> None:
    part = read_part(text)
    numbers = features_of(part)
    assert len(part) <= 2 * READ_CHARS + 1 and len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 << 17 for number in numbers)
    route_text(ROUTER, text)


ROUTER = learned()


def test_a_decision_takes_less_than_a_millisecond() -> None:
    """The 99th percentile is a proof's business; the median bears a busy machine."""
    said = random.Random(1)
    long = [" ".join(said.choice(THINGS) + str(said.randrange(99)) for _ in range(150)) for _ in range(200)]
    seconds = []
    for text in long:
        started = time.perf_counter()
        route_text(ROUTER, text[: ROUTER.longest])
        seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds) < 1e-3

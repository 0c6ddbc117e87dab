"""Clusters of texts: planted topics are found and named, one heap gives none, whatever the texts are."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.specialists.suggest import clusters_of

TOPICS = {
    "redis": "redis stream cluster shard key expire",
    "selinux": "selinux policy label context boolean audit",
    "pods": "pod node container image volume port",
}
COMMON = [f"word{number}" for number in range(40)]


def heap(seed: int, count: int) -> list[str]:
    """Words by their ranks, as in any language: a few of them in most texts."""
    chosen = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(COMMON) + 1)]
    return [" ".join(chosen.choices(COMMON, weights, k=chosen.randint(5, 12))) for _ in range(count)]


def on_topics(count: int) -> tuple[list[str], list[str]]:
    chosen = random.Random(0)
    names = [name for number in range(count) for name in [list(TOPICS)[number % 3]]]
    noise = heap(1, count)
    return [
        f"{text} {' '.join(chosen.sample(TOPICS[name].split(), 3))}" for text, name in zip(noise, names, strict=True)
    ], names


def test_planted_topics_are_found_and_named() -> None:
    texts, names = on_topics(240)
    found = clusters_of(texts)
    assert [len(cluster.texts) for cluster in found] == [80, 80, 80]
    for cluster in found:
        (topic,) = {names[number] for number in cluster.texts}
        assert {word for word, _, _ in cluster.words} <= set(TOPICS[topic].split())
        assert all(own > 0 and other == 0 for _, own, other in cluster.words)
        assert all(part in TOPICS[topic].split() for part in cluster.name.split("-"))
    assert clusters_of(texts) == found


def test_one_heap_gives_none() -> None:
    assert [clusters_of(heap(seed, 200)) for seed in (2, 3)] == [[], []]


def test_the_same_text_again_and_again_gives_none() -> None:
    assert clusters_of(["how do I restart it?"] * 300) == []


@settings(max_examples=10, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=60))
def test_any_texts(texts: list[str]) -> None:
    found = clusters_of(texts)
    numbers = [number for cluster in found for number in cluster.texts]
    assert len(set(numbers)) == len(numbers) <= len(texts)

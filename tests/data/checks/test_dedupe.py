"""Duplicates: exact ones by content, near ones as MinHash over word triples estimates them."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path

from conftest import chat
from data.prepare.faults import WORDS
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.config import DataConfig
from hivetune.data.checks.dedupe import NUM_PERM, Table, bands_for, near_duplicates, signature
from hivetune.data.prepare.prepare import check
from hivetune.data.rows.read import content_id
from hivetune.records import Message


@settings(derandomize=True)
@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(1, 50), max_size=300))
def test_the_table_is_a_dict(keys: list[int]) -> None:
    table, reference = Table(), {}
    for value, key in enumerate(keys):
        expected = reference.setdefault(key or 1, value)
        assert table.put(key, value) == (None if expected == value else expected)


def test_the_table_grows_far_beyond_its_start() -> None:
    table = Table()
    assert all(table.put(key * 7919 + 1, key) is None for key in range(5000))
    assert all(table.put(key * 7919 + 1, 0) == key for key in range(5000))


def said(text: str) -> tuple[Message, ...]:
    return (
        Message("system", "the same for all rows"),
        Message("user", text[: len(text) // 3]),
        Message("assistant", text),
    )


def jaccard(one: str, other: str) -> float:
    def triples(text: str) -> set[tuple[str, ...]]:
        words = " ".join(m.content for m in said(text)[1:]).lower().split()
        return set(zip(words, words[1:], words[2:], strict=False))

    a, b = triples(one), triples(other)
    return len(a & b) / len(a | b)


def test_near_duplicates_are_those_above_the_threshold() -> None:
    """Pairs with 0 to 14 changed words. The estimate may be wrong within 4 standard errors (0.13) of the threshold."""
    rng = random.Random(5)
    texts, truth = [], {}
    for pair in range(150):
        words = [rng.choice(WORDS) for _ in range(rng.randrange(60, 120))]
        texts.append(" ".join(words))
        for _ in range(pair % 15):
            words[rng.randrange(len(words))] = f"new{rng.random()}"
        texts.append(" ".join(words))
        truth[2 * pair + 1] = jaccard(texts[-2], texts[-1])
    signatures = array("I")
    for text in texts:
        signatures.frombytes(signature(said(text)))
    found = near_duplicates(memoryview(signatures).cast("B"), 0.7)
    for row in range(0, len(texts), 2):
        assert found[row] == row
        similarity = truth[row + 1]
        if similarity > 0.83:
            assert found[row + 1] == row
        if similarity < 0.57:
            assert found[row + 1] == row + 1
    assert sum(1 for s in truth.values() if s > 0.83) > 20
    assert sum(1 for s in truth.values() if s < 0.57) > 20


def test_bands_miss_at_most_one_pair_in_a_hundred() -> None:
    for threshold in (0.5, 0.7, 0.85, 0.95):
        rows = bands_for(threshold)
        assert (1 - threshold**rows) ** (NUM_PERM // rows) <= 0.01
    assert bands_for(0.95) > bands_for(0.5)


def test_text_without_spaces_is_compared_by_characters() -> None:
    text = "".join(chr(0x4E00 + i * 7 % 900) for i in range(300))
    signatures = array("I")
    for one in (text, text[:150] + "界" + text[151:], text[::-1]):
        signatures.frombytes(signature((Message("user", one), Message("assistant", one))))
    assert list(near_duplicates(memoryview(signatures).cast("B"), 0.85)) == [0, 0, 2]


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
    words = [rng.choice(WORDS) for _ in range(100)]
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
    examples = [(e["kind"], e["source"], e["same_as"]) for e in document["duplicate_examples"]]
    assert examples == [("exact", f"{path}:2", f"{path}:1"), ("near", f"{path}:3", f"{path}:1")]
    assert check(DataConfig(path=str(path), near_duplicates=0)).usable == 3

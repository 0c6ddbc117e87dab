"""What a proof accepts and what it finds: rounding; a missing or doubled adapter, another model, NaN."""

import math
import random
import re

import pytest

from hivetune.errors import DataRefused
from hivetune.process.protocol import Passage
from hivetune.release.prove import (
    MAX_PASSAGE_TOKENS,
    POSITIONS,
    Scores,
    choose_passages,
    compare_scores,
)

PASSAGES_OF, PLACES_OF, TOKENS = 6, 10, 5


def said(change: float, noise: float, seed: int = 0, effect: float = 1.0) -> Scores:
    """A base (change 0), or what an adapter makes of it, with independent noise on each number."""
    rng, adapter, own = random.Random(1), random.Random(2), random.Random(seed)
    found = []
    for _ in range(PASSAGES_OF):
        places = []
        for _ in range(PLACES_OF):
            scores = [
                rng.uniform(-6, -1) + change * effect * adapter.gauss(0, 1) + own.gauss(0, noise) for _ in range(TOKENS)
            ]
            places.append([scores[0], list(enumerate(scores[1:], 100))])
        found.append(places)
    return found


TRAINED = {"base": said(0, 0), "tuned": said(0.5, 0)}


def test_rounding_is_accepted_and_measured() -> None:
    proof = compare_scores("f16", TRAINED, {"tuned": said(0.5, 0.01, seed=5)})
    assert proof["holds"] and proof["problems"] == [] and proof["places"] == 60
    assert proof["typical"] == pytest.approx(0.008, abs=0.002) and proof["effect"] == pytest.approx(1, abs=0.01)
    assert proof["bound"] == 0.03
    quantized = compare_scores("q4_0", TRAINED, {"tuned": said(0.5, 0.2, seed=5), "base": said(0, 0.2, seed=6)})
    assert quantized["holds"] and quantized["bound"] == pytest.approx(0.03 + 2 * quantized["base_typical"])


@pytest.mark.parametrize(
    ("exported", "words"),
    [
        (said(0.5, 0.2, seed=5), "differ by"),
        (said(0, 0.01, seed=5), "0.0. times the adapter's effect"),
        (said(0.5, 0.01, seed=5, effect=2.0), "2.0. times the adapter's effect"),
        (said(0.5, math.nan), "differ by nan"),
    ],
    ids=["another model", "no adapter", "twice the scale", "not finite"],
)
def test_what_is_not_what_was_trained_is_found(exported: Scores, words: str) -> None:
    proof = compare_scores("f16", TRAINED, {"tuned": exported})
    assert not proof["holds"] and any(re.search(words, problem) for problem in proof["problems"]), proof


def test_a_base_that_is_another_model_is_found_at_any_type() -> None:
    """Twice its own distance would excuse it."""
    other = said(0, 1.0, seed=6)
    proof = compare_scores("q8_0", TRAINED, {"tuned": said(0.5, 1.0, seed=6), "base": other})
    assert not proof["holds"] and "the base alone differs" in proof["problems"][0]


def test_a_missing_adapter_is_found_under_the_rounding_of_four_bits() -> None:
    """Its effect of 0.1 nats is half of the rounding: the size of the difference alone would not tell."""
    trained = {"base": said(0, 0), "tuned": said(0.1, 0)}
    base = said(0, 0.2, seed=6)
    assert compare_scores("q4_0", trained, {"tuned": said(0.1, 0.2, seed=6), "base": base})["holds"]
    lost = compare_scores("q4_0", trained, {"tuned": base, "base": base})
    assert lost["typical"] < lost["bound"] and lost["problems"] == [
        "0.00 times the adapter's effect arrived instead of once"
    ]


def test_an_adapter_that_changes_nothing_has_no_effect_to_lose() -> None:
    untrained = {"base": said(0, 0), "tuned": said(0, 0)}
    proof = compare_scores("f16", untrained, {"tuned": said(0, 0.001, seed=5)})
    assert proof["holds"] and proof["effect"] is None


def test_places_that_llama_cpp_does_not_report_are_counted_and_left_out() -> None:
    exported = [list(passage) for passage in said(0.5, 0.01, seed=5)]
    exported[2][3] = None
    proof = compare_scores("f16", TRAINED, {"tuned": exported})
    assert (proof["holds"], proof["places"], proof["unreported"]) == (True, 59, 1)
    assert not compare_scores("f16", TRAINED, {"tuned": [[None] * PLACES_OF] * PASSAGES_OF})["holds"]


class Snapshot:
    def __init__(self, rows: dict[str, list[tuple[bytes, bytes]]]):
        self.kept = {i: row for i, row in enumerate(row for split in rows.values() for row in split)}
        self.splits = {split: [i for i, row in self.kept.items() if row in rows[split]] for split in rows}

    def rows(self, split: str) -> list[int]:
        return self.splits.get(split, [])

    def length(self, row: int) -> int:
        return len(self.kept[row][0])

    def tokens(self, row: int) -> memoryview:
        return memoryview(self.kept[row][0])

    def trained(self, row: int) -> memoryview:
        return memoryview(self.kept[row][1])


def test_passages_are_the_beginning_and_the_end_of_last_answers_held_out_ones_first() -> None:
    held_out = (bytes(range(40)), bytes([0] * 5 + [1] * 3 + [0] * 10 + [1] * 20 + [0] * 2))
    trained = (bytes(range(50, 56)), bytes([0, 0, 1, 1, 0, 0]))
    found = choose_passages(Snapshot({"train": [trained], "test": [held_out]}))
    assert found == [
        Passage(tuple(range(38)), (*range(18, 18 + POSITIONS), 37)),
        Passage((50, 51, 52, 53), (2, 3)),
    ]
    long = (bytes(MAX_PASSAGE_TOKENS + 1), bytes([1] * (MAX_PASSAGE_TOKENS + 1)))
    assert choose_passages(Snapshot({"train": [trained], "test": [held_out]}), 38) == found[1:]  # a context of 38
    with pytest.raises(DataRefused, match="every row is longer"):
        choose_passages(Snapshot({"test": [long]}))

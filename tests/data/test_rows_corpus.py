"""The corpus of rows: a sample of it reads as before; each kind of difference is told."""

import copy
import random
from typing import Any

import corpus
import pytest

NUM_SAMPLED = 120  # of 250; `make corpus` replays all
FILE = '{"prompt": "Where is it?", "completion": "In the shed."}\n{"prompt": "Who?"}\n'
CASE: dict[str, Any] = {"id": "c", "files": [["a.jsonl", FILE]]}


def test_a_sample_of_the_corpus_reads_as_before() -> None:
    sample = random.Random(38).sample(corpus.load_cases(), NUM_SAMPLED)
    assert [text for case in sample for text in corpus.differences(case, corpus.read_case(case))] == []


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        (0, lambda rows: rows["a.jsonl:1"].update(by="another name")),
        (1, lambda rows: rows["a.jsonl:1"]["messages"][1].update(weight=0.5)),
        (1, lambda rows: rows.update({"a.jsonl:1": {"refused": "empty-turn"}})),
        (1, lambda rows: rows.pop("a.jsonl:1")),
        (1, lambda rows: rows["a.jsonl:2"].update(refused="not-held")),
        (1, lambda rows: rows["a.jsonl:1"].update(warnings=["nul-removed"])),
    ],
)
def test_a_difference_is_told(changes: int, change: Any) -> None:
    outcome = corpus.read_case(CASE)
    assert [turn["content"] for turn in outcome["rows"]["a.jsonl:1"]["messages"]] == ["Where is it?", "In the shed."]
    assert "refused" in outcome["rows"]["a.jsonl:2"]
    now = copy.deepcopy(outcome)
    change(now["rows"])
    assert len(list(corpus.differences({**CASE, "outcome": outcome}, now))) == changes

"""The corpus of rows: a sample of it reads as before; each kind of difference is told."""

import copy
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import corpus  # noqa: E402

NUM_SAMPLED = 120  # of 250; `make corpus` replays all


def test_a_sample_of_the_corpus_reads_as_before() -> None:
    wanted = corpus.load_wanted()
    sample = random.Random(38).sample(corpus.load_cases(), NUM_SAMPLED)
    found = [one for case in sample for one in corpus.differences(case, corpus.read_case(case))]
    assert [one for one in found if not corpus.is_wanted(one, wanted)] == []


CASE: dict[str, Any] = {
    "id": "c",
    "files": [["a.jsonl", '{"prompt": "Where is it?", "completion": "In the shed."}\n{"prompt": "Who?"}\n']],
    "data": {},
}


def read_by_hand() -> dict[str, Any]:
    return {**CASE, "outcome": corpus.read_case(CASE)}


def test_a_case_holds_conversations_reasons_and_counts() -> None:
    outcome = corpus.read_case(CASE)
    first = outcome["rows"]["a.jsonl:1"]
    assert (first["by"], [turn["content"] for turn in first["messages"]]) == (
        "prompt-completion",
        ["Where is it?", "In the shed."],
    )
    assert "refused" in outcome["rows"]["a.jsonl:2"]
    assert (outcome["counts"]["rows_in"], outcome["counts"]["usable"]) == (2, 1)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("read otherwise", lambda now: now["rows"]["a.jsonl:1"]["messages"][1].update(weight=0.5)),
        ("refused now", lambda now: now["rows"].update({"a.jsonl:1": {"refused": "no-answer"}})),
        ("refused now", lambda now: now["rows"].pop("a.jsonl:1")),
        ("read now", lambda now: now["rows"].update({"a.jsonl:2": now["rows"]["a.jsonl:1"]})),
        ("other reason", lambda now: now["rows"]["a.jsonl:2"].update(refused="no-question")),
        ("other warnings", lambda now: now["rows"]["a.jsonl:1"].update(warnings=["nul-removed"])),
        ("other counts", lambda now: now["counts"].update(usable=2)),
    ],
)
def test_each_kind_of_difference_is_told(kind: str, change: Any) -> None:
    case = read_by_hand()
    now = copy.deepcopy(case["outcome"])
    assert list(corpus.differences(case, now)) == []
    change(now)
    [one] = corpus.differences(case, now)
    assert one.kind == kind
    assert corpus.is_wanted(one, [{"kind": kind, "case": "c", "why": "a test"}])
    assert not corpus.is_wanted(one, [{"kind": kind, "case": "another", "why": "a test"}])


def test_another_name_of_a_layout_is_no_difference() -> None:
    case = read_by_hand()
    now = copy.deepcopy(case["outcome"])
    now["rows"]["a.jsonl:1"]["by"] = "named-otherwise"
    assert list(corpus.differences(case, now)) == []

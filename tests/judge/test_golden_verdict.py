"""The verdicts on the evaluations in the home of version 0.1.0: every metric with its interval, to nine digits.

To accept a wanted change, run this file with HIVETUNE_WRITE_GOLDEN=1 and say in CHANGELOG.md what changed.
"""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hivetune.judge.findings import Thresholds
from hivetune.judge.gate import judge, verdict_document

HOME = Path(__file__).parents[1] / "contract" / "home-0.1.0.tar.xz"
GOLDEN = Path(__file__).parent / "golden" / "verdicts.json"
EVALUATIONS = ("plain/eval.json", "home/releases/demo/1/eval.json")


def verdict_on(name: str) -> dict[str, Any]:
    with tarfile.open(HOME) as archive:
        member = archive.extractfile(f"hivetune-contract/{name}")
        assert member is not None
        evaluation = json.load(member)
    text = json.dumps(verdict_document(judge(evaluation, Thresholds())))
    document: dict[str, Any] = json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))
    return {"verdict": document["verdict"], "metrics": document["metrics"]}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_verdict_is_what_it_was(name: str) -> None:
    document = verdict_on(name)
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    if os.environ.get("HIVETUNE_WRITE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps({**known, name: document}, indent=1) + "\n", encoding="utf-8")
        return
    assert document == known[name]

"""Sample files of public projects and logs in their own shape: what a person would use is used, and read rightly.

`samples.jsonl` holds, for each file, up to four of its rows with other words in them (keys, roles, ids and structure
stay), how many a person who looked at the file would use (`usable`), and what must come of each row (`said`): the
reason of a refusal, or the conversation as [role, hash of the text, number of calls, weight]. Set A was looked at
while the layouts were made; B to F were read once by finished code before anything was changed (docs/log.md).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hivetune.data.checks.rules import check_messages
from hivetune.data.intake.files import plan_inputs
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import RawRow, read_example, read_rows

SAMPLES = Path(__file__).parent / "samples.jsonl"
LEAST_USABLE = 0.95  # of the rows that a person would use


def outcomes(text: str, folder: Path) -> list[Any]:
    """What becomes of each row of a file with this text."""
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return [outcome(raw) for chunk in plan_inputs(str(path), folder).chunks for raw in read_rows(chunk)]


def outcome(raw: RawRow) -> Any:
    try:
        found = read_example(raw, {}).example
        check_messages(found.messages)
    except RowRefused as error:
        return error.reason
    if found.success is False or found.untrusted:
        return "set aside"
    return [[m.role, _hash(m.content), len(m.tool_calls), m.weight] for m in found.messages]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def samples() -> list[dict[str, Any]]:
    with open(SAMPLES, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_samples_of_projects(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    wrong, counts = [], Counter[str]()
    for number, sample in enumerate(samples()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = outcomes(sample["text"], folder)
        if len(found) != len(sample["said"]):
            wrong.append(f"{sample['name']}: {len(found)} rows instead of {len(sample['said'])}")
        learned = [(a, b) for a, b in zip(found, sample["said"], strict=False) if isinstance(a, list)]
        wrong += [f"{sample['name']}: {a} instead of {b}" for a, b in learned if a != b]
        counts.update(files=1, rows=len(found), person_would_use=sample["usable"])
        counts["of_them_used"] += min(sample["usable"], len(learned))
    projects = len({sample["project"] for sample in samples()})
    for name, value in {"projects": projects, **counts, "learned_wrongly": len(wrong)}.items():
        record_property(name, str(value))
    assert not wrong
    assert counts["of_them_used"] >= LEAST_USABLE * counts["person_would_use"]
    assert projects >= 12

"""Archives of Inspect's logs; what other logs of evaluations hold stands in tests/data/formats/samples."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

Q, A = "How long may I return shoes?", "You may return them for thirty days."
TURNS = [{"role": "user", "content": Q}, {"role": "assistant", "content": A}]
SAID = [("user", Q), ("assistant", A)]


def sample(value: Any, **more: Any) -> dict[str, Any]:
    output = {"choices": [{"message": TURNS[1], "stop_reason": "stop"}]}
    scores = {"includes": {"value": value, "answer": A}}
    return {"id": 1, "epoch": 1, "input": Q, "target": "thirty", "messages": TURNS, "output": output} | {
        "scores": scores,
        "events": [],
        "attachments": {},
        **more,
    }


def read(path: Path) -> list[Any]:
    found: list[Any] = []
    for raw in rows_of_files([str(path)]):
        try:
            example = read_example(raw, {}).example
            found.append(([(m.role, m.content) for m in example.messages], example.success))
        except RowRefused as refused:
            found.append(refused.reason)
    return found


def test_an_archive_of_inspect(tmp_path: Path) -> None:
    path = tmp_path / "shop.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json.dumps({"version": 2, "eval": {}}))
        archive.writestr("samples/1_epoch_1.json", json.dumps(sample("C")))
        archive.writestr("samples/2_epoch_1.json", json.dumps(sample("I")))
        archive.writestr("samples/3_epoch_1.json", '{"messages": [')
    assert read(path) == [(SAID, True), (SAID, False), "broken-file"]


def test_another_archive_is_still_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rows.txt", "text")
    with pytest.raises(UsageError):
        read(path)

"""Logs that were packed and cut, or joined with other files: what can be read is read, and no loss is silent."""

import json
from pathlib import Path

import pytest
from test_formats import SAMPLES, format_of

from hivetune.data.files.inputs import plan_inputs
from hivetune.data.formats import all_formats
from hivetune.data.pieces.format import Log

LOGS = [one.name for one in all_formats() if isinstance(one, Log)]
MORE = [{"question": f"what is the size of boot {n}?", "answer": f"it is the size {n}"} for n in range(30)]
MORE += [{"type": "open_qa", "prompt": f"what is {n}?", "completion": f"it is {n}"} for n in range(3)]
MORE += [{"type": "chat", "messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}]


@pytest.mark.parametrize(
    "sample", [one for one in SAMPLES if format_of(one) in LOGS and one.suffix == ".jsonl"], ids=lambda one: one.name
)
def test_rows_behind_a_log_in_one_file_are_rows(sample: Path, tmp_path: Path) -> None:
    """As of files that were joined. A log's reader left out what it does not know, and nobody counted it."""
    lines = sample.read_text(encoding="utf-8").rstrip("\n").split("\n")
    path = tmp_path / sample.name
    path.write_text("\n".join([*lines * (20 // len(lines) + 1), *map(json.dumps, MORE)]), encoding="utf-8")
    raws = list(plan_inputs(str(path), tmp_path).rows())
    read = [raw.payload.decode() for raw in raws]
    assert set(map(json.dumps, MORE)) <= set(read)

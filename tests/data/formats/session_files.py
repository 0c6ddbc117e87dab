"""Files of sessions for the tests beside: written as the program writes them, and read as `data check` does."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivetune.data.files.inputs import plan_inputs
from hivetune.data.read import ExaminedRow, read_example
from hivetune.data.reasons import RowRefused


def read(path: Path, tmp_path: Path) -> dict[str, ExaminedRow | str]:
    """Each row of a file by its place: what was read, or the reason why not."""
    found: dict[str, ExaminedRow | str] = {}
    spill = tmp_path / "spill"
    spill.mkdir(exist_ok=True)
    for raw in plan_inputs(str(path), spill).rows():
        place = raw.source.rpartition(":")[2]
        try:
            found[place] = read_example(raw, {})
        except RowRefused as error:
            found[place] = error.reason
    return found


def said(row: ExaminedRow | str) -> list[tuple[str, str]]:
    assert isinstance(row, ExaminedRow), row
    return [(m.role, m.content) for m in row.example.messages]


def write(path: Path, events: Sequence[Any]) -> Path:
    path.write_text("".join(e if isinstance(e, str) else json.dumps(e) + "\n" for e in events), encoding="utf-8")
    return path

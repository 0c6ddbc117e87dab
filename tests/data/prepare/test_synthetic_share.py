"""Synthetic rows beside others: at most the share, drawn by content, counted; alone they are all used."""

import json
from pathlib import Path
from typing import Any

import pytest
from data.conftest import written

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check


def write(path: Path, real: int, made: int) -> Path:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Question {n} of a person?", "completion": f"Reply {n * 7}."} for n in range(real)
    ]
    for n in range(made):
        rows.append({"messages": [{"role": "user", "content": f"What is option {n} good for?"},
                                  {"role": "assistant", "content": f"It sets the number {n * 13}."}],
                     "synth": {"maker": "templates", "kind": "meaning"}})  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("real", "made", "kept"), [(20, 50, 20), (20, 10, 10), (0, 30, 30)])
def test_share(real: int, made: int, kept: int, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", real, made)
    document = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert document["synthetic"] == {"rows": kept, "others": real}
    assert document["set_aside"].get("quota", 0) == made - kept
    assert document["usable"] == real + kept == document["rows_in"] - (made - kept)


def test_the_same_rows_are_drawn_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 5, 40)
    turned = tmp_path / "turned.jsonl"
    turned.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")

    drawn, drawn_turned = (written(file, near_duplicates=0)["passed"] for file in (path, turned))
    assert len(drawn) == 10 and drawn == drawn_turned[::-1]
